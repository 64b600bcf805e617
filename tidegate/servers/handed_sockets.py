"""Handed sockets are listening sockets that another process has bound: a server accepts on some of them, for a while.

    parent   binds one set a worker (`bind_sets`) and keeps all open as long as it lives
    worker   inherits every set, accepts on its own, and on another's while that one is down (`accept`, `release`)

On Linux the sets share a port by SO_REUSEPORT and the kernel spreads connections over them by a hash of the addresses.
A worker's death closes none: connections that wait in its queue wait on, and another worker takes them. So does a
worker's successor, which accepts on the same set before its predecessor stops. Elsewhere SO_REUSEPORT does not spread,
so all workers accept from one set, and the first that looks gets the connection.

Source: Linux, socket(7), SO_REUSEPORT; Kerrisk, "The SO_REUSEPORT socket option", LWN 542629, 2013.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from tidegate.servers.multi_accept import ACCEPTED_A_TURN, AcceptOn, accept_more

SPREADS: Final = sys.platform == "linux"  # whether SO_REUSEPORT spreads connections


class HandedSockets:
    """Accepts on the sets of its choice, once a server has begun with it.

    Args:
        sets: file descriptors of the listening sockets, by set; they stay open.
    """

    def __init__(self, sets: Sequence[Sequence[int]]) -> None:
        self._sets = sets
        self._accept_on: AcceptOn | None = None
        self._serving: dict[int, list[asyncio.Server]] = {}

    @property
    def accepting(self) -> frozenset[int]:
        """The sets on which connections are accepted now."""
        return frozenset(self._serving)

    def begin(self, accept_on: AcceptOn) -> None:
        """The server that handles the connections is there.

        Args:
            accept_on: starts to accept on a socket, which it owns then.
        """
        self._accept_on = accept_on

    async def accept(self, number: int) -> None:
        """Accept on one set; nothing where it is accepted on already, or there is no server."""
        if self._accept_on is None or number in self._serving or not 0 <= number < len(self._sets):
            return
        self._serving[number] = serving = []
        for fd in self._sets[number]:
            serving += await accept_more(fd, self._accept_on, ACCEPTED_A_TURN)

    def release(self, number: int) -> None:
        """Accept no more on this set; connections stay open."""
        for one in self._serving.pop(number, ()):
            one.close()

    def close(self) -> None:
        """Accept nothing any more, and nothing again."""
        self._accept_on = None
        for number in tuple(self._serving):
            self.release(number)

    def __repr__(self) -> str:
        return f"<HandedSockets {sorted(self._serving)} of {len(self._sets)}>"


def own_sockets(port: int) -> Iterator[tuple[socket.socket, bool]]:
    """This process's TCP sockets on a local port, with whether each listens; Linux shows them, other systems none.

    The sockets are duplicates, closed as soon as the next is asked for.
    """
    for fd in _open_files():
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if is_tcp and one.getsockname()[1] == port:
                    yield one, bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError:  # closed meanwhile
            continue


def stop_listening(port: int) -> int:
    """Have this process's listening sockets on a port accept nothing more, whichever library holds them; how many.

    Other processes that listen there get what connects from now on.
    """
    count = 0
    for one, listens in own_sockets(port):
        if listens:
            one.shutdown(socket.SHUT_RD)
            count += 1
    return count


def connections_on(port: int) -> int:
    """How many connections this process has that came in on a port."""
    return sum(_has_peer(one) for one, _ in own_sockets(port))


def _has_peer(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:  # it has listened, and does no more
        return False
    return True


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def bind_sets(host: str, port: int, count: int) -> tuple[list[list[socket.socket]], int]:
    """Sockets that are bound to every address of `host`, `count` sets of them, and the port.

    They do not listen: whoever accepts first on one makes it do so, and no connection comes before. Port 0 takes a
    free one.

    Raises:
        OSError: the address is in use, or there is no such address.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    sets: list[list[socket.socket]] = []
    opened: list[socket.socket] = []
    try:
        for _ in range(count if SPREADS else 1):
            sets.append([])
            for family, address in addresses:
                one = _bound(family, (address[0], port, *address[2:]))
                opened.append(one)
                sets[-1].append(one)
                port = port or one.getsockname()[1]
    except BaseException:
        for one in opened:
            one.close()
        raise
    return (sets if SPREADS else sets * count), port


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if SPREADS:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # as asyncio does: IPv4 has a socket of its own
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one
