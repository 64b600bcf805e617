"""A server that answers each request with given bytes, as no good server would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Script = Callable[[asyncio.StreamWriter], object]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"there/talker","object":"model","owned_by":"me"}]}'


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer of this length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


class RawServer:
    """Lists one model, and answers everything else by `script`."""

    def __init__(self, script: Callable[[asyncio.StreamWriter], object]) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.closed = 0  # connections that the other side has closed

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                self.requests.append(head + await reader.readexactly(length))
                if head.startswith(b"GET /v1/models "):
                    writer.write(whole(MODELS))
                else:
                    answered = self.script(writer)
                    if asyncio.iscoroutine(answered):
                        await answered
                    break
                await writer.drain()
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[tuple[RawServer, str]]:
    server = RawServer(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        listening.close()
