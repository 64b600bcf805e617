"""The console server on the admin port: the page and its files, a stream of snapshots, past ones, look-up by name.

    GET /                    the page; it fetches /console/*, and nothing from anywhere else
    GET /console/live        server-sent events: `history` once, then `snapshot` each second, and with ?target=ID
                             `target`, every detail of that target
    GET /console/moment?at=  the snapshot of an instant (UTC seconds) of the last five minutes; 404 before them
    GET /console/find?q=     targets by name

It shares the admin port because the page's other sources, `/v1/state` and `/debug/decisions`, are there: one place for
operators, one guard. The static page is no secret and needs no credential: a browser cannot send a key before it has a
page in which to type it. Its data needs the right that the whole port requires; the page sends the typed key, and keeps
it as long as the tab is open.

A snapshot is made once a second for all readers together, and yields to requests in between; without readers every
`moments.EVERY_S`, for the timeline. A stream ends after
`LASTS_S` and the page reconnects; it ends with its key as well (`gateway/identity/operator_access.py`). The connection
of a reader that takes nothing for `STUCK_S` is closed.
"""

from __future__ import annotations

import asyncio
import math
import mimetypes
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import structlog
from aiohttp import web

from gateway.operate.console import moments
from gateway.operate.console.moments import Moments
from gateway.operate.console.snapshot import ConsoleView
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.servers.http_connection import mark_endless

log = structlog.get_logger(__name__)

STATIC: Final = Path(__file__).parent / "static"
LASTS_S: Final = 300.0
STUCK_S: Final = 10.0
MOST_STREAMS: Final = 32
EVERY_S: Final = 1.0
_LONGEST_NAME: Final = 300

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Only this server's files are loaded and no text becomes a script: names on this page come from the network.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_files() -> dict[str, Path]:
    """Return each file of the page by the path at which it is served."""
    files = (path for path in sorted(STATIC.rglob("*")) if path.is_file())
    found = {f"/console/{path.relative_to(STATIC).as_posix()}": path for path in files}
    found["/"] = found.pop("/console/index.html")
    return found


class Console:
    """The console's routes; `async with` keeps moments. Mutable: readers, the snapshot that they share, moments."""

    def __init__(self, console_view: ConsoleView) -> None:
        self._view = console_view
        self._readers = 0
        self._made_at = float("-inf")
        self._snapshot = b""
        self._making = asyncio.Lock()
        self._moments = Moments()
        self._keeping = OwnedTask(self._keep, name="console moments")

    async def __aenter__(self) -> Console:
        self._keeping.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._keeping.aclose()

    def routes(self) -> list[web.RouteDef]:
        page = [web.get(path, _file(file)) for path, file in page_files().items()]
        return [
            *page,
            web.get("/console/live", self._live),
            web.get("/console/moment", self._moment),
            web.get("/console/find", self._find),
        ]

    async def _live(self, request: web.Request) -> web.StreamResponse:
        target_id = request.query.get("target", "")[:_LONGEST_NAME]
        if self._readers >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_STREAMS} watch already", headers={"Retry-After": "10"})
        self._readers += 1
        try:
            return await self._stream(request, target_id)
        finally:
            self._readers -= 1

    async def _stream(self, request: web.Request, target_id: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        mark_endless(request)
        await response.prepare(request)
        ends_at = clock.now() + LASTS_S
        history = {**self._view.history(), "moments": self._moments.instants}
        await _write(response, _event("history", msgspec.json.encode(history)))
        while (now := clock.now()) < ends_at:
            await _write(response, _event("snapshot", await self._current(now)))
            if target_id:
                detail = self._view.detail(target_id, now)
                told = {"id": target_id, "detail": detail}
                await _write(response, _event("target", msgspec.json.encode(told)))
            await clock.sleep(EVERY_S)
        return response

    async def _current(self, now: float) -> bytes:
        async with self._making:
            if now - self._made_at >= EVERY_S / 2:
                states = await self._view.states(lambda: clock.sleep(0.0))
                snapshot = self._view.snapshot(clock.now(), clock.utc_s(), states)
                self._snapshot = msgspec.json.encode({**snapshot, "moment": self._moments.newest})
                self._made_at = now
            return self._snapshot

    async def _keep(self) -> None:
        while True:
            await clock.sleep(moments.EVERY_S)
            try:
                at = clock.utc_s()
                self._moments.add(at, await self._current(clock.now()))
            except Exception:
                log.exception("the console keeps no moment")  # a defect here must not end the timeline for good

    async def _moment(self, request: web.Request) -> web.Response:
        try:
            at = float(request.query.get("at", ""))
        except ValueError:
            at = math.nan
        if not math.isfinite(at):
            raise web.HTTPBadRequest(text="`at` must be an instant in UTC seconds")
        snapshot = self._moments.find(at)
        if snapshot is None:
            raise web.HTTPNotFound(text="nothing is kept from then")
        return web.Response(body=snapshot, content_type="application/json")

    async def _find(self, request: web.Request) -> web.Response:
        words = request.query.get("q", "")[:_LONGEST_NAME]
        found = self._view.find(words, clock.now())
        return web.Response(body=msgspec.json.encode({"targets": found}), content_type="application/json")

    def __repr__(self) -> str:
        return f"<Console {self._readers} watching>"


async def _write(response: web.StreamResponse, event: bytes) -> None:
    async with asyncio.timeout(STUCK_S):
        await response.write(event)


def _event(name: str, contents: bytes) -> bytes:
    """Return a server-sent event of some JSON, which holds no line ends and so fits one `data` line."""
    return b"event: " + name.encode() + b"\ndata: " + contents + b"\n\n"


def _file(path: Path) -> Handler:
    """Return a handler that serves a file of the package, which is read once."""
    body = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    tag = f'"{sha256(body).hexdigest()[:16]}"'

    async def serve(request: web.Request) -> web.Response:
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        response = web.Response(body=body, content_type=kind, charset="utf-8", headers={**_HEADERS, "ETag": tag})
        response.enable_compression()
        return response

    return serve
