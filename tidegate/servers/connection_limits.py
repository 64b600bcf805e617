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
        """Whether no request is in progress on it."""
        ...


V = TypeVar("V", bound=ClientConnection)


class _ClientConnections(Generic[V]):
    """Connections in the order of their last request; those without any request are kept apart."""

    __slots__ = ("served", "silent")

    def __init__(self) -> None:
        self.silent: dict[V, None] = {}
        self.served: dict[V, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.served)

    def enter(self, connection: V) -> None:
        self.silent[connection] = None

    def record_request(self, connection: V) -> None:
        self.silent.pop(connection, None)
        self.served.pop(connection, None)
        self.served[connection] = None

    def leave(self, connection: V) -> None:
        self.silent.pop(connection, None)
        self.served.pop(connection, None)

    def first_idle(self) -> V | None:
        return next((one for one in chain(self.silent, self.served) if one.idle), None)


class ConnectionTable(Generic[V]):
    """The connections of one server. Mutable: `enter`, `record_request` at each request, `leave`."""

    def __init__(self, *, max_connections: int, max_per_client: int) -> None:
        self.max_connections = max_connections
        self.max_per_client = max_per_client
        self.evicted = 0
        self.turned_away = 0
        self._all: _ClientConnections[V] = _ClientConnections()
        self._clients: dict[str, _ClientConnections[V]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, connection: V) -> tuple[bool, V | None]:
        """Whether there is room, and the connection evicted for it, which the caller must close."""
        of_client = self._clients.get(connection.client)
        evicted = None
        full = self._full(of_client)
        if full is not None:
            evicted = full.first_idle()
            if evicted is None:
                self.turned_away += 1
                return False, None
            self.evicted += 1
            self.leave(evicted)
        self._all.enter(connection)
        self._clients.setdefault(connection.client, _ClientConnections()).enter(connection)
        return True, evicted

    def record_request(self, connection: V) -> None:
        """The connection has sent a whole request. Ignored if it has left."""
        of_client = self._clients.get(connection.client)
        if of_client is not None and (connection in of_client.silent or connection in of_client.served):
            of_client.record_request(connection)
            self._all.record_request(connection)

    def leave(self, connection: V) -> None:
        """The connection is closed. Ignored if it has left or was never admitted."""
        self._all.leave(connection)
        of_client = self._clients.get(connection.client)
        if of_client is not None:
            of_client.leave(connection)
            if not of_client:
                del self._clients[connection.client]

    def _full(self, of_client: _ClientConnections[V] | None) -> _ClientConnections[V] | None:
        if of_client is not None and len(of_client) >= self.max_per_client:
            return of_client
        return self._all if len(self._all) >= self.max_connections else None

    def __repr__(self) -> str:
        return (
            f"<ConnectionTable {len(self)} of {self.max_connections} from {len(self._clients)} clients, "
            f"{self.evicted} evicted, {self.turned_away} turned away>"
        )


def client_key(host: str) -> str:
    """The key of one client: its IPv4 address, or its IPv6 /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
