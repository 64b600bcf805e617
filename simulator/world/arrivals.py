"""An open loop of arrivals: when requests come and what they are, independent of how earlier requests fared.

A process of unit rate (exponential, regular or long-tailed gaps) is laid out in operational time, and the rate of the
moment says how fast operational time passes: twice the rate, half the gaps. So a step, a burst and a long-tailed
process combine without special cases, and doubling the rate keeps the same pattern of requests, only closer together.

Chance: the gaps, the bursts and the requests' contents have streams of their own; the contents do not depend on the
rate, so request number 17 is the same at every load and under every policy.
Source: Çinlar, "Introduction to Stochastic Processes", 1975, ch. 4 (time change of a Poisson process).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, inf, log
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from msgspec.structs import replace

from simulator.scenarios.scenario import ArrivalsSpec, ClassSpec, OutputSpec, RateStep, RecordedArrival, Scenario
from tidegate.netsim.links.regime import Weather
from tidegate.netsim.random_streams import stream

_COPIES_WITHIN_S = 0.5  # of the one that was recorded


class SimulatedRequest(NamedTuple):
    """One request as its caller sends it. `noise` is its own standard normal: how long it really takes anywhere.
    `tries` counts from 1; a retry is the same request again."""

    number: int
    at: float
    kind: ClassSpec
    length: int
    noise: float
    hard: bool
    tries: int = 1
    output: int = 0  # tokens that the answer will have, where the model generates, ...
    leaves_after: int = 0  # ... and how many of them its caller waits for; 0: for all

    @property
    def units(self) -> float:
        return float(self.length * self.kind.rows)


def requests(scenario: Scenario, seed: int) -> Iterator[SimulatedRequest]:
    """All requests of a run, in order."""
    if scenario.arrivals.recorded:
        yield from _recorded(scenario, seed)
        return
    draw = stream(seed, "requests")
    kinds = scenario.classes
    steps = [step for step in scenario.arrivals.steps if step.shares]
    usual = [kind.share for kind in kinds]
    for number, at in enumerate(instants(scenario.arrivals, scenario.duration_s, seed)):
        (kind,) = draw.choices(kinds, _shares(kinds, steps, at) if steps else usual)
        yield request_of(kind, number, at, draw)


def _recorded(scenario: Scenario, seed: int) -> Iterator[SimulatedRequest]:
    """Those of a recording at their instants, each as often as the rate is a multiple of the recorded one."""
    arrivals, draw = scenario.arrivals, stream(seed, "requests")
    times = arrivals.rate / arrivals.recorded_rate
    coming: list[tuple[float, int]] = []  # (instant, place in the recording): copies come a little later
    number = 0
    for place, one in enumerate(arrivals.recorded):
        for copy in range(int(times + draw.random())):
            heappush(coming, (one.at_s + (copy and _COPIES_WITHIN_S * draw.random()), place))
        while coming and (place + 1 == len(arrivals.recorded) or coming[0][0] <= arrivals.recorded[place + 1].at_s):
            at, origin = heappop(coming)
            if at >= scenario.duration_s:
                break
            yield _replayed(scenario.classes, arrivals.recorded[origin], number, at, draw)
            number += 1


def _replayed(
    kinds: Sequence[ClassSpec], one: RecordedArrival, number: int, at: float, draw: Random
) -> SimulatedRequest:
    kind = kinds[one.class_]
    units = max(1, one.length * one.rows)
    own = replace(kind, budget_ms=one.budget_ms, rows=one.rows, bytes_per_unit=one.body_bytes / units)
    return SimulatedRequest(number, at, own, one.length, draw.gauss(0.0, 1.0), draw.random() < kind.hard_share)


def _shares(kinds: Sequence[ClassSpec], steps: Sequence[RateStep], at: float) -> list[float]:
    shares = {kind.name: kind.share for kind in kinds}
    for step in steps:
        if step.at_s <= at < step.at_s + step.for_s:
            shares.update(step.shares)
    return list(shares.values())


def request_of(kind: ClassSpec, number: int, at: float, draw: Random) -> SimulatedRequest:
    """A request of this class, with its own length and luck."""
    size = kind.length
    length = size.median * exp(size.sigma * draw.gauss(0.0, 1.0)) if size.sigma else size.median
    fitted = int(min(size.max, max(size.min, round(length))))
    request = SimulatedRequest(number, at, kind, fitted, draw.gauss(0.0, 1.0), draw.random() < kind.hard_share)
    return request if kind.output is None else _with_output(request, kind.output, draw)


def _with_output(request: SimulatedRequest, spec: OutputSpec, draw: Random) -> SimulatedRequest:
    drawn = (
        _between(spec.quantiles, draw.random()) if spec.quantiles else log(spec.median) + spec.sigma * draw.gauss(0, 1)
    )
    length = max(1, min(spec.max_tokens, round(exp(min(drawn, log(spec.max_tokens) + 1.0)))))
    leaves = draw.random() < spec.leaves_share
    return request._replace(output=length, leaves_after=draw.randrange(1, length + 1) if leaves else 0)


def _between(quantiles: Sequence[tuple[float, float]], share: float) -> float:
    """The logarithm of the length at `share`, on the line through the two quantiles about it."""
    right = min(max(1, bisect_right([one for one, _ in quantiles], share)), len(quantiles) - 1)
    (low, short), (high, long) = quantiles[right - 1], quantiles[right]
    # Lines over the normal deviate: straight is log-normal, and a tail goes on as one.
    at, start, end = (NormalDist().inv_cdf(min(0.9999, max(0.0001, one))) for one in (share, low, high))
    return log(short) + (at - start) / (end - start) * (log(long) - log(short))


def instants(spec: ArrivalsSpec, until_s: float, seed: int) -> Iterator[float]:
    """The instants of arrivals from 0 up to `until_s`."""
    at = 0.0
    pieces = _rates(spec, seed)
    end, rate = next(pieces)
    for gap in _gaps(spec, seed):
        left = gap  # of operational time
        while left > (end - at) * rate:
            left -= (end - at) * rate
            at = end
            end, rate = next(pieces)
        at += left / rate
        if at >= until_s:
            return
        yield at


def _gaps(spec: ArrivalsSpec, seed: int) -> Iterator[float]:
    """Gaps with a mean of 1."""
    draw = stream(seed, "gaps").random
    match spec.process:
        case "periodic":
            yield from _periodic_gaps(spec, seed)
        case "pareto":
            mean = spec.alpha / (spec.alpha - 1.0)  # of a Pareto from 1 on, divided out below
            while True:
                yield exp(-log(1.0 - draw()) / spec.alpha) / mean
        case _:
            while True:
                yield -log(1.0 - draw())


def _periodic_gaps(spec: ArrivalsSpec, seed: int) -> Iterator[float]:
    """Of rate · period devices, each once in a period of as many units, jittered by a tenth of the period."""
    source = stream(seed, "gaps")
    devices = max(1, round(spec.rate * spec.period_s))
    due = [source.random() * devices for _ in range(devices)]
    heapify(due)
    last = 0.0
    while True:
        at = due[0]
        heapreplace(due, at + devices * (1.0 + 0.1 * (2.0 * source.random() - 1.0)))
        yield at - last
        last = at


def _rates(spec: ArrivalsSpec, seed: int) -> Iterator[tuple[float, float]]:
    """(until, rate): the rate of every moment, for ever."""
    bursts = None
    usual, burst = spec.rate, spec.rate
    if spec.process == "bursty":
        for_s, gap_s = spec.burst_for_s, spec.burst_every_s - spec.burst_for_s
        bursts = Weather(mean_on_s=for_s, mean_off_s=gap_s, draw=stream(seed, "bursts").random)
        burst = spec.rate * spec.burst_times
        # What the gaps must have for the mean over bursts and gaps to be `rate`.
        usual = spec.rate * (spec.burst_every_s - spec.burst_times * for_s) / gap_s
    at = 0.0
    edges = sorted({edge for step in spec.steps for edge in (step.at_s, step.at_s + step.for_s)})
    while True:
        step_times = 1.0
        for step in spec.steps:
            if step.at_s <= at < step.at_s + step.for_s:
                step_times *= step.times
        end = next((edge for edge in edges if edge > at), inf)
        rate = usual
        if bursts is not None:
            until = bursts.until(at)
            rate = burst if until > at else usual
            end = min(end, until if until > at else bursts.next_on(at))
        yield end, max(rate * step_times, 1e-9)
        at = end
