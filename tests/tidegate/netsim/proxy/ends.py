"""Both ends of a link under test: an upstream that does one thing with what it gets, and plain clients.

Most tests drive them on virtual time: the kernel hands loopback bytes on within the call that sends them, so nothing
real is waited for, and an outage of an hour takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from tidegate import clock
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.link import LinkProxy

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CLEAR = StreamProfile(delay_ms=0.0)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


class Recorder:
    """Keeps what it gets, and how each connection ended."""

    def __init__(self) -> None:
        self.got: list[bytearray] = []
        self.ends: list[str] = []
        self.changed = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = bytearray()
        self.got.append(mine)
        end = "eof"
        try:
            while piece := await reader.read(65536):
                mine += piece
                self.changed.set()
        except ConnectionError:
            end = "reset"
        self.ends.append(end)
        self.changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                self.changed.clear()
                await self.changed.wait()


def source(size_bytes: int) -> Serve:
    """Sends so many bytes, each telling its place, then ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pattern(size_bytes))
        await writer.drain()
        writer.write_eof()
        await reader.read()

    return serve


def pattern(size_bytes: int) -> bytes:
    """No stretch of it looks like another nearby, so a missing, doubled or moved piece shows."""
    words = b"".join(number.to_bytes(4, "big") for number in range(size_bytes // 4 + 1))
    return words[:size_bytes]


@contextlib.asynccontextmanager
async def upstream(serve: Serve) -> AsyncIterator[tuple[str, int]]:
    """A server whose connections end quietly, however they end."""
    tasks: set[asyncio.Task[None]] = set()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await serve(reader, writer)
        finally:
            tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def linked(
    serve: Serve = echo, profile: StreamProfile | None = None, **options: object
) -> AsyncIterator[LinkProxy]:
    """A link to such an upstream, whose books are checked at its end."""
    async with upstream(serve) as address:
        async with LinkProxy(address, **options) as link:  # type: ignore[arg-type]
            if profile is not None:
                link.apply(profile)
            yield link
        assert link.violations == 0, link.log.text()
        assert link.connections == 0


class Client:
    """Use `async with`."""

    def __init__(self, link: LinkProxy) -> None:
        self._link = link

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self._link.host, self._link.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def ask(self, piece: bytes = b"x" * 10) -> float:
        """Send it to an echo and wait until it is back; how long that took."""
        began_at = clock.now()
        self.writer.write(piece)
        assert await self.reader.readexactly(len(piece)) == piece
        return clock.now() - began_at

    async def hears_nothing_for(self, seconds: float) -> bool:
        reading = asyncio.ensure_future(self.reader.read(1))
        done, _ = await asyncio.wait({reading}, timeout=seconds)
        reading.cancel()
        await asyncio.wait({reading})
        return not done

    def reset(self) -> None:
        """Leave with RST."""
        taken: socket.socket = self.writer.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def end(self) -> str:
        """How the connection ends: "eof" or "reset"."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            return "reset"
        return "eof"


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(pattern(10_001))
        await writer.drain()


async def newcomer(link: LinkProxy) -> str:
    """How a link meets a new connection."""
    try:
        async with Client(link) as client:
            return await client.end()
    except ConnectionRefusedError:
        return "refused"
    except ConnectionResetError:
        return "reset"
