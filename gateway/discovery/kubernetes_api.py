"""The Kubernetes API as far as discovery needs it: list the EndpointSlices of one Service, and watch them.

These are two GET requests, so they are made with aiohttp, which the gateway has anyway: a client library would bring
dozens of packages and generated models to decode what `endpoint_slices.py` decodes in twenty lines.

The service account's token is read again for each request, since Kubernetes replaces the file about once an hour; the
CA file is read again when it changes. Everything read is bounded in size and in time, and no redirect is followed: it
could take the token elsewhere.

Source: Kubernetes API concepts, "Efficient detection of changes", "Watch bookmarks", "Retrieving large results sets in
chunks", "410 Gone responses".
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from gateway.discovery.endpoint_slices import (
    MOST_ENDPOINTS,
    BadObject,
    EndpointSlice,
    EndpointSliceList,
    Status,
    WatchEvent,
    decode,
)
from tidegate.config import ConfigError
from tidegate.servers.address import format_address

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where every pod finds its own
PAGE: Final = 250  # slices; an API server answers no more than some MB at once
MAX_PAGE_BYTES: Final = 16 * 2**20
MAX_EVENT_BYTES: Final = 4 * 2**20  # etcd holds no object of more than 1.5 MiB
MAX_TOKEN_BYTES: Final = 65_536
MOST_PAGES: Final = 256
_WORDS: Final = 240
Request = AbstractAsyncContextManager[aiohttp.ClientResponse]
_RULE: Final = "apiGroups [discovery.k8s.io], resources [endpointslices], verbs [get, list, watch]"


class ApiFailed(Exception):
    """The API server could not be asked, or has refused; the message says why and what helps."""


class ApiGone(ApiFailed):
    """The version that a watch should begin at is too old (410): list again."""


class ApiUnreadable(ApiFailed):
    """The API server said what cannot be read or has ended a watch with an error: list again, later."""


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


class KubernetesApi:
    """`async with` holds the connections.

    Args:
        timeout_s: for a whole list, and for a watch to begin.
    """

    def __init__(self, address: ApiAddress, service: str, timeout_s: float) -> None:
        self._address = address
        self._service = service
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._tls: tuple[tuple[int, int, int], ssl.SSLContext] | None = None

    async def __aenter__(self) -> KubernetesApi:
        self._session = aiohttp.ClientSession(trust_env=False, read_bufsize=2**16)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def fetch_all(self) -> tuple[list[EndpointSlice], str]:
        """Every slice of the Service, and the version from which to watch. Raises ApiFailed."""
        slices: list[EndpointSlice] = []
        page = ""
        for _ in range(MOST_PAGES):
            more = {"limit": str(PAGE), **({"continue": page} if page else {})}
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = decode(EndpointSliceList, await self._get(more))
            except BadObject as error:
                raise ApiUnreadable(f"what the API server listed cannot be read: {error}") from error
            except TimeoutError as error:
                raise ApiFailed(f"the API server gave no list within {self._timeout_s:g} s") from error
            slices += found.items or ()
            if sum(len(one.endpoints or ()) for one in slices) > MOST_ENDPOINTS:
                raise ApiUnreadable(f"the Service has more than {MOST_ENDPOINTS} endpoints")
            page = found.metadata.next_page
            if not page:
                return slices, found.metadata.resource_version
        raise ApiFailed(f"the API server has more than {MOST_PAGES} pages of EndpointSlices")

    async def watch(self, version: str, for_s: int) -> AsyncGenerator[WatchEvent | None, None]:
        """Events after this version, for so many seconds or until the connection is cut; None first, once it stands.

        Raises:
            ApiGone: the version is too old.
            ApiUnreadable: the server said what cannot be read.
            ApiFailed: the server could not be asked.
        """
        more = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(for_s),
        }
        # A watch may be silent for all its time, and no longer: then the connection is broken.
        timeout = aiohttp.ClientTimeout(total=None, connect=self._timeout_s, sock_read=for_s + self._timeout_s)
        stood = False
        try:
            async with asyncio.timeout(self._timeout_s) as until, self._request(more, timeout) as response:
                await self._check(response)
                until.reschedule(None)
                stood = True
                yield None
                async for line in _lines(response.content):
                    yield self._event(line)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError too
            if not stood:
                raise ApiFailed(_words(error)) from error

    def _event(self, line: bytes) -> WatchEvent:
        try:
            event = decode(WatchEvent, line)
            if event.type != "ERROR":
                return event
            status = decode(Status, event.object)
        except BadObject as error:
            raise ApiUnreadable(f"an event of the watch cannot be read: {error}") from error
        if status.code == 410:
            raise ApiGone("the version is too old")
        raise ApiUnreadable(f"the watch has failed: {status.code} {(status.message or '')[:_WORDS]}")

    async def _get(self, more: Mapping[str, str]) -> bytes:
        try:
            async with self._request(more, aiohttp.ClientTimeout(total=self._timeout_s)) as response:
                await self._check(response)
                return await _bounded(response.content, MAX_PAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ApiFailed(_words(error)) from error

    def _request(self, more: Mapping[str, str], timeout: aiohttp.ClientTimeout) -> Request:
        assert self._session is not None, "enter the API first"
        where = self._address
        url = f"{where.server}/apis/discovery.k8s.io/v1/namespaces/{where.namespace}/endpointslices"
        selector = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        return self._session.get(
            url,
            params={**selector, **more},
            headers={"Accept": "application/json", **self._credentials()},
            ssl=self._context(),
            timeout=timeout,
            allow_redirects=False,
        )

    def _credentials(self) -> dict[str, str]:
        token_file = self._address.token_file
        if token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {_text(token_file)}"}
        except ConfigError as error:
            raise ApiFailed(str(error)) from error

    def _context(self) -> ssl.SSLContext | bool:
        """True: the machine's trusted CAs."""
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
                raise ApiFailed(f"the CA file {ca_file} cannot be used: {error}") from error
        return self._tls[1]

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        body = await _bounded(response.content, 65_536)
        try:
            said = (decode(Status, body).message or "")[:_WORDS]
        except BadObject:
            said = body[:_WORDS].decode(errors="replace")
        where = self._address
        match response.status:
            case 410:
                raise ApiGone(said or "the version is too old")
            case 401:
                raise ApiFailed(
                    f"401: the API server does not accept the token of {where.token_file or 'nobody'}: {said}"
                )
            case 403:
                raise ApiFailed(
                    f"403: the service account may not do this in the namespace {where.namespace}. It needs a Role "
                    f"with {_RULE}, and a RoleBinding: deploy/kubernetes/gateway-rbac.yaml. The API server said: {said}"
                )
            case 404:
                raise ApiFailed(f"404: {where.server} has no EndpointSlices of discovery.k8s.io/v1: {said}")
        raise ApiFailed(f"the API server said {response.status}: {said}")

    def __repr__(self) -> str:
        return f"<KubernetesApi {self._address.server} {self._address.namespace}/{self._service}>"


async def _bounded(content: aiohttp.StreamReader, most: int) -> bytes:
    """Raises ApiFailed for more than that."""
    parts, size = [], 0
    async for part in content.iter_any():
        size += len(part)
        if size > most:
            raise ApiUnreadable(f"the API server said more than {most} bytes at once")
        parts.append(part)
    return b"".join(parts)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Non-empty lines; the last one too, if it is not ended. Raises ApiFailed for one that is too long."""
    held = bytearray()
    async for part in content.iter_any():
        looked = len(held)
        held += part
        while (end := held.find(b"\n", looked)) >= 0:
            line = bytes(held[:end]).strip()
            del held[: end + 1]
            looked = 0
            if line:
                yield line
        if len(held) > MAX_EVENT_BYTES:
            raise ApiUnreadable(f"an event of the watch has more than {MAX_EVENT_BYTES} bytes")
    # What is left was cut off: the watch is resumed, and brings it again.


def _words(error: BaseException) -> str:
    return f"the API server cannot be asked: {type(error).__name__}: {error}".rstrip(": ")[:_WORDS]


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


def own_environment() -> Mapping[str, str]:
    """The environment of this process, in which Kubernetes says where its API is."""
    return os.environ
