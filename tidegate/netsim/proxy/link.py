"""A link between clients and an upstream: one port, all its connections, and the condition they are under.

The condition is a stack of layers (`tidegate/netsim/links/stream.py`) and at most one partition:

    base      what the link is like: a profile, usually of a named scenario
    toxics    further layers by name, each for a direction: slower uploads on top of LTE
    partition what is broken right now

Every change is one call that changes every live connection before it returns; none runs under half a condition, and
none loses a byte by it. Bytes that are through the link's capacity keep their instant, all others are planned anew.

    blackhole  nothing passes, silently; `direction` "from" alone is a half-open link: requests arrive, answers
               vanish. Bytes are held, and new connections wait: all of it goes on when the link is healed
    refuse     live connections are reset, new ones refused (ECONNREFUSED)
    reset      live connections are reset, new ones are accepted and reset at once
    close      the same with a clean end (FIN) in the place of RST
    silent     new connections are accepted and never answered, also after healing; live ones go on
    deaf       new connections are not even accepted: connecting times out; live ones go on

`heal` ends a partition at once. (A real TCP would notice only when its retransmission timer fires; outages of a
profile model that, orders do not.)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import msgspec

from tidegate import clock
from tidegate.netsim.links.distributions import Draw
from tidegate.netsim.links.stream import NAMES, Direction, LinkLayer, StreamProfile, limit_of, nat_idle_s
from tidegate.netsim.links.trace import CapacityTrace
from tidegate.netsim.proxy.connection import Connection, close
from tidegate.netsim.proxy.events import EventLog, LinkEvent
from tidegate.netsim.proxy.ledger import Totals
from tidegate.netsim.proxy.listening_port import ListeningPort
from tidegate.netsim.random_streams import stream
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.servers.address import format_address

Kind = Literal["blackhole", "refuse", "reset", "close", "silent", "deaf"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
BASE: Final = "base"
NOTHING: Final = StreamProfile(delay_ms=0.0)

Traces = tuple[CapacityTrace, CapacityTrace] | None


class LinkError(Exception):
    """An order that cannot be carried out; the message says what is wrong and what would be right."""


class LinkProxy:
    """Use `async with`; then it listens at `address`. All methods belong to the loop that it was entered on.

    Args:
        upstream: (host, port) that connections are passed on to.
        seed: of all chance; it is in the log, and with the same traffic it gives the same link.
        buffer_bytes: how much a connection's direction holds at most, on its way and waiting. Less than what is on its
            way at full speed would make a long link slow.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        *,
        name: str = "link",
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 1,
        log: EventLog | None = None,
        buffer_bytes: int = 4 * 2**20,
        max_connections: int = 1024,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.name = name
        self.upstream = upstream
        self.seed = seed
        self.log = log if log is not None else EventLog()
        self.buffer_bytes = buffer_bytes
        self.connect_timeout_s = connect_timeout_s
        self.accepted = 0
        self.violations = 0
        self._max_connections = max_connections
        self._door = ListeningPort(host, port, self._serve)
        self._layers: dict[str, LinkLayer] = {}
        self._words: dict[str, Any] = {}  # what each layer was built from
        self._generation = 0
        self._kind: Kind | None = None
        self._partition = 0  # which one is there
        self._healing: asyncio.TimerHandle | None = None
        self._cut = (False, False)
        self._connections: dict[int, Connection] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._mute: set[socket.socket] = set()
        self._there = asyncio.Event()
        self._finished = (Totals(), Totals())
        self._began_at = 0.0

    async def __aenter__(self) -> LinkProxy:
        self._began_at = clock.now()
        self._there.set()
        self._door.open()
        self.tell("open_link", listen=self.address, upstream=f"{self.upstream[0]}:{self.upstream[1]}", seed=self.seed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._door.close()
        if self._healing is not None:
            self._healing.cancel()
        await cancel_and_wait(*self._opening)
        for connection in list(self._connections.values()):
            connection.finish("link ended", "shutdown", reset=True)
        for one in list(self._mute):
            self._forget_mute(one, reset=True)
        self.tell("ended", **self.totals())

    @property
    def host(self) -> str:
        return self._door.address[0]

    @property
    def port(self) -> int:
        return self._door.address[1]

    @property
    def address(self) -> str:
        return format_address(self.host, self.port)

    # what the link is like

    def apply(self, profile: StreamProfile, *, traces: Traces = None) -> None:
        """From now on the link is like this; its weather and recordings begin now. Toxics stay."""
        self._put(BASE, profile, "both", traces)
        self.tell("apply", profile=self._words[BASE])

    def put(self, name: str, profile: StreamProfile, direction: Direction, *, traces: Traces = None) -> None:
        """One layer more, or another in place of the one of this name."""
        if name == BASE or not name or len(name) > 100:
            raise LinkError(f"a toxic cannot have the name {name[:100]!r}: {BASE!r} is the link itself")
        self._put(name, profile, direction, traces)
        self.tell("toxic", name=name, direction=direction, profile=self._words[name])

    def remove(self, name: str) -> None:
        """Raises LinkError: there is no such toxic."""
        if name == BASE or name not in self._layers:
            there = ", ".join(self.toxics) or "none"
            raise LinkError(f"there is no toxic {name[:100]!r} (there are: {there})")
        layer = self._layers.pop(name)
        self._words.pop(name, None)
        self._change([layer])
        self.tell("toxic", name=name, removed=True)

    def clear(self) -> None:
        """No layers and no partition: as if there were no link between."""
        layers = list(self._layers.values())
        self._layers.clear()
        self._words.clear()
        self._change(layers)
        self.tell("apply", profile="nothing")
        self.heal()

    @property
    def toxics(self) -> tuple[str, ...]:
        return tuple(name for name in self._layers if name != BASE)

    # what is broken

    def partition(self, kind: Kind = "blackhole", direction: Direction = "both", *, for_s: float | None = None) -> int:
        """Break it this way, in the place of whatever was broken before; a number to `heal` just this partition.

        Args:
            for_s: heal it after so long, unless it has been healed or replaced by then. None: it stays.
        """
        if kind not in KINDS:
            raise LinkError(f"there is no partition {str(kind)[:50]!r} (there are: {', '.join(KINDS)})")
        if direction not in ("to", "from", "both"):
            raise LinkError(f"direction must be 'to', 'from' or 'both', not {str(direction)[:50]!r}")
        if kind != "blackhole" and direction != "both":
            raise LinkError(f"{kind} has no direction: a connection ends in both")
        self.tell("partition", kind=kind, direction=direction)
        self._break(kind, (kind == "blackhole" and direction != "from", kind == "blackhole" and direction != "to"))
        number = self._partition
        if for_s is not None:
            self._healing = asyncio.get_running_loop().call_later(for_s, lambda: self.heal(only=number))
        return number

    def heal(self, *, only: int | None = None) -> None:
        """Nothing is broken any more; what was held goes on now.

        Args:
            only: heal only the partition of this number; another that has come in its place stays.
        """
        if only is not None and only != self._partition:
            return
        if self._kind is not None:
            self.tell("heal", kind=self._kind)
        self._break(None, (False, False))

    @property
    def broken(self) -> Kind | None:
        return self._kind

    @property
    def mute_connections(self) -> int:
        """Connections that were accepted during a `silent` partition and are never answered."""
        return len(self._mute)

    @property
    def connections(self) -> int:
        """How many are live: connecting, or connected."""
        return len(self._connections)

    def totals(self) -> dict[str, Any]:
        """Bytes in each direction since the link began."""
        sums = []
        for number in range(2):
            total = Totals()
            for ledger in (connection.flows[number].ledger for connection in self._live()):
                total.add(ledger)
            finished = self._finished[number]
            total.received += finished.received
            total.delivered += finished.delivered
            total.dropped.update(finished.dropped)
            sums.append(total.plain())
        return dict(zip(NAMES, sums, strict=True))

    def state(self) -> dict[str, Any]:
        """All there is to know, as plain values."""
        return {
            "name": self.name,
            "listen": self.address,
            "upstream": f"{self.upstream[0]}:{self.upstream[1]}",
            "seed": self.seed,
            "at_s": round(self.now(), 3),
            "layers": {
                name: {"direction": layer.direction, "profile": self._words.get(name)}
                for name, layer in self._layers.items()
            },
            "partition": self._kind,
            "cut": [name for name, cut in zip(NAMES, self._cut, strict=True) if cut],
            "connections": self.connections,
            "accepted": self.accepted,
            "bytes": self.totals(),
            "losses": sum(flow.path.losses for connection in self._live() for flow in connection.flows),
            "violations": self.violations,
        }

    def verify(self) -> None:
        """Check the books of every live connection."""
        for connection in self._live():
            self._audit(connection)

    # what connections need

    def now(self) -> float:
        """Seconds since the link began."""
        return clock.now() - self._began_at

    def tell(self, what: str, **fields: Any) -> None:
        self.log.add(LinkEvent(self.now(), self.name, what, fields))

    async def reachable(self) -> None:
        await self._there.wait()

    def closed(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)
        self._audit(connection)
        for flow in connection.flows:
            self._finished[flow.number].add(flow.ledger)

    def __repr__(self) -> str:
        to = f"{self.upstream[0]}:{self.upstream[1]}"
        return f"<LinkProxy {self.name} {self._door!r} → {to} {self._kind or 'whole'}, {self.connections} live>"

    # inside

    def _put(self, name: str, profile: StreamProfile, direction: Direction, traces: Traces) -> None:
        if profile.recording is not None and traces is None:
            raise LinkError("recording: its files were not read; load the profile as a scenario, or pass `traces`")
        self._generation += 1
        layer = LinkLayer.build(
            name, profile, direction=direction, draw=self._draw_of(name), traces=traces, now=self.now()
        )
        old = self._layers.get(name)
        self._layers[name] = layer
        self._words[name] = msgspec.to_builtins(profile)
        self._change([layer] if old is None else [old, layer])

    def _draw_of(self, name: str) -> Callable[..., Draw]:
        """Chance for the next layer. Every layer has its own, so one that comes again is not the same weather again."""
        generation = self._generation
        return lambda *what: stream(self.seed, self.name, name, generation, *what).random

    def _change(self, changed: list[LinkLayer]) -> None:
        """Put the layers there are into every connection, in the directions that those which changed cover."""
        layers = self._stacked()
        now = self.now()
        touched = [number for number in range(2) if any(layer.covers(number) for layer in changed)]
        for number in touched:
            for rate in (layer.rates[number] for layer in layers):
                if rate is not None:
                    rate.restart(now)
            for connection in self._live():
                connection.flows[number].change(layers)
        self._pump()

    def _stacked(self) -> list[LinkLayer]:
        """The base first, whenever it came."""
        return sorted(self._layers.values(), key=lambda layer: layer.name != BASE)

    def _break(self, kind: Kind | None, cut: tuple[bool, bool]) -> None:
        self._kind, self._cut = kind, cut
        self._partition += 1
        if self._healing is not None:
            self._healing.cancel()
            self._healing = None
        if cut[0]:  # who only gets no answers can be connected to: that is what makes a half-open link nasty
            self._there.clear()
        else:
            self._there.set()
        if kind in ("refuse", "reset", "close"):
            for connection in list(self._connections.values()):
                connection.finish(f"partition: {kind}", "cut", reset=kind != "close")
        if kind == "refuse":
            self._door.refuse()
        elif kind == "deaf":
            self._door.deafen()
        else:
            self._door.open()
        for connection in self._live():
            connection.cut(cut)
        self._pump()

    def _pump(self) -> None:
        for connection in self._live():
            connection.pump()

    def _live(self) -> list[Connection]:
        return [connection for connection in self._connections.values() if connection.flows]

    def _serve(self, client: socket.socket) -> None:
        self.accepted += 1
        if self._kind in ("reset", "close") or len(self._connections) + len(self._mute) >= self._max_connections:
            why = self._kind or f"over {self._max_connections} connections"
            self.tell("refused", connection=self.accepted, why=why)
            close(client, reset=self._kind != "close")
        elif self._kind == "silent":
            self._keep_mute(client)
        else:
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        layers = self._stacked()
        connection = Connection(
            self.accepted,
            client,
            self,
            layers=self._stacked,
            limits=(limit_of(layers, 0), limit_of(layers, 1)),
            nat_idle_s=nat_idle_s(layers),
        )
        self._connections[connection.number] = connection
        self.tell("open", connection=connection.number)
        task = asyncio.create_task(connection.run(lambda: self._cut), name=f"{self.name} connects {connection.number}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _keep_mute(self, client: socket.socket) -> None:
        self._mute.add(client)
        self.tell("open", connection=self.accepted, silent=True)
        asyncio.get_running_loop().add_reader(client, self._hear_mute, client)

    def _hear_mute(self, client: socket.socket) -> None:
        try:
            if client.recv(65536):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self._forget_mute(client, reset=False)

    def _forget_mute(self, client: socket.socket, *, reset: bool) -> None:
        asyncio.get_running_loop().remove_reader(client)
        self._mute.discard(client)
        close(client, reset=reset)

    def _audit(self, connection: Connection) -> None:
        for flow in connection.flows:
            wrong = flow.ledger.error(flow.held_bytes)
            if wrong is not None:
                self.violations += 1
                self.tell(
                    "violation",
                    level="error",
                    connection=connection.number,
                    direction=NAMES[flow.number],
                    wrong=wrong,
                )
