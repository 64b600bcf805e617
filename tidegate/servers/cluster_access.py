"""Access to the API server of a Kubernetes cluster: its address, and what a process shows to prove its identity.

In a pod both come from the service account that Kubernetes mounts; outside of one, from the configuration, for example
the address of `kubectl proxy`. The token is read again for each request, since Kubernetes replaces the file about once
an hour; the CA file is read again when it changes.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.config import ConfigError
from tidegate.servers.address import format_address

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where every pod finds its own
MAX_TOKEN_BYTES: Final = 65_536


class AccessFailed(Exception):
    """The token or the CA file cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class ApiAddress:
    """Where the API server is, and how this process proves who it is. Paths that are None are not used."""

    server: str
    namespace: str
    token_file: Path | None
    ca_file: Path | None


def api_address(
    server: str | None,
    namespace: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    environ: Mapping[str, str],
    account: Path = ACCOUNT,
) -> ApiAddress:
    """As configured; what is not is the pod's own service account.

    Raises:
        ConfigError: there is neither a server in the configuration nor a cluster around this process.
    """
    if server is not None:
        if namespace is None:
            raise ConfigError("with server, the key namespace is needed")
        return ApiAddress(server.rstrip("/"), namespace, token_file, ca_file)
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "this process runs in no pod (KUBERNETES_SERVICE_HOST is not set): set server, such as the "
            "http://127.0.0.1:8009 of `kubectl proxy --port 8009`"
        )
    if namespace is None:
        namespace = _text(account / "namespace")
    own = f"https://{format_address(host, int(port))}"
    return ApiAddress(own, namespace, token_file or account / "token", ca_file or account / "ca.crt")


class ClusterCredentials:
    """The token and the trusted CA of requests to the API server, as they are in the files now."""

    def __init__(self, address: ApiAddress) -> None:
        self._address = address
        self._tls: tuple[tuple[int, int, int], ssl.SSLContext] | None = None

    def headers(self) -> dict[str, str]:
        """Raises AccessFailed: there is a token's file and it cannot be read."""
        token_file = self._address.token_file
        if token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {_text(token_file)}"}
        except ConfigError as error:
            raise AccessFailed(str(error)) from error

    def context(self) -> ssl.SSLContext | bool:
        """The trusted CA; True: the machine's trusted CAs. Raises AccessFailed: the file was never usable."""
        ca_file = self._address.ca_file
        if ca_file is None:
            return True
        try:
            found = ca_file.stat()
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if self._tls is None or self._tls[0] != stamp:
                self._tls = stamp, ssl.create_default_context(cafile=str(ca_file))
        except (OSError, ssl.SSLError) as error:
            if self._tls is None:
                raise AccessFailed(f"the CA file {ca_file} cannot be used: {error}") from error
        return self._tls[1]

    def __repr__(self) -> str:
        return f"<ClusterCredentials {self._address.server} {self._address.token_file or 'no token'}>"


def own_environment() -> Mapping[str, str]:
    """The environment of this process, in which Kubernetes says where its API is."""
    return os.environ


def _text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(f"cannot read {path}: {words}") from error
    if not text or len(text.split()) != 1:
        raise ConfigError(f"{path} should hold one word")
    return text
