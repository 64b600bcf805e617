"""The console on the admin port: the page and its files, one stream of snapshots, and a look-up by name.

    GET /                    the page; it fetches /console/*, and nothing from anywhere else
    GET /console/live        server-sent events: `history` once, then `snapshot` each second, and with ?target=ID
                             `target`, everything of that one
    GET /console/find?q=     targets by name

It shares the admin port because the page's other sources, `/v1/state` and `/debug/decisions`, live there: one place for
operators, one guard. The page itself is no secret, and is open: a browser cannot show a key before it has a page to ask
for it. Data asks like everything else of that port; the page sends the key that its reader typed, and keeps it for the
tab's life.

A snapshot is made once a second however many watch, with breaths for requests in between. A stream ends after `LASTS_S`
and the page asks anew, so a revoked key sees no more than that; whoever does not read for `STUCK_S` is let go.
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from gateway.operate.console.snapshot import ConsoleView
from tidegate import clock

STATIC: Final = Path(__file__).parent / "static"
LASTS_S: Final = 300.0
STUCK_S: Final = 10.0
MOST_STREAMS: Final = 32
EVERY_S: Final = 1.0
_LONGEST_NAME: Final = 300

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Everything comes from here, and no text becomes a script: names on this page come from the network.
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
    """Where each file of the page is served."""
    files = (path for path in sorted(STATIC.rglob("*")) if path.is_file())
    found = {f"/console/{path.relative_to(STATIC).as_posix()}": path for path in files}
    found["/"] = found.pop("/console/index.html")
    return found


class Console:
    """The console's routes. Mutable: who watches, and the snapshot that they share."""

    def __init__(self, console_view: ConsoleView) -> None:
        self._sight = console_view
        self._watching = 0
        self._made_at = float("-inf")
        self._snapshot = b""
        self._making = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        page = [web.get(path, _file(file)) for path, file in page_files().items()]
        return [*page, web.get("/console/live", self._live), web.get("/console/find", self._find)]

    async def _live(self, request: web.Request) -> web.StreamResponse:
        target_id = request.query.get("target", "")[:_LONGEST_NAME]
        if self._watching >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_STREAMS} watch already", headers={"Retry-After": "10"})
        self._watching += 1
        try:
            return await self._stream(request, target_id)
        finally:
            self._watching -= 1

    async def _stream(self, request: web.Request, target_id: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        ends_at = clock.now() + LASTS_S
        await _write(response, _event("history", self._sight.history()))
        while (now := clock.now()) < ends_at:
            await _write(response, await self._current(now))
            if target_id:
                detail = self._sight.detail(target_id, now)
                await _write(response, _event("target", {"id": target_id, "detail": detail}))
            await clock.sleep(EVERY_S)
        return response

    async def _current(self, now: float) -> bytes:
        async with self._making:
            if now - self._made_at >= EVERY_S / 2:
                states = await self._sight.states(lambda: clock.sleep(0.0))
                self._snapshot = _event("snapshot", self._sight.snapshot(clock.now(), clock.utc_s(), states))
                self._made_at = now
            return self._snapshot

    async def _find(self, request: web.Request) -> web.Response:
        words = request.query.get("q", "")[:_LONGEST_NAME]
        found = self._sight.find(words, clock.now())
        return web.Response(body=msgspec.json.encode({"targets": found}), content_type="application/json")

    def __repr__(self) -> str:
        return f"<Console {self._watching} watching>"


async def _write(response: web.StreamResponse, event: bytes) -> None:
    async with asyncio.timeout(STUCK_S):
        await response.write(event)


def _event(name: str, contents: object) -> bytes:
    """JSON holds no line ends, so one `data` line does."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(contents) + b"\n\n"


def _file(path: Path) -> Handler:
    """Serves a file of the package, which is read once."""
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
