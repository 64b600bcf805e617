"""A TCP proxy that can stop forwarding without closing anything: what a pulled cable looks like from both ends."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class TcpProxy:
    """Forwards 127.0.0.1:`port` to another port. While `frozen`, bytes are held back and new connections hang."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*[writer.wait_closed() for writer in self._writers], return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._thawed.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
            self._writers.add(far_writer)
            await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            return  # the connection's own end; the server's callback has nobody to tell
        finally:
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                await self._thawed.wait()
                writer.write(piece)
                await writer.drain()
        writer.close()
