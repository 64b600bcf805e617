"""Two ends of a link stream in memory: what one writes the other reads, until it is closed, lost or falls silent."""

from __future__ import annotations

import asyncio

from tidegate import clock
from tidegate.link.session import LinkLost


class Wire:
    """One direction. `silent` swallows what is written, as a half-open connection does; `stuck` takes nothing."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.silent = False
        self.stuck = False
        self.lost = ""
        self.written: list[bytes] = []

    def lose(self, reason: str) -> None:
        """Fail the reader and every later write."""
        self.lost = reason
        self.messages.put_nowait(None)


class MemoryStream:
    """A `MessageStream` over two wires."""

    def __init__(self, inbound: Wire, outbound: Wire) -> None:
        self.inbound = inbound
        self.outbound = outbound

    async def read(self) -> bytes | None:
        message = await self.inbound.messages.get()
        if self.inbound.lost:
            raise LinkLost(self.inbound.lost)
        return message

    async def write(self, message: bytes) -> None:
        await clock.sleep(0)  # as any transport does: others have their turn
        while self.outbound.stuck:
            await clock.sleep(0.01)
        if self.outbound.lost:
            raise LinkLost(self.outbound.lost)
        self.outbound.written.append(message)
        if not self.outbound.silent:
            self.outbound.messages.put_nowait(message)

    def close(self) -> None:
        """This end writes no more: the other reads its end of the stream."""
        self.outbound.messages.put_nowait(None)


def stream_pair() -> tuple[MemoryStream, MemoryStream]:
    there, back = Wire(), Wire()
    return MemoryStream(back, there), MemoryStream(there, back)
