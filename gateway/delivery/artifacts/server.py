"""The artefact server: devices fetch model files by digest, with ranges, at a rate that leaves room for requests.

    GET, HEAD /artifacts/sha256/DIGEST     `Range` and `If-Range`; ETag "DIGEST"; 404 for what is not here
    GET       /healthz                     200 while the process answers

**A port of its own.** A download lasts minutes and a fleet of them hours; on the inference port they would take its
connections, its drain at a stop would cut them, and its guard would require a tenant's key of a device. Here a device
shows the certificate that it has anyway, and a firewall can let devices in here and callers there. Without TLS a
credential of the gateway's `auth` is required, if that is configured; without both, every client may fetch, as with
requests.

**Not aiohttp's `web.FileResponse`.** It hands the file to the kernel, which sends as fast as the connection takes it,
so no rate could be kept. Its ETag is made of time and size instead of the content's digest, its If-Range knows dates
only, it answers a malformed `Range` with 416 instead of the whole file, it follows symbolic links, and it sends
`DIGEST.gz` in place of `DIGEST` if there is one. So pieces are read in a thread and sent one by one, each when
`BytePacer` allows it; the connection to a device that takes no bytes for half a minute is cut.

Artefacts are immutable, so any cache may keep them. Of the address only 64 hexadecimal digits reach a path.
Bit rot on this machine's disk is for the device to find: it checks every piece against the digest.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Final

import structlog
from aiohttp import web

from gateway.delivery.artifacts.byte_range import UnsatisfiableRange, byte_range, if_range_matches
from gateway.delivery.artifacts.pacing import BytePacer
from gateway.delivery.artifacts.store import DIGEST, ArtifactStore
from tidegate import clock

PIECE_BYTES: Final = 256 * 1024
STALL_S: Final = 30.0
RETRY_AFTER_S: Final = 5
ROUTE: Final = "/artifacts/sha256/{digest}"

log = structlog.get_logger(__name__)
Admit = Callable[[web.Request, ExitStack], Awaitable[None]]


class ArtifactServer:
    """Serves the store's files over HTTP. Mutable: the downloads under way.

    Args:
        admit: raises if the client may not fetch; awaited before anything is looked up. What it puts on the stack is
            left at the end of the download.
    """

    def __init__(
        self,
        store: ArtifactStore,
        *,
        admit: Admit | None = None,
        max_concurrent: int = 16,
        pace: BytePacer | None = None,
    ) -> None:
        self._store = store
        self._admit = admit
        self._max_concurrent = max_concurrent
        self._pace = pace or BytePacer()
        self.under_way = 0
        self.served_bytes = 0

    def routes(self) -> list[web.RouteDef]:
        return [web.get(ROUTE, self._get), web.get("/healthz", _healthz)]  # HEAD comes with GET

    async def _get(self, request: web.Request) -> web.StreamResponse:
        with ExitStack() as stack:
            if self._admit is not None:
                await self._admit(request, stack)
            digest = request.match_info["digest"]
            if not DIGEST.match(digest):
                raise web.HTTPNotFound(text="no such artefact: its name is a sha256, 64 digits of 0-9 and a-f")
            try:
                path = self._store.path(digest)
                descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                raise web.HTTPNotFound(text=f"no artefact {digest} here; `tidegate model push` brings it") from None
            stack.callback(os.close, descriptor)
            return await self._answer(request, digest, descriptor, os.fstat(descriptor).st_size)

    async def _answer(self, request: web.Request, digest: str, descriptor: int, size: int) -> web.StreamResponse:
        etag = f'"{digest}"'
        headers = {
            "ETag": etag,
            "Accept-Ranges": "bytes",
            "Cache-Control": "public, max-age=31536000, immutable",
            "Content-Type": "application/octet-stream",
        }
        if request.headers.get("If-None-Match", "") in (etag, "*"):
            return web.Response(status=304, headers=headers)
        asked = request.headers.get("Range", "") if if_range_matches(request.headers.get("If-Range", ""), etag) else ""
        try:
            part = byte_range(asked, size) if request.method == "GET" else None
        except UnsatisfiableRange:
            raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"}) from None
        if part is not None:
            headers["Content-Range"] = f"bytes {part[0]}-{part[0] + part[1] - 1}/{size}"
        first, count = part or (0, size)
        if request.method == "GET" and self.under_way >= self._max_concurrent:
            raise web.HTTPServiceUnavailable(
                text=f"{self.under_way} downloads are under way, the most that `artifacts.max_concurrent` allows",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        return await self._send(request, 200 if part is None else 206, headers, descriptor, first, count)

    async def _send(
        self, request: web.Request, status: int, headers: Mapping[str, str], descriptor: int, first: int, count: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = count
        if request.method == "HEAD":
            await response.prepare(request)
            return response
        self.under_way += 1
        try:
            await response.prepare(request)
            await self._pieces(response, descriptor, first, count)
            await response.write_eof()
        except TimeoutError:
            log.info("a download was cut: its device takes no bytes", device=request.remote)
            _hang_up(request)
        except ConnectionError:
            pass  # the device reconnects and resumes by range
        finally:
            self.under_way -= 1
        return response

    async def _pieces(self, response: web.StreamResponse, descriptor: int, at: int, count: int) -> None:
        while count:
            piece = await asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, count), at)
            if not piece:
                raise ConnectionError("the file became shorter")  # fewer bytes than Content-Length: cut the connection
            await clock.sleep(self._pace.wait_s(len(piece), clock.now()))
            async with asyncio.timeout(STALL_S):
                await response.write(piece)
            at, count = at + len(piece), count - len(piece)
            self.served_bytes += len(piece)

    def __repr__(self) -> str:
        return f"<ArtifactServer {self._store!r} {self.under_way} of {self._max_concurrent} under way>"


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")
