"""A port for Prometheus: `GET /metrics` over plain HTTP/1.1, and nothing else.

A pool installs without an HTTP server, and a scrape every few seconds needs none: one request a connection, answered
and closed. No web page has business here, not even one of this address: what a browser sends on a page's behalf is
refused (`tidegate/servers/foreign_sites.py` says why), what a person opens is not. Requests are bounded: a request head
of MOST_BYTES within READ_S, and at most MOST_AT_ONCE connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

MOST_BYTES: Final = 8192
MOST_AT_ONCE: Final = 16
READ_S: Final = 5.0
_WORDS: Final = "text/plain; charset=utf-8"
_ACCEPT: Final = b"\r\naccept:"
_ORIGIN: Final = b"\r\norigin:"
_FETCH_SITE: Final = b"\r\nsec-fetch-site:"

Render = Callable[[str], tuple[bytes, str]]  # from an Accept header to the body and its type


class ScrapeServer:
    """Open inside `async with`; `address` is where.

    Args:
        render: what a scrape gets.
        port: 0 takes any free one.
    """

    def __init__(self, render: Render, host: str, port: int) -> None:
        self.address = ""
        self._render = render
        self._host = host
        self._port = port
        self._inside = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Raises OSError if the port is taken."""
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=MOST_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._inside += 1
        try:
            async with asyncio.timeout(READ_S):
                busy = self._inside > MOST_AT_ONCE
                status, body, kind = ("503 Busy", b"", _WORDS) if busy else await self._answer(reader)
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # the scraper has gone, or sent nothing
        finally:
            self._inside -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, bytes, str]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return "400 Bad Request", b"this is no HTTP request\n", _WORDS
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return "405 Method Not Allowed", b"only GET\n", _WORDS
        if path != b"/metrics":
            return "404 Not Found", b"only /metrics\n", _WORDS
        if _header(head, _ORIGIN) or _header(head, _FETCH_SITE) not in ("", "none"):
            return "403 Forbidden", b"this port answers programs, and no page of a web site\n", _WORDS
        return "200 OK", *self._render(_header(head, _ACCEPT))

    def __repr__(self) -> str:
        return f"<ScrapeServer {self.address}>"


def _header(head: bytes, name: bytes) -> str:
    """The first value of a header; "" where there is none.

    Args:
        name: in small letters, with the line's end before it and the colon after it.
    """
    at = head.lower().find(name)
    if at < 0:
        return ""
    return head[at + len(name) :].partition(b"\r\n")[0].decode("latin-1").strip()
