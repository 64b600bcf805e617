"""An answer that comes as server-sent events, to a caller that may read slowly, not at all, or be gone.

What is written goes to the socket at once, as one chunk. Bytes that the caller has not taken are bounded, here and in
the kernel, which would otherwise take in megabytes that no one reads: beyond them a write waits, and meanwhile nothing
more is taken from the generation, whose engine is paused once its window is full. A caller that takes nothing for
`stall_s` is disconnected.

Behind the first write no task is needed as long as nothing has to wait: `push` is for callbacks.

Source: WHATWG, HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Iterable, Mapping
from typing import Final

from aiohttp import web

from tidegate.oip.reply import RESUMED_KEY, resumed_text
from tidegate.types import Resumed

HELD_BYTES: Final = 32 * 1024  # below what pauses a transport, so that a write of less never waits
_KERNEL_BYTES: Final = 64 * 1024  # some 400 tokens
EVENT_STREAM_TYPE: Final = "text/event-stream; charset=utf-8"
_HEADERS: Final = {
    "Content-Type": EVENT_STREAM_TYPE,
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events otherwise
}


def resumed_comments(resumed: Iterable[Resumed]) -> bytes:
    """Comments, which clients pass by: another target has gone on with what the events say."""
    return b"".join([f": {RESUMED_KEY} {resumed_text(one)}\n\n".encode() for one in resumed])


class StalledReader(ConnectionError):
    """The caller has read nothing for so long that it was disconnected."""


class EventStream:
    """One answer. `begin`, `write` as often as there is something, `end`. Raises ConnectionError where the caller left.

    Args:
        stall_s: the longest that the caller may take to read what is held.
    """

    def __init__(self, request: web.BaseRequest, *, stall_s: float) -> None:
        self.response = web.StreamResponse()
        self._request = request
        self._stall_s = stall_s
        self._is_out = self._is_chunked = False  # once its headers are out

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the headers."""
        self.response.headers.update(headers)
        self.response.headers.update(_HEADERS)
        transport = self._request.transport
        sock = None if transport is None else transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        await self.response.prepare(self._request)

    async def write(self, events: bytes) -> None:
        if not self._is_out:
            first = self._write_first(events)
            await (first if len(events) <= HELD_BYTES else self._in_time(first))
        elif not self.push(events):
            await self.drain()

    def push(self, events: bytes) -> bool:
        """Write at once, behind a first `write`; False: `drain` has to be awaited before more is written."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the caller has left")
        held_bytes: int = transport.get_write_buffer_size()
        # Framed here: aiohttp's way to this very line takes as long as all else that is done for a token.
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)
        return held_bytes + len(events) <= HELD_BYTES

    async def drain(self) -> None:
        """Wait until the caller has read what is held."""
        await self._in_time(self._request.writer.drain())

    async def _write_first(self, events: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the caller has left")
        await self.response.write(events)
        self._is_out = True
        self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"

    async def _in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await writing
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            raise StalledReader(f"the caller has read nothing for {self._stall_s:g} s") from None

    async def end(self) -> None:
        await self.response.write_eof()

    def __repr__(self) -> str:
        return f"<EventStream {'begun' if self.response.prepared else 'not begun'}>"
