"""The client of a running gateway's admin port, for operators' commands, with the credential from the environment.

The key is no option of a command: options stand in process lists and in shell histories. Without a key a request that
changes something shows the operator's token, whose file on this machine is found by the port.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from ssl import SSLCertVerificationError, get_server_certificate
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import click

from tidegate.security.certificate_identity import DOMAIN
from tidegate.servers.address import format_address
from tidegate.servers.operator_token import FILE_VARIABLE, token_for

KEY_VARIABLE: Final = "TIDEGATE_API_KEY"
WITHIN_S: Final = 5.0
DEFAULT_ADMIN: Final = "http://127.0.0.1:8003"
_MAX_WORDS: Final = 2000
_REFUSED: Final = (401, 403)
_OTHER_NAME: Final = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL

admin_option = click.option(
    "--admin",
    default=DEFAULT_ADMIN,
    show_default=True,
    envvar="TIDEGATE_ADMIN",
    show_envvar=True,
    help="Address of the gateway's admin port.",
)


class AdminError(click.ClickException):
    """The gateway refused the request or did not answer; `status` is its HTTP status, 0 without an answer."""

    def __init__(self, words: str, status: int = 0, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status = status
        self.headers = headers or {}


def _distrust(address: str, error: SSLCertVerificationError, within_s: float) -> str:
    """Why the certificate is not believed, with the way out."""
    if error.verify_code not in _OTHER_NAME:
        words = f"{error.verify_message}: SSL_CERT_FILE names the CA's certificate to believe"
        return f"the certificate of {address} is not trusted: {words}"
    parts = urlsplit(address)
    names = _names_of(parts.hostname or "", parts.port or 443, within_s)
    other = names[0] if names else "NAME"
    return (
        f"the certificate of {address} is for {', '.join(names) or 'other names'} and not for {parts.hostname}: "
        f"call it by a name that it has (--admin https://{format_address(other, parts.port or 443)}), or issue one "
        f"that has this name too (`tidegate pki issue … --host {parts.hostname}`)"
    )


def _names_of(host: str, port: int, within_s: float) -> list[str]:
    """The names in the certificate that is shown there, believed or not; none where it cannot be read."""
    from cryptography import x509  # an operators' dependency, wanted only where something is wrong

    try:
        shown = x509.load_pem_x509_certificate(get_server_certificate((host, port), timeout=within_s).encode())
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    hosts = [one for one in names.get_values_for_type(x509.DNSName) if not one.endswith(f".{DOMAIN}")]
    return [*hosts, *map(str, names.get_values_for_type(x509.IPAddress))]


class _StayHere(HTTPRedirectHandler):
    """A key is for the address that was named, wherever that one points."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class AdminAnswer:
    """An answer that is being read, whole or line by line; each of both raises AdminError where it breaks off."""

    def __init__(self, address: str, response: Any) -> None:
        self.headers: Mapping[str, str] = response.headers
        self._address = address
        self._response = response

    def read(self) -> bytes:
        with self._received():
            whole: bytes = self._response.read()
            return whole

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._received():
                line: bytes = self._response.readline()
            if not line:
                return
            yield line

    @contextlib.contextmanager
    def _received(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, HTTPException) as error:
            raise AdminError(f"the answer of the gateway at {self._address} broke off: {error}") from error

    def __repr__(self) -> str:
        return f"<AdminAnswer of {self._address}>"


class Admin:
    """One gateway's admin port."""

    def __init__(self, address: str, *, within_s: float = WITHIN_S) -> None:
        self.address = address.rstrip("/")
        self._within_s = within_s

    def ask(
        self, path: str, *, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """The answer's body and headers. Raises AdminError: no answer, or a status of 400 or more."""
        with self.answer(path, method=method, body=body, headers=headers) as response:
            return response.read(), response.headers

    @contextlib.contextmanager
    def answer(
        self, path: str, *, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[AdminAnswer]:
        """The same, as a stream. Raises AdminError; an error of the block's own is not the gateway's, and stays."""
        key = os.environ.get(KEY_VARIABLE) or (None if method in ("GET", "HEAD") else self._operator_token())
        shown = {"Authorization": f"Bearer {key}"} if key else {}
        typed = {} if body is None else {"Content-Type": "application/octet-stream"}
        try:
            request = Request(self.address + path, body, {**typed, **shown, **(headers or {})}, method=method)
            response = build_opener(_StayHere).open(request, timeout=self._within_s)
        except HTTPError as error:
            with error:  # closes its connection
                words = self._words(error)
            raise AdminError(words, error.code, dict(error.headers)) from error
        except (URLError, OSError, ValueError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, SSLCertVerificationError):
                raise AdminError(_distrust(self.address, reason, self._within_s)) from error
            raise AdminError(
                f"no gateway answers at {self.address}: {reason}; --admin says where one is (its `admin_port`)"
            ) from error
        with response:
            yield AdminAnswer(self.address, response)

    def read(self, path: str) -> Any:
        return self._decoded(self.ask(path)[0])

    def post(self, path: str, body: bytes) -> Any:
        return self._decoded(self.ask(path, method="POST", body=body)[0])

    def put(self, path: str, body: bytes) -> Any:
        return self._decoded(self.ask(path, method="PUT", body=body)[0])

    def _operator_token(self) -> str | None:
        try:
            return token_for(self.address)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            named = os.environ.get(FILE_VARIABLE, "")
            raise AdminError(
                f"cannot use {named!r} ({FILE_VARIABLE}): {reason}; unset it, or name the token file of the gateway"
            ) from error

    def _decoded(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError as error:
            raise AdminError(f"what answers at {self.address} is no gateway of ours: {error}") from error

    def _words(self, error: HTTPError) -> str:
        text = error.read(_MAX_WORDS).decode(errors="replace").strip()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(text)["error"])
        text = text.removeprefix(f"{error.code}: ")  # as the server words what it has no route for
        # A gateway without `auth` says where its token is; any other wants a key, whatever it says.
        if error.code in _REFUSED and "operator's token" not in text:
            text = f"put a key with the right `admin` into {KEY_VARIABLE}"
        return f"the gateway at {self.address} answers {error.code}: {text or error.reason}"

    def __repr__(self) -> str:
        return f"<Admin {self.address}>"
