"""The listening port of a link, and the ways in which a port can fail to answer.

    open       accepts
    refusing   connecting is answered with RST (ECONNREFUSED): nothing listens. The port stays bound meanwhile
    deaf       connecting is not answered at all: the queue of connections is kept full, so the kernel drops every SYN

A client that connects while the port is deaf tries again by the kernel's clock, 1, 3, 7 and 15 seconds after its first
try; so it may notice late that the port is open again, as on a real network.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final, Literal

State = Literal["open", "refusing", "deaf", "closed"]
_BACKLOG: Final = 256
_REST_S: Final = 0.25
# As much as a socket may hold before the sender feels that the link is full; the kernel doubles it.
_RECEIVE_BYTES: Final = 65536


class ListeningPort:
    """Mutable. Hands each accepted socket to `on_client`, non-blocking."""

    def __init__(self, host: str, port: int, on_client: Callable[[socket.socket], None]) -> None:
        self.state: State = "closed"
        self._host = host
        self._port = port
        self._on_client = on_client
        self._listener: socket.socket | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._fillers: list[socket.socket] = []
        self._filler_names: set[object] = set()

    @property
    def address(self) -> tuple[str, int]:
        assert self._listener is not None, "open the door first"
        host, port = self._listener.getsockname()[:2]
        return host, port

    def open(self) -> None:
        """Raises OSError: the port cannot be had."""
        if self.state == "open":
            return
        if self._listener is None:
            self._listener = self._bound(self._port)
        self._listener.listen(_BACKLOG)
        if self._fillers:
            self._accept()  # those that kept the queue full come out first; a name must not outlive its socket
            self._empty()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        self.state = "open"

    def refuse(self) -> None:
        """Raises OSError: another process took the port in the instant between."""
        if self.state == "refusing":
            return
        _, port = self.address
        self._close_listener()
        self._listener = self._bound(port)  # bound and not listening: ours, and not answered
        self.state = "refusing"

    def deafen(self) -> None:
        if self.state == "deaf":
            return
        self.open()
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._accept()  # who came before is let in
        self._listener.listen(0)
        for _ in range(2):  # one fits into a queue of none, and the second proves that it is full
            filler = socket.socket(self._listener.family, socket.SOCK_STREAM)
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(self.address)
            self._fillers.append(filler)
            self._filler_names.add(filler.getsockname())
        self.state = "deaf"

    def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self._close_listener()
        self._empty()
        self.state = "closed"

    def __repr__(self) -> str:
        return f"<ListeningPort {self._host}:{self._port} {self.state}>"

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                client, name = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file descriptors left: waiting clients stay in the kernel's queue for a while
                self._rest()
                return
            if name in self._filler_names:
                self._filler_names.discard(name)
                client.close()
                continue
            client.setblocking(False)
            self._on_client(client)

    def _rest(self) -> None:
        """The listener stays readable, and would call again at once and for ever."""
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        loop.remove_reader(self._listener)
        self._resting = loop.call_later(_REST_S, self._go_on)

    def _go_on(self) -> None:
        self._resting = None
        if self.state == "open" and self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _bound(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            listener.bind((self._host, port))
        except BaseException:
            listener.close()
            raise
        return listener

    def _close_listener(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _empty(self) -> None:
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()
        self._filler_names.clear()
