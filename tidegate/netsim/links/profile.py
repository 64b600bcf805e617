"""A link profile describes a kind of link as a user writes it, and `build` makes links of it.

A profile is data (milliseconds and megabits: it is for people); `build` makes one link of that kind, with its own
chance, so that a hundred devices on one profile have a hundred different links.

    order of stages:  outage → loss → capacity → delay

Both directions share the weather and the outages, since it is one radio; each has its own capacity and jitter.
`stream.py` puts the same parts together for streams of bytes, where many connections share one link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, Literal, TypeVar

import msgspec

from tidegate.netsim.links.delay import Delay
from tidegate.netsim.links.direction import Direction, LinkStage
from tidegate.netsim.links.distributions import (
    Constant,
    Correlated,
    Distribution,
    Draw,
    Empirical,
    LogNormal,
    Normal,
    Pareto,
    Uniform,
)
from tidegate.netsim.links.loss import OutageStage, StallStage
from tidegate.netsim.links.rate import Overflow, Rate
from tidegate.netsim.links.recorded import RecordedDelay
from tidegate.netsim.links.regime import Chain, Either, OnOffSchedule, Since, Weather, Windows
from tidegate.netsim.links.trace import CapacityTrace, TraceRate

# By distribution: beyond these a draw is no number of seconds any more, or always the same one.
_SHAPES: Final = {"normal": (0.0, 1e6), "lognormal": (0.0, 10.0), "pareto": (0.1, 1000.0)}


class Jitter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """On top of the delay. `shape` is sigma for lognormal, alpha for pareto, the deviation in ms for normal.

    `empirical` has measured milliseconds: `file` names one a line, or they stand in `samples_ms`.
    """

    dist: Literal["constant", "uniform", "normal", "lognormal", "pareto", "empirical"]
    ms: float = 0.0  # median of lognormal and pareto, mean of normal, upper end of uniform
    shape: float = 1.0
    correlation: float = 0.0  # of one sample with the one before
    file: str | None = None
    samples_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.dist == "empirical") != bool(self.file or self.samples_ms):
            raise ValueError("file or samples_ms is for 'empirical' jitter, which needs one of them")
        if not 0.0 <= self.correlation < 1.0:
            raise ValueError(f"correlation must be from 0 up to below 1, not {self.correlation}")
        if not 0.0 <= self.ms < inf:
            raise ValueError(f"ms must be a number from 0 up, not {self.ms}")
        least, most = _SHAPES.get(self.dist, (-inf, inf))
        if not least <= self.shape <= most:
            raise ValueError(f"shape of {self.dist!r} jitter must be from {least:g} to {most:g}, not {self.shape}")

    def distribution(self, scale: float) -> Distribution:
        shape = self._shape(self.ms * 1e-3 * scale, scale)
        return Correlated(shape, self.correlation) if self.correlation else shape

    def _shape(self, seconds: float, scale: float) -> Distribution:
        match self.dist:
            case "constant":
                return Constant(seconds)
            case "uniform":
                return Uniform(0.0, seconds)
            case "normal":
                return Normal(seconds, self.shape * 1e-3 * scale)
            case "lognormal":
                return LogNormal(seconds, self.shape)
            case "pareto":
                return Pareto(seconds, self.shape)
            case "empirical":
                return Empirical([one * 1e-3 * scale for one in self.samples_ms])


class Alternation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that comes about every `every_s` seconds and stays for about `for_s`: exactly so long if `steady`, and
    exactly so often as well if `periodic`."""

    every_s: float
    for_s: float
    periodic: bool = False
    steady: bool = False

    def weather(self, draw: Draw) -> Weather:
        return Weather(
            mean_on_s=self.for_s,
            mean_off_s=self.every_s - self.for_s,
            draw=draw,
            periodic=self.periodic,
            steady=self.steady,
        )

    def __post_init__(self) -> None:
        if not 0.0 < self.for_s < self.every_s:
            raise ValueError(f"for_s ({self.for_s}) must be above 0 and below every_s ({self.every_s})")


class BadWeather(Alternation, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Gilbert and Elliott's second state: slower by `delay_times`, and losing more."""

    delay_times: float = 1.0
    loss: float = 0.0


class States(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Good, bad and dead: a link dies only after it was bad, and is good again afterwards. Mean times, exponential."""

    good_s: float
    bad_s: float
    dead_s: float
    dead_share: float = 0.5  # of the ends of bad times
    delay_times: float = 1.0  # while bad
    loss: float = 0.0  # while bad

    def __post_init__(self) -> None:
        if not (min(self.good_s, self.bad_s, self.dead_s) > 0.0 and 0.0 <= self.dead_share <= 1.0):
            raise ValueError("good_s, bad_s and dead_s must be above 0, and dead_share from 0 to 1")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss must be from 0 up to below 1, not {self.loss}")

    def chain(self, draw: Draw) -> Chain:
        moves = ((0.0, 1.0, 0.0), (1.0 - self.dead_share, 0.0, self.dead_share), (1.0, 0.0, 0.0))
        return Chain((self.good_s, self.bad_s, self.dead_s), moves, draw)


class CapacityRecording(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Capacity from files, one for each direction; paths are relative to the scenario's file.

    A name that ends in .csv has a line of names and columns `s` and `column` (Mbit/s); all else is Mahimahi's format.
    """

    to_target: str
    from_target: str
    scale: float = 1.0
    offset_s: float | None = None  # None: anywhere in the recording, another place for each link
    loop: bool = True  # else nothing gets through after its end
    column: str = "mbit"

    def __post_init__(self) -> None:
        if not self.scale > 0.0:
            raise ValueError(f"scale must be above 0, not {self.scale}")
        if self.offset_s is not None and self.offset_s < 0.0:
            raise ValueError(f"offset_s must not be below 0, and is {self.offset_s}")

    def parse(self, name: str, text: str) -> CapacityTrace:
        """The recording in this file. Raises ValueError."""
        if name.endswith(".csv"):
            return CapacityTrace.parse_csv(text, column=self.column, loops=self.loop)
        return CapacityTrace.parse(text, loops=self.loop)


class RoundTrips(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """As measured, with their instants on the clock of the run, in order."""

    at_s: tuple[float, ...]
    rtt_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.at_s or len(self.at_s) != len(self.rtt_ms):
            raise ValueError("at_s and rtt_ms must be as many as each other, and at least one")
        if any(later < earlier for earlier, later in pairwise(self.at_s)) or min(self.rtt_ms) < 0.0:
            raise ValueError("at_s must not decrease, and no rtt_ms may be below 0")


class LinkProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of link, seen from the gateway. All connections share the capacities; None is no limit."""

    delay_ms: float = 0.1  # one way
    jitter: Jitter | None = None
    bad: BadWeather | None = None
    outages: Alternation | None = None
    states: States | None = None  # instead of `bad` and `outages`
    loss: float = 0.0
    to_mbit: float | None = None
    from_mbit: float | None = None
    queue_kbyte: float = inf
    overflow: Overflow = "stall"
    recording: CapacityRecording | None = None
    round_trips: RoundTrips | None = None  # instead of `delay_ms`, `jitter` and weather

    def __post_init__(self) -> None:
        if self.round_trips and (self.jitter or self.bad or self.states):
            raise ValueError("round_trips: a link has recorded round trips, or jitter and weather, not both")
        if self.recording and (self.to_mbit or self.from_mbit):
            raise ValueError("recording: a link has a recorded capacity or a fixed one (to_mbit, from_mbit), not both")
        for name, value in (("to_mbit", self.to_mbit), ("from_mbit", self.from_mbit)):
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss must be from 0 up to below 1, not {self.loss}")
        if not 0.0 <= self.delay_ms < inf:
            raise ValueError(f"delay_ms must be a number from 0 up, and is {self.delay_ms}")
        if not self.queue_kbyte > 0.0:
            raise ValueError(f"queue_kbyte must be above 0, not {self.queue_kbyte}")
        if self.states and (self.bad or self.outages):
            raise ValueError("states: a link has states, or bad weather and outages of their own, not both")


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Two directions, seen from the gateway."""

    to_target: Direction
    from_target: Direction


@dataclass(frozen=True, slots=True)
class Partitions:
    """When a link is cut by order of a scenario, for each direction."""

    to_target: tuple[tuple[float, float], ...] = ()
    from_target: tuple[tuple[float, float], ...] = ()


def build(
    profile: LinkProfile,
    stream: Callable[[str], Draw],
    *,
    traces: tuple[CapacityTrace, CapacityTrace] | None = None,
    partitions: Partitions = Partitions(),
    jitter_times: float = 1.0,
) -> LinkModel:
    """One link of this kind.

    Args:
        stream: chance of its own for each name: "weather", "outages", "to", "from", "trace".
        traces: the recordings that `profile.recording` names, read; to the target and from it.
        jitter_times: all jitter and bad weather is made so much worse.
    """
    air = SharedConditions.over(profile, stream, traces)

    def direction(number: int, name: str, cut: tuple[tuple[float, float], ...]) -> Direction:
        draw = stream(name)
        gone = [one for one in (air.gone, Windows(cut) if cut else None) if one is not None]
        stages: list[LinkStage | None] = [
            OutageStage(gone[0] if len(gone) == 1 else Either(*gone)) if gone else None,
            loss(profile, air, draw),
            capacity(profile, number, air),
            delay(profile, air, draw, jitter_times),
        ]
        return Direction([one for one in stages if one is not None])

    return LinkModel(direction(0, "to", partitions.to_target), direction(1, "from", partitions.from_target))


@dataclass(frozen=True, slots=True)
class SharedConditions:
    """What both directions of a link share: its weather, its outages, its recordings and the place in them."""

    bad: OnOffSchedule | None = None
    delay_times: float = 1.0  # in bad weather
    bad_loss: float = 0.0
    gone: OnOffSchedule | None = None
    traces: tuple[CapacityTrace, CapacityTrace] | None = None
    offset_s: float = 0.0
    starts_at: float = 0.0

    @classmethod
    def over(
        cls,
        profile: LinkProfile,
        stream: Callable[[str], Draw],
        traces: tuple[CapacityTrace, CapacityTrace] | None,
        starts_at: float = 0.0,
    ) -> SharedConditions:
        """With chance of its own; `starts_at` is when all of it begins."""
        bad: OnOffSchedule | None = profile.bad.weather(stream("weather")) if profile.bad else None
        gone: OnOffSchedule | None = profile.outages.weather(stream("outages")) if profile.outages else None
        worse: BadWeather | States | None = profile.bad
        if profile.states is not None:
            chain = profile.states.chain(stream("states"))
            bad, gone, worse = chain.during(1), chain.during(2), profile.states
        offset_s = 0.0
        if traces is not None and profile.recording is not None:
            given_s = profile.recording.offset_s
            offset_s = stream("trace")() * traces[0].period_s if given_s is None else given_s
        return cls(
            bad=Since(bad, starts_at) if bad and starts_at else bad,
            delay_times=worse.delay_times if worse else 1.0,
            bad_loss=worse.loss if worse else 0.0,
            gone=Since(gone, starts_at) if gone and starts_at else gone,
            traces=traces,
            offset_s=offset_s,
            starts_at=starts_at,
        )


def capacity(profile: LinkProfile, number: int, air: SharedConditions) -> Rate | TraceRate | None:
    """Of direction 0 (to the target) or 1; None without a limit."""
    queue_bytes = profile.queue_kbyte * 1e3
    if air.traces is not None and profile.recording is not None:
        return TraceRate(
            air.traces[number],
            offset_s=air.offset_s,
            scale=profile.recording.scale,
            queue_bytes=queue_bytes,
            overflow=profile.overflow,
            starts_at=air.starts_at,
        )
    mbit = (profile.to_mbit, profile.from_mbit)[number]
    return None if mbit is None else Rate(mbit * 125e3, queue_bytes=queue_bytes, overflow=profile.overflow)


def loss(profile: LinkProfile, air: SharedConditions, draw: Draw) -> StallStage | None:
    if not (profile.loss or air.bad_loss):
        return None
    return StallStage(profile.loss, bad=air.bad, bad_chance=max(air.bad_loss, profile.loss), draw=draw)


def delay(profile: LinkProfile, air: SharedConditions, draw: Draw, jitter_times: float = 1.0) -> Delay | RecordedDelay:
    if profile.round_trips is not None:
        rtts_s = [rtt_ms * 1e-3 for rtt_ms in profile.round_trips.rtt_ms]
        return RecordedDelay(profile.round_trips.at_s, rtts_s, draw=draw, jitter_times=jitter_times)
    jitter = profile.jitter.distribution(jitter_times) if profile.jitter else None
    bad_scale = worse_by(air, jitter_times)
    return Delay(profile.delay_ms * 1e-3, jitter=jitter, bad=air.bad, bad_scale=bad_scale, draw=draw)


def worse_by(air: SharedConditions, jitter_times: float) -> float:
    """How many times as long as in good weather a frame takes in bad."""
    # Four-fold jitter makes bad weather four times as much worse than good, and leaves good weather's base alone.
    return 1.0 + (air.delay_times - 1.0) * jitter_times


ProfileT = TypeVar("ProfileT", bound=LinkProfile)


def with_files(profile: ProfileT, read: Callable[[str], str]) -> ProfileT:
    """The same with the samples of an empirical jitter read from its file.

    Raises:
        OSError, ValueError: the file cannot be read, or has something else in it.
    """
    if profile.jitter is None or profile.jitter.file is None:
        return profile
    samples_ms = tuple(float(line) for line in read(profile.jitter.file).split())
    jitter = msgspec.structs.replace(profile.jitter, file=None, samples_ms=samples_ms)
    return msgspec.structs.replace(profile, jitter=jitter)
