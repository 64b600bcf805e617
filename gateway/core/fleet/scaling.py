"""The replica scaler predicts how many replicas of the pool answer the target share of requests in time.

A threshold on CPU cannot tell a pool that is busy and in time from one that is busy and late, and a threshold on the
queue's length asks for help when it is late already. Both wait for a replica to start before anything gets better. The
gateway sees the requests themselves, knows what each costs there (the offered table) and how long it may take, so it
can ask for what will be needed when a replica that is started now is ready:

    load     pool-seconds of work that come a second; a batch's fixed part is shared by as many as the slack lets wait
    forecast the line through the last `WINDOW_S` of load, at now + start_s; never below where the load is
    spread   standard deviation of the load in stretches as long as a request may wait, around that line
    needed   = ⌈ strain · (forecast + z · spread) / workers + backlog / DRAIN_S ⌉        Φ(z) = target_attainment

Where several gateways send to the pool, each computes the need of all, from the terms that the others report: one
margin for their variations together, and one rounding, minimum and maximum. Every gateway then tells the same number.

Work that comes within the time that a request may wait is worked off in that time, so that stretch is the one whose
variation has to be staffed for: for independent arrivals `z · spread` is the square-root rule, load + β √load, and for
bursts and long tails it is as much more as they vary more. `strain` is what the model does not know (padding, uneven
routes, tables that are off): it is learned, up by what is late while as many replicas serve as were asked for, and
slowly down while nearly nothing is.

For its first `KNOWN_S` it needs what is there, and says that it does not know (`known`).

Hysteresis: up at once; down to the largest need of the last `scale_down_s`. A need that exceeds a whole number by less
than a tenth is that number.

Invariants: min_replicas <= needed <= max_replicas; needed never falls by more than the last `scale_down_s` allow;
memory is bounded by WINDOW_S and scale_down_s. `now` does not decrease.
It can be wrong where load steps up by more than the spread within start_s: no replica can be started in the past.
Source: Halfin and Whitt, "Heavy-Traffic Limits for Queues with Many Exponential Servers", Operations Research 1981;
Jennings, Mandelbaum, Massey and Whitt, "Server Staffing to Meet Time-Varying Demand", Management Science 1996;
Fendick and Whitt, "Measurements and Approximations to Describe the Offered Traffic", Proc. IEEE 1989.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Final, NamedTuple

from gateway.core.peers.demand_terms import DemandTerms, pooled

WINDOW_S: Final = 120
KNOWN_S: Final = 60
_SPREAD_S: Final = 300.0  # over which the spread is remembered
_LEAST_STRETCH_S, _MOST_STRETCH_S = 0.1, 2.0
_MEAN_WEIGHT: Final = 0.02  # of one request in the means of cost and slack
_BATCH_SHARE: Final = 0.25  # of the slack that a batch may take
_MOST_BATCH: Final = 8.0
DRAIN_S: Final = 10.0  # within which a backlog should be gone
_DEAD_BAND: Final = 0.1
_LEARN_S: Final = 15.0
_LEARN_LEAST: Final = 30  # answers
_UP, _DOWN = 1.0, 0.997
_STRAIN: Final[tuple[float, ...]] = (0.6, 3.0)
_FIRST_STRAIN: Final = 1.25  # padding, and routes that are uneven


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """What is asked for.

    Args:
        target_attainment: share of requests to the pool that are to be answered in time.
        start_s: from the wish for a replica until it serves.
        scale_down_s: how long a need must have been smaller before it counts.
        workers_per_replica: how many batches a replica computes at the same time.
    """

    target_attainment: float = 0.99
    start_s: float = 60.0
    scale_down_s: float = 300.0
    min_replicas: int = 1
    max_replicas: int = 64
    workers_per_replica: int = 1


class ReplicaNeed(NamedTuple):
    """The answer, and what it was made of. Loads are in pool-seconds a second."""

    replicas: int
    load: float = 0.0
    forecast: float = 0.0
    spread: float = 0.0
    strain: float = 1.0
    backlog_s: float = 0.0
    terms: DemandTerms = DemandTerms(0.0, 0.0, 0.0)


class ReplicaScaler:
    """Mutable: `arrived` and `ended` for each attempt at the pool, `decide` every few seconds."""

    def __init__(self, spec: ScalingSpec) -> None:
        self.spec = spec
        self.needed = ReplicaNeed(spec.min_replicas)
        self._z = NormalDist().inv_cdf(spec.target_attainment)
        self._slack_s = 1.0  # means of the latest requests: how long they may wait, ...
        self._row_s = 0.0  # ... what each adds to a batch, ...
        self._call_s = 0.0  # ... and a batch's fixed part
        self._seconds: deque[float] = deque(maxlen=WINDOW_S)  # work of each, the current one left out
        self._second_ends_at: float | None = None
        self._second = 0.0
        self._stretch_ends_at = 0.0
        self._stretch_s = _MOST_STRETCH_S
        self._stretch = 0.0
        self._variance = 0.0
        self._stretches = 0
        self._line = (0.0, 0.0)  # load at the end of the last second, and its slope
        self._wishes: deque[tuple[float, int]] = deque()  # (instant, need), falling
        self.strain = _FIRST_STRAIN
        self._in_time = 0
        self._late = 0
        self._learned_at: float | None = None
        self._short_at = 0.0  # when there were last fewer replicas than asked for

    # what is seen

    def arrived(self, work_s: float, call_s: float, slack_s: float, now: float) -> None:
        """A request for the pool: its work alone on a worker, the fixed part of it, and how long it may wait."""
        self._roll(now)
        weight = _MEAN_WEIGHT
        self._slack_s += weight * (max(0.0, slack_s) - self._slack_s)
        self._call_s += (call_s - self._call_s) * (weight if self._call_s else 1.0)
        self._row_s += (work_s - call_s - self._row_s) * (weight if self._row_s else 1.0)
        work = max(0.0, work_s - call_s) + call_s / self.batch
        self._second += work
        self._stretch += work

    def turned_away(self, count: int, now: float) -> None:
        """So many more would have come, had there been room."""
        self._roll(now)
        work = count * (self._row_s + self._call_s / self.batch)
        self._second += work
        self._stretch += work

    def ended(self, *, in_time: bool) -> None:
        """An attempt at the pool ended: with an answer in time, or not."""
        self._in_time += in_time
        self._late += not in_time

    @property
    def batch(self) -> float:
        """How many requests share a call's fixed part, when there are many: as many as a quarter of the slack fits."""
        room_s = _BATCH_SHARE * self._slack_s - self._call_s
        return min(_MOST_BATCH, max(1.0, room_s / self._row_s)) if self._row_s > 0.0 else 1.0

    # what follows

    @property
    def known(self) -> bool:
        """Whether enough was seen for a need to be told. A gateway that has just started knows of no load, which is no
        reason to take a pool down."""
        return len(self._seconds) >= KNOWN_S

    def decide(
        self, now: float, *, replicas: int, backlog_s: float, others: Sequence[DemandTerms | None] = ()
    ) -> ReplicaNeed:
        """How many are needed, `replicas` being there with `backlog_s` of work waiting, all together.

        Args:
            others: what other gateways need of the same pool; None of one that does not know, or has not said it:
                until all know, no fewer are needed than there are.
        """
        self._roll(now)
        spec = self.spec
        if replicas < self.needed.replicas:
            self._short_at = now
        self._learn(now)
        load, slope = self._line
        load = max(0.0, load)
        forecast = min(2.0 * load, max(load, load + slope * spec.start_s))
        spread = sqrt(self._variance)
        each = self.strain / spec.workers_per_replica
        terms = DemandTerms(each * forecast, (each * self._z * spread) ** 2, backlog_s / DRAIN_S)
        told = [one for one in others if one is not None]
        least = 0 if self.known and len(told) == len(others) else replicas
        of_all = pooled([terms, *told]).replicas
        wish = min(spec.max_replicas, max(spec.min_replicas, ceil(of_all - _DEAD_BAND), least))
        while self._wishes and self._wishes[-1][1] <= wish:
            self._wishes.pop()
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - spec.scale_down_s:
            self._wishes.popleft()
        self.needed = ReplicaNeed(self._wishes[0][1], load, forecast, spread, self.strain, backlog_s, terms=terms)
        return self.needed

    def _learn(self, now: float) -> None:
        """What is late although everyone is there that was asked for is the model's fault."""
        if self._learned_at is None:
            self._learned_at = now
        if now - self._learned_at < _LEARN_S or self._in_time + self._late < _LEARN_LEAST:
            return
        missed, allowed = self._late / (self._in_time + self._late), 1.0 - self.spec.target_attainment
        if now - self._short_at >= _LEARN_S:
            if missed > allowed:
                self.strain *= 1.0 + _UP * min(0.2, missed - allowed)
            elif missed < 0.5 * allowed:
                self.strain *= _DOWN
            self.strain = min(_STRAIN[1], max(_STRAIN[0], self.strain))
        self._in_time = self._late = 0
        self._learned_at = now

    # the series

    def _roll(self, now: float) -> None:
        """Close the seconds and stretches that are over."""
        if self._second_ends_at is None:
            self._second_ends_at = now + 1.0
            self._stretch_ends_at = now + self._stretch_s
            return
        if now >= self._second_ends_at:
            over = min(WINDOW_S, 1 + int(now - self._second_ends_at))
            self._seconds.append(self._second)
            self._seconds.extend([0.0] * (over - 1))
            self._second, self._second_ends_at = 0.0, now - (now - self._second_ends_at) % 1.0 + 1.0
            self._line = _line(self._seconds)
        if now >= self._stretch_ends_at:  # after the line: a long silence is no deviation from what was before it
            self._end_stretches(now)

    def _end_stretches(self, now: float) -> None:
        level, length_s = self._line[0], self._stretch_s
        over = min(1000, 1 + int((now - self._stretch_ends_at) / length_s))
        for number in range(over):
            load = self._stretch / length_s if number == 0 else 0.0
            if len(self._seconds) >= 10:  # before, there is no line to be off
                self._stretches += 1
                weight = max(1.0 / self._stretches, length_s / _SPREAD_S)
                self._variance += weight * ((load - level) ** 2 - self._variance)
        self._stretch = 0.0
        self._stretch_s = min(_MOST_STRETCH_S, max(_LEAST_STRETCH_S, self._slack_s))
        self._stretch_ends_at = now + self._stretch_s

    def __repr__(self) -> str:
        return f"<ReplicaScaler {self.needed.replicas} for {self._line[0]:.2f} pool-s/s, strain {self.strain:.2f}>"


def _line(values: deque[float]) -> tuple[float, float]:
    """Least squares through values a second apart: the value at the last one, and the slope."""
    n = len(values)
    mean = sum(values) / n
    if n < 30:
        return mean, 0.0  # a slope through so few is noise
    middle = (n - 1) / 2.0
    slope = sum((place - middle) * value for place, value in enumerate(values)) * 12.0 / (n * (n * n - 1.0))
    return mean + slope * middle, slope
