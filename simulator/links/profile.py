"""What a kind of link is like, as a user writes it down, and the links that are built from it.

A profile is data (milliseconds and megabits: it is for people); `build` makes one link of that kind, with its own
chance, so that a hundred devices on one profile have a hundred different links.

    order of stages:  outage → loss → capacity → delay

Both directions share the weather and the outages, since it is one radio; each has its own capacity and jitter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from simulator.links.delay import Delay
from simulator.links.direction import Direction, Stage
from simulator.links.distributions import Constant, Distribution, Draw, LogNormal, Normal, Pareto, Uniform
from simulator.links.loss import Outage, Stall
from simulator.links.rate import Overflow, Rate
from simulator.links.regime import Either, Stretches, Weather, Windows
from simulator.links.trace import Trace, TraceRate


class Jitter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """On top of the delay. `shape` is sigma for lognormal, alpha for pareto, the deviation in ms for normal."""

    dist: Literal["constant", "uniform", "normal", "lognormal", "pareto"]
    ms: float  # median of lognormal and pareto, mean of normal, upper end of uniform
    shape: float = 1.0

    def distribution(self, scale: float) -> Distribution:
        seconds = self.ms * 1e-3 * scale
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


class Alternation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class BadWeather(Alternation, frozen=True, forbid_unknown_fields=True):
    """Gilbert and Elliott's second state: slower by `delay_times`, and losing more."""

    delay_times: float = 1.0
    loss: float = 0.0


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Capacity from Mahimahi files, one for each direction; paths are relative to the scenario's file."""

    to_target: str
    from_target: str
    scale: float = 1.0
    offset_s: float | None = None  # None: anywhere in the recording, another place for each link


class LinkProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of link, seen from the gateway. Capacities are for all who share the link; None is no limit."""

    delay_ms: float = 0.1  # one way
    jitter: Jitter | None = None
    bad: BadWeather | None = None
    outages: Alternation | None = None
    loss: float = 0.0
    to_mbit: float | None = None
    from_mbit: float | None = None
    queue_kbyte: float = inf
    overflow: Overflow = "stall"
    recording: Recording | None = None

    def __post_init__(self) -> None:
        if self.recording and (self.to_mbit or self.from_mbit):
            raise ValueError("recording: a link has a recorded capacity or a fixed one (to_mbit, from_mbit), not both")
        for name, value in (("to_mbit", self.to_mbit), ("from_mbit", self.from_mbit)):
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss must be from 0 up to below 1, not {self.loss}")


@dataclass(frozen=True, slots=True)
class Link:
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
    traces: tuple[Trace, Trace] | None = None,
    partitions: Partitions = Partitions(),
    jitter_times: float = 1.0,
) -> Link:
    """One link of this kind.

    Args:
        stream: chance of its own for each name: "weather", "outages", "to", "from", "trace".
        traces: the recordings that `profile.recording` names, read; to the target and from it.
        jitter_times: all jitter and bad weather is made so much worse.
    """
    bad = profile.bad.weather(stream("weather")) if profile.bad else None
    outages = profile.outages.weather(stream("outages")) if profile.outages else None
    offset_s = 0.0
    if traces is not None and profile.recording is not None:
        given_s = profile.recording.offset_s
        offset_s = stream("trace")() * traces[0].period_s if given_s is None else given_s

    def direction(number: int, name: str, cut: tuple[tuple[float, float], ...], mbit: float | None) -> Direction:
        draw = stream(name)
        stages: list[Stage] = []
        gone: list[Stretches] = [one for one in (outages, Windows(cut) if cut else None) if one is not None]
        if gone:
            stages.append(Outage(gone[0] if len(gone) == 1 else Either(*gone)))
        if profile.loss or (profile.bad and profile.bad.loss):
            bad_loss = profile.bad.loss if profile.bad else 0.0
            stages.append(Stall(profile.loss, bad=bad, bad_chance=max(bad_loss, profile.loss), draw=draw))
        if traces is not None and profile.recording is not None:
            stages.append(TraceRate(traces[number], offset_s=offset_s, scale=profile.recording.scale))
        elif mbit is not None:
            stages.append(Rate(mbit * 125e3, queue_bytes=profile.queue_kbyte * 1e3, overflow=profile.overflow))
        jitter = profile.jitter.distribution(jitter_times) if profile.jitter else None
        # Four-fold jitter makes bad weather four times as much worse than good, and leaves good weather's base alone.
        bad_scale = 1.0 + (profile.bad.delay_times - 1.0) * jitter_times if profile.bad else 1.0
        stages.append(Delay(profile.delay_ms * 1e-3, jitter=jitter, bad=bad, bad_scale=bad_scale, draw=draw))
        return Direction(stages)

    return Link(
        direction(0, "to", partitions.to_target, profile.to_mbit),
        direction(1, "from", partitions.from_target, profile.from_mbit),
    )
