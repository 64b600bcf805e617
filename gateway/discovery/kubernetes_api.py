"""The Kubernetes API as far as discovery needs it: list the EndpointSlices of one Service, and watch them.

These are two GET requests, so they are made with aiohttp, which the gateway has anyway: a client library would bring
dozens of packages and generated models to decode what `endpoint_slices.py` decodes in twenty lines.

Everything read is bounded in size and in time, and no redirect is followed: it could take the token elsewhere.

Source: Kubernetes API concepts, "Efficient detection of changes", "Watch bookmarks", "Retrieving large results sets in
chunks", "410 Gone responses".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
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
from tidegate.servers.cluster_access import AccessFailed, ApiAddress, ClusterCredentials

PAGE: Final = 250  # slices; an API server answers no more than some MB at once
MAX_PAGE_BYTES: Final = 16 * 2**20
MAX_EVENT_BYTES: Final = 4 * 2**20  # etcd holds no object of more than 1.5 MiB
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
        self._credentials = ClusterCredentials(address)

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
        try:
            headers, context = self._credentials.headers(), self._credentials.context()
        except AccessFailed as error:
            raise ApiFailed(str(error)) from error
        url = f"{where.server}/apis/discovery.k8s.io/v1/namespaces/{where.namespace}/endpointslices"
        selector = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        return self._session.get(
            url,
            params={**selector, **more},
            headers={"Accept": "application/json", **headers},
            ssl=context,
            timeout=timeout,
            allow_redirects=False,
        )

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
