"""One connection through a link: a client's socket, the upstream's, and a flow for each direction.

    accepted → (the link is there) → connect upstream → flows → both ended | reset | cut

The end of one side takes the same way as its bytes. FIN is passed on as FIN, so half-closed connections work; RST of
one side becomes RST of the other; an upstream that refuses becomes RST for the client, which is connected already.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

from tidegate.netsim.links.limit import ByteLimit
from tidegate.netsim.links.nat import NatBinding
from tidegate.netsim.links.stream import NAMES, LinkLayer, StreamPath
from tidegate.netsim.proxy.flow import End, Flow
from tidegate.netsim.proxy.ledger import Why

_STALL_WORTH_TELLING_S: Final = 0.25
_RST_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


class ConnectionOwner(Protocol):
    """The interface of a link to its connections."""

    upstream: tuple[str, int]
    connect_timeout_s: float
    buffer_bytes: int

    def now(self) -> float: ...
    def tell(self, what: str, **fields: Any) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    async def reachable(self) -> None: ...


class Connection:
    """Mutable. `run` connects and starts it; it ends by itself, or by `finish`."""

    def __init__(
        self,
        number: int,
        client: socket.socket,
        owner: ConnectionOwner,
        *,
        layers: Callable[[], list[LinkLayer]],
        limits: tuple[ByteLimit | None, ByteLimit | None],
        nat_idle_s: float | None,
    ) -> None:
        self.number = number
        self.flows: tuple[Flow, ...] = ()
        self._owner = owner
        self._client = client
        self._upstream: socket.socket | None = None
        self._layers = layers
        self._limits = limits
        self._nat = NatBinding(nat_idle_s, owner.now()) if nat_idle_s is not None else None
        self._stall_told = ""
        self._forgetting_told = False
        self._finished = False

    async def run(self, cut: Callable[[], tuple[bool, bool]]) -> None:
        """Connect upstream once the link is there, then let bytes flow; returns as soon as they do."""
        await self._owner.reachable()
        if self._finished:
            return
        try:
            self._upstream = await self._connect()
        except (OSError, TimeoutError) as error:
            self._owner.tell("refused", connection=self.number, why=str(error) or "timed out")
            self.finish("upstream refused", "gone", reset=True)
            return
        if self._finished:  # a partition came while it connected
            close(self._upstream, reset=True)
        else:
            self._begin(cut())

    def change(self, layers: list[LinkLayer]) -> None:
        for flow in self.flows:
            flow.change(layers)

    def cut(self, cut: tuple[bool, bool]) -> None:
        for flow in self.flows:
            flow.cut = cut[flow.number]

    def pump(self) -> None:
        for flow in self.flows:
            if not self._finished:
                flow.pump()

    def finish(self, how: str, why: Why, *, reset: bool) -> None:
        """End both sides now; what is held is lost. Does nothing the second time."""
        if self._finished:
            return
        self._finished = True
        for flow in self.flows:
            flow.stop(why)
        for one in (self._client, self._upstream):
            if one is not None:
                close(one, reset=reset)
        self._owner.tell(
            "close",
            connection=self.number,
            how=how,
            **{NAMES[flow.number]: flow.ledger.plain() for flow in self.flows},
        )
        self._owner.closed(self)

    def __repr__(self) -> str:
        return f"<Connection {self.number} {' '.join(map(repr, self.flows)) or 'connecting'}>"

    # what flows tell

    def now(self) -> float:
        return self._owner.now()

    def over(self, flow: Flow, end: End) -> None:
        match end:
            case "eof":
                with contextlib.suppress(OSError):  # it may have left in the meantime
                    self._sink(flow).shutdown(socket.SHUT_WR)
                if self._other(flow).over or self._other(flow).ended_unseen:
                    self.finish("ended", "gone", reset=False)
            case "reset":
                self.finish(f"reset by the {'client' if flow.number == 0 else 'upstream'}", "gone", reset=True)
            case "limit-close" | "limit-reset":
                self._owner.tell("limit", connection=self.number, direction=NAMES[flow.number])
                self.finish("limit", "cut", reset=end == "limit-reset")

    def gone(self, flow: Flow) -> None:
        """The sink has left: its other half ends with a reset, behind the bytes that it sent before."""
        flow.stop("gone")
        other = self._other(flow)
        if other.over:
            self.finish("reset", "gone", reset=True)
        else:
            other.end("reset")

    def stalled(self, flow: Flow, until: float) -> None:
        if until - self.now() > _STALL_WORTH_TELLING_S:
            key = f"{NAMES[flow.number]} {until:.6f}"
            if key != self._stall_told:
                self._stall_told = key
                self._owner.tell("stall", connection=self.number, direction=NAMES[flow.number], until_s=round(until, 4))

    def unheard(self, flow: Flow) -> None:
        if self._nat is not None and self._nat.forgotten and not self._forgetting_told:
            self._forgetting_told = True
            self._owner.tell("forgot", connection=self.number)
        if all(one.ended_unseen or one.over for one in self.flows):  # no end is left, or none will learn of it
            self.finish("both ends left unheard", "gone", reset=False)

    # setting up

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._owner.connect_timeout_s):
            family, kind, protocol, address = await _resolved(*self._owner.upstream)
            upstream = socket.socket(family, kind, protocol)
            try:
                upstream.setblocking(False)
                await loop.sock_connect(upstream, address)
            except BaseException:
                upstream.close()
                raise
        return upstream

    def _begin(self, cut: tuple[bool, bool]) -> None:
        assert self._upstream is not None
        for one in (self._client, self._upstream):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = ((self._client, self._upstream), (self._upstream, self._client))
        layers = self._layers()
        self.flows = tuple(
            Flow(
                number,
                StreamPath(layers, number, self.number),
                source,
                sink,
                self,
                buffer_bytes=self._owner.buffer_bytes,
                limit=self._limits[number],
                nat=self._nat,
            )
            for number, (source, sink) in enumerate(ways)
        )
        self.cut(cut)
        for flow in self.flows:
            if not self._finished:
                flow.start()

    def _sink(self, flow: Flow) -> socket.socket:
        assert self._upstream is not None
        return self._upstream if flow.number == 0 else self._client

    def _other(self, flow: Flow) -> Flow:
        return self.flows[1 - flow.number]


async def _resolved(host: str, port: int) -> tuple[int, int, int, Any]:
    """Where to connect. Names are looked up for each connection, since they may move; addresses need no thread."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    return family, kind, protocol, address


def close(one: socket.socket, *, reset: bool) -> None:
    """With RST; or with FIN, even where bytes of the other end were not read (the kernel would answer with RST)."""
    with contextlib.suppress(OSError):
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        else:
            one.shutdown(socket.SHUT_WR)
            while one.recv(65536):
                pass
    one.close()
