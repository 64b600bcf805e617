"""`ConnectionTable` counts connections in all and per client, and chooses which one is evicted when a server is full.

An idle connection costs its client nothing and us a file and some kilobytes, so a client that opens ten thousand of
them must not keep others out. Refusing newcomers would do just that to everyone behind the same address. So a full
server evicts an idle connection for a newcomer: first one that never sent a request, the oldest first; then the one
whose last request is the longest ago. If all connections are busy, the newcomer is refused.

A client is an IPv4 address or an IPv6 /64: a client that has one address of a /64 has them all. Behind a proxy that
hides its callers, all of them are one client: raise `max_per_client` there.

Invariants: never more than the limits; a connection that is busy is never evicted. O(1), but for looking past busy
connections when the server is full.
"""

from __future__ import annotations

import ipaddress
from itertools import chain
from typing import Generic, Protocol, TypeVar


class ClientConnection(Protocol):
    """A connection."""

    @property
    def client(self) -> str: ...

    @property
    def idle(self) -> bool:
        """Whether nothing is being done for it."""
        ...


V = TypeVar("V", bound=ClientConnection)


class _ClientConnections(Generic[V]):
    """Connections in the order of their last request; those without any request are kept apart."""

    __slots__ = ("asked", "silent")

    def __init__(self) -> None:
        self.silent: dict[V, None] = {}
        self.asked: dict[V, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.asked)

    def enter(self, visitor: V) -> None:
        self.silent[visitor] = None

    def asks(self, visitor: V) -> None:
        self.silent.pop(visitor, None)
        self.asked.pop(visitor, None)
        self.asked[visitor] = None

    def leave(self, visitor: V) -> None:
        self.silent.pop(visitor, None)
        self.asked.pop(visitor, None)

    def least_missed(self) -> V | None:
        return next((one for one in chain(self.silent, self.asked) if one.idle), None)


class ConnectionTable(Generic[V]):
    """Mutable: `enter`, `asks` at each request, `leave`."""

    def __init__(self, *, max_connections: int, max_per_client: int) -> None:
        self.max_connections = max_connections
        self.max_per_client = max_per_client
        self.evicted = 0
        self.turned_away = 0
        self._all: _ClientConnections[V] = _ClientConnections()
        self._clients: dict[str, _ClientConnections[V]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, visitor: V) -> tuple[bool, V | None]:
        """Whether there is room, and the connection evicted for it, which the caller must close."""
        party = self._clients.get(visitor.client)
        leaver = None
        full = self._full(party)
        if full is not None:
            leaver = full.least_missed()
            if leaver is None:
                self.turned_away += 1
                return False, None
            self.evicted += 1
            self.leave(leaver)
        self._all.enter(visitor)
        self._clients.setdefault(visitor.client, _ClientConnections()).enter(visitor)
        return True, leaver

    def asks(self, visitor: V) -> None:
        """It sent a whole request. Ignored for one that has left."""
        party = self._clients.get(visitor.client)
        if party is not None and (visitor in party.silent or visitor in party.asked):
            party.asks(visitor)
            self._all.asks(visitor)

    def leave(self, visitor: V) -> None:
        """It is closed. Ignored for one that has left, or never was let in."""
        self._all.leave(visitor)
        party = self._clients.get(visitor.client)
        if party is not None:
            party.leave(visitor)
            if not party:
                del self._clients[visitor.client]

    def _full(self, party: _ClientConnections[V] | None) -> _ClientConnections[V] | None:
        if party is not None and len(party) >= self.max_per_client:
            return party
        return self._all if len(self._all) >= self.max_connections else None

    def __repr__(self) -> str:
        return (
            f"<ConnectionTable {len(self)} of {self.max_connections} from {len(self._clients)} clients, "
            f"{self.evicted} evicted, {self.turned_away} turned away>"
        )


def client_key(host: str) -> str:
    """Who counts as one client: the IPv4 address, or the IPv6 /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
