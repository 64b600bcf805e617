"""Links for streams of bytes: when a proxy may take bytes of a connection, and when it may pass them on.

A frame in the simulated fleet is sent and has its instant (`direction.py`). Bytes of a real connection are different:
they may be held back before they enter (the queue is full, the link is gone), thousands of segments of many connections
go through one radio, and what is on its way when the link changes is real data that must come out. So here

    gates        is the link there, is there room?    shared     `enters_at`: now, or when to ask again
    capacities   one radio, one queue                 shared     first in, first out among all connections
    losses       a lost segment stalls its stream     own        after the capacity, or one's loss would hold up others
    delays       the way itself                       own        what has come so far keeps its instant whatever changes

A `LinkLayer` is one profile in use on a link, for one direction or both; layers stack. A `StreamPath` is one
connection's one direction through all layers. Chance comes by name, so connection number 3 has the same delays in every
run with one seed, whatever the other connections do.

Invariants: `delivered_at` never falls within one path, and is never before `left_at`, which is never before now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from tidegate.netsim.links.delay import Delay
from tidegate.netsim.links.distributions import Draw
from tidegate.netsim.links.limit import ByteLimit, Then
from tidegate.netsim.links.loss import OutageStage, StallStage
from tidegate.netsim.links.profile import LinkProfile, SharedConditions, capacity, delay, loss
from tidegate.netsim.links.rate import Rate
from tidegate.netsim.links.recorded import RecordedDelay
from tidegate.netsim.links.trace import CapacityTrace, TraceRate

Direction = Literal["to", "from", "both"]
NAMES: Final = ("to", "from")  # towards the upstream, and back
PACKET_BYTES: Final = 1500
CHUNK_BYTES: Final = 65536  # where neither rate nor loss asks for finer ones

DrawOf = Callable[..., Draw]  # the stream of chance of these names


class LimitSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Each connection passes so many bytes, then breaks."""

    bytes: int
    then: Then = "reset"

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise ValueError(f"bytes must not be below 0, and is {self.bytes}")


class StreamProfile(LinkProfile, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link as in a fleet's scenario, and what only connections have."""

    nat_idle_s: float | None = None  # forgotten after so long without a byte in either direction
    limit: LimitSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nat_idle_s is not None and not self.nat_idle_s > 0.0:
            raise ValueError(f"nat_idle_s must be above 0, not {self.nat_idle_s}")


class Passage(NamedTuple):
    left_at: float  # when it is through gates, queues and losses: on its way, out of reach of changes
    delivered_at: float


@dataclass(frozen=True, slots=True, eq=False)
class LinkLayer:
    """A profile in use on a link. What connections share is here, made once. Two of the same words are two layers."""

    name: str
    profile: StreamProfile
    direction: Direction
    draw: DrawOf
    air: SharedConditions
    rates: tuple[Rate | TraceRate | None, Rate | TraceRate | None]
    gate: OutageStage | None

    @classmethod
    def build(
        cls,
        name: str,
        profile: StreamProfile,
        *,
        direction: Direction,
        draw: DrawOf,
        traces: tuple[CapacityTrace, CapacityTrace] | None = None,
        now: float = 0.0,
    ) -> LinkLayer:
        """Its weather and recordings begin now.

        Args:
            draw: chance by name, of this layer alone: "weather", ("to", 3) for the third connection's way there, …
            traces: what `profile.recording` names, read.
        """
        air = SharedConditions.over(profile, draw, traces, now)
        gate = OutageStage(air.gone) if air.gone is not None else None
        rates = capacity(profile, 0, air), capacity(profile, 1, air)
        return cls(name, profile, direction, draw=draw, air=air, rates=rates, gate=gate)

    def covers(self, number: int) -> bool:
        return self.direction in ("both", NAMES[number])


class StreamPath:
    """One direction of one connection. Mutable: `change` puts other layers in place of those it has."""

    __slots__ = ("_connection", "_gates", "_last_at", "_number", "_own", "_rates", "segment")

    def __init__(self, layers: Sequence[LinkLayer], number: int, connection: int) -> None:
        self._number = number
        self._connection = connection
        self._own: dict[LinkLayer, tuple[StallStage | None, Delay | RecordedDelay]] = {}
        self.change(layers, on_its_way_until=0.0)

    def change(self, layers: Sequence[LinkLayer], *, on_its_way_until: float) -> None:
        """Bytes that enter from now on go through these; the last of those on their way comes at that instant."""
        self._last_at = on_its_way_until
        covering = [layer for layer in layers if layer.covers(self._number)]
        self._gates = [layer.gate for layer in covering if layer.gate is not None]
        self._rates = [rate for layer in covering if (rate := layer.rates[self._number]) is not None]
        # Those that stay keep their place in their chance: a change elsewhere must not deal the same delays again.
        self._own = {layer: self._own.get(layer) or self._for_me(layer) for layer in covering}
        self.segment = self._segment_bytes()

    def enters_at(self, size_bytes: int, now: float) -> float:
        """`now` if the bytes may enter; else when to ask again, or infinity."""
        at = now
        for gate in self._gates:
            at = max(at, gate.leaves_at(size_bytes, now))
        if at > now:
            return at
        for rate in self._rates:
            at = max(at, rate.enters_at(size_bytes, now))
        return at

    def next_segment_bytes(self) -> int:
        """How many bytes to send next, at most."""
        size = self.segment
        for rate in self._rates:
            size = min(size, rate.next_segment_bytes())
        return size

    def send(self, size_bytes: int, now: float) -> Passage:
        """Enter, and be on one's way."""
        at = now
        for rate in self._rates:
            at = rate.leaves_at(size_bytes, at)
        for stall, _ in self._own.values():
            if stall is not None:
                at = stall.leaves_at(size_bytes, at)
        left_at = at
        for _, way in self._own.values():
            at = way.leaves_at(size_bytes, at)
        self._last_at = max(at, self._last_at)
        return Passage(left_at, self._last_at)

    @property
    def losses(self) -> int:
        """How many sendings were lost, and sent again."""
        return sum(stall.stalls for stall, _ in self._own.values() if stall is not None)

    def _for_me(self, layer: LinkLayer) -> tuple[StallStage | None, Delay | RecordedDelay]:
        draw = layer.draw(NAMES[self._number], self._connection)
        return loss(layer.profile, layer.air, draw), delay(layer.profile, layer.air, draw)

    def _segment_bytes(self) -> int:
        sizes = [rate.segment_bytes() for rate in self._rates]
        if any(stall is not None for stall, _ in self._own.values()):
            sizes.append(PACKET_BYTES)  # the dice are rolled for each packet
        return max(1, min([CHUNK_BYTES, *sizes]))

    def __repr__(self) -> str:
        own = [one for pair in self._own.values() for one in pair if one is not None]
        stages = [*self._gates, *self._rates, *own]
        return f"<StreamPath {NAMES[self._number]} {' → '.join(map(repr, stages)) or 'at once'}>"


def limit_of(layers: Sequence[LinkLayer], number: int) -> ByteLimit | None:
    """The tightest limit for a new connection's direction."""
    specs = [layer.profile.limit for layer in layers if layer.covers(number) and layer.profile.limit is not None]
    tightest = min(specs, key=lambda spec: spec.bytes, default=None)
    return ByteLimit(tightest.bytes, tightest.then) if tightest is not None else None


def nat_idle_s(layers: Sequence[LinkLayer]) -> float | None:
    """The shortest NAT timeout on the way."""
    return min((layer.profile.nat_idle_s for layer in layers if layer.profile.nat_idle_s is not None), default=None)
