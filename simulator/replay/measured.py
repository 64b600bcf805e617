"""Measured speed as parts of a scenario: how long calls really took against the targets' tables.

A live fleet reports what each call took beside its target's own table. Two numbers stand for that: the drift (the
mean of the logarithm: a table holds the fastest of a few runs, so calls take some percent longer) and the noise around
it (its deviation). A drift may change with time, as heat does; then it is given by stretches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import exp, inf, log
from typing import NamedTuple

from simulator.scenarios.scenario import Fault
from tidegate.netsim.links.profile import Jitter, LinkProfile

_LOGNORMAL_MEAN = exp(0.5)  # of a median of 1 with sigma 1
_ENOUGH = 5  # calls in a stretch that make a drift of its own


class MeasuredSlowdown(NamedTuple):
    """How many times its table's seconds a target's calls took."""

    times: float = 1.0
    sigma: float = 0.1


def drift_of(ratios: Sequence[float], *, otherwise: MeasuredSlowdown = MeasuredSlowdown()) -> MeasuredSlowdown:  # noqa: B008  # immutable
    """Of what calls took against the table."""
    logs = [log(one) for one in ratios if one > 0.0]
    if not logs:
        return otherwise
    return MeasuredSlowdown(exp(statistics.fmean(logs)), statistics.pstdev(logs) if len(logs) > 1 else otherwise.sigma)


def always_slow(target: str, times: float) -> Fault:
    return Fault(kind="slow", at_s=0.0, for_s=inf, target=target, times=times)


def slow_by_stretches(
    target: str, calls: Iterable[tuple[float, float]], stretch_s: float, until_s: float
) -> list[Fault]:
    """The measured slowness by stretches of time; a stretch with few calls gets that of the whole.

    Args:
        calls: (instant, what it took against the table).
    """
    calls = list(calls)
    usual = drift_of([ratio for _, ratio in calls]).times
    faults, start_s = [], 0.0
    while start_s < until_s:
        end_s = start_s + stretch_s if start_s + 1.5 * stretch_s < until_s else inf
        own = [ratio for at, ratio in calls if start_s <= at < end_s]
        times = drift_of(own).times if len(own) >= _ENOUGH else usual
        faults.append(Fault(kind="slow", at_s=start_s, for_s=end_s - start_s, target=target, times=times))
        start_s = end_s
    return faults


def steady_link(rtt_s: float, jitter_s: float) -> LinkProfile:
    """Half of the round trip each way; its mean deviation as a lognormal tail on top of what is always there."""
    way_ms = 500.0 * rtt_s
    tail_ms = min(500.0 * jitter_s, 0.9 * way_ms)  # the mean of the tail
    return LinkProfile(
        delay_ms=way_ms - tail_ms, jitter=Jitter("lognormal", max(tail_ms, 1e-3) / _LOGNORMAL_MEAN, shape=1.0)
    )
