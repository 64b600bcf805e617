"""The detectors find signs of a target's decay in what is seen anyway, and say in words what they find.

A sign is one detector and its two thresholds: what it takes to be believed, and, lower, what it takes to stay believed.
`look` returns the evidence, "" while there is none. What becomes of it is decided in `degradation.py`.

    slow    answers take longer than they did (CUSUM on log(taken / table), one for each variant), creep up over the
            hour (Mann-Kendall on the medians of minutes), or their tail has grown (p95 / p50). A sample is the median
            of a second's answers: recorded residuals hang together for seconds, and each as evidence of its own gave
            hundreds of false alarms a week at five answers a second, where seconds' medians give none
    cold    the first answers of a process, or of a variant without requests for `IDLE_S`, take longer than usual ones
    errors  failures come faster than a healthy target's ever do (CUSUM on the likelihood ratio of 2 % and 20 %)
    queue   the reported wait is long and grows (Mann-Kendall, Sen's slope)
    link    round trips are longer than they were, for long: another path, or weather that stays
    memory  the device's resident memory grows (as above) and will be full within `HORIZON_S`
    heat    the device says that it throttles, or is hot enough to

Compute is judged for targets that compute requests one by one. A pool answers with the time of a whole batch, whose
size changes with load: that is judged where batches are known, in the pool
(`cloud_pool/core/health/worker_health.py`).

The numbers below were set by `python -m tests.bench.degradation` on recorded residuals: see there what they cost.
Those of a shift in compute are the shortest delay at the same average run length between false alarms, searched over
slack, level and clip. What counts most is the clip. False alarms are made by stretches of ten or twenty seconds that
are 1.8 times as slow as usual, slow detections by the quiet stretch that a slowdown happens to begin in; a clip at the
shift that is looked for takes from the former what they say beyond it (so does the likelihood ratio where noise falls
off exponentially, as here), and what is gained there buys a lower level. A sum of several charts with other drifts,
and a chart that clips what speaks against a shift elsewhere, found nothing sooner.
Pure. It can be wrong when the work changes in a way that the table does not see.
Source: docs/design/faults.md, "Degradation"; Page 1954; Huber, "A Robust Version of the Probability Ratio Test", 1965,
on the clip; Mann 1945, Kendall 1975, Sen 1968.
"""

from __future__ import annotations

from collections import deque
from math import exp, inf, log
from statistics import median
from typing import Final

from gateway.core.estimate.cusum import Cusum
from gateway.core.estimate.shift_detector import Shift
from tidegate.estimate.quantiles import nearest_rank
from tidegate.estimate.trend import Leak, grows, sen_slope
from tidegate.fleet.conditions import DeviceConditions

SLOW_SLACK: Final = 0.17
SLOW_LEVEL: Final = 4.4  # nineteen seconds at the least, and four alarms in sixteen well weeks
SLOW_CLIP: Final = log(1.5)  # the shift that is looked for: what is further off says no more
SAMPLE_S: Final = 1.0  # answers closer together than this are samples of one and the same moment
_SAMPLE_MOST: Final = 64
_MINUTES: Final = 60  # of which the creep is judged, ...
_MINUTES_LEAST: Final = 30
_MINUTE_LEAST: Final = 10  # samples in each
_CREEP_SIGMAS: Final = 4.5
_CREEP: Final = 0.22  # log 1.25, over the minutes that were seen
_TAIL_OF: Final = 200  # answers of which p95 / p50 is taken, ...
_TAIL_S: Final = 60.0  # ... in no less time
_TAIL_MOST: Final = 2000
_TAIL_SLACK, _TAIL_LEVEL, _TAIL_CLIP = 0.4, 3.0, 1.0
COLD_ANSWERS: Final = 24  # the first ones, which are no evidence of slowness
_COLD_LEAST: Final = 4
_COLD: Final = 0.7  # log 2
_WARM: Final = 0.26  # log 1.3
IDLE_S: Final = 300.0
_USUAL_FAILURES, _BAD_FAILURES = 0.02, 0.2
_ERRORS_LEVEL: Final = 9.0  # four in a row, or more among answers
_WAITS: Final = 30  # looks at the queue
_WAITS_SIGMAS: Final = 6.0
_WAIT_S: Final = 1.0
_WAIT_GROWTH: Final = 0.02  # seconds a second
LINK_SLACK: Final = 0.5
LINK_LEVEL: Final = 26.0
LINK_CLIP: Final = 1.5
_TIMER_S: Final = 0.001
HORIZON_S: Final = 6 * 3600.0
_LEAK_SIGMAS: Final = 4.5
_HOT_C, _COOL_C = 85.0, 75.0


class SpeedDetector:
    """Mutable: the compute times of one variant on one target. `answered`; `slow` and `cold` are what it says."""

    __slots__ = ("_asked_at", "_cold", "_minute", "_minute_ends_at", "_minutes", "_sample",
                 "_sample_ends_at", "_tail", "_tail_since", "creeps", "shift", "tail", "young")  # fmt: skip

    def __init__(self) -> None:
        self.shift = Shift(slack=SLOW_SLACK, level=SLOW_LEVEL, clip=SLOW_CLIP)
        self.young = 0  # answers since it was cold
        self.creeps = 0.0  # log growth over the minutes seen; 0: no trend
        self.tail = Shift(slack=_TAIL_SLACK, level=_TAIL_LEVEL, clip=_TAIL_CLIP, learn=10)  # of log(p95 / p50)
        self._asked_at = -inf
        self._cold: deque[float] = deque(maxlen=8)
        self._sample: list[float] = []
        self._sample_ends_at = inf
        self._minute: list[float] = []
        self._minute_ends_at = 0.0
        self._minutes: deque[tuple[float, float]] = deque(maxlen=_MINUTES)
        self._tail: list[float] = []
        self._tail_since = 0.0

    def cool_down(self) -> None:
        """A new process: its first answers are cold, and its residence begins."""
        self.young, self.creeps = 0, 0.0
        self.shift.rest()
        self._cold.clear()
        self._minutes.clear()
        self._minute.clear()
        self._sample.clear()

    def answered(self, residual: float, now: float) -> bool:
        """Take in one answer's log(taken / table); returns whether `slow` or `cold` may have changed."""
        if now - self._asked_at > IDLE_S:
            self.young = 0
            self._cold.clear()
        self._asked_at = now
        self.young += 1
        if self.young <= COLD_ANSWERS:
            self._cold.append(residual)
            return True
        changed = self._end_sample() if self._sample and now >= self._sample_ends_at else False
        if not self._sample:
            self._sample_ends_at = now + SAMPLE_S
        if len(self._sample) < _SAMPLE_MOST:
            self._sample.append(residual)
        if now >= self._minute_ends_at:
            changed |= self._end_minute(now)
        if len(self._tail) < _TAIL_MOST:
            self._tail.append(residual)
        if len(self._tail) >= _TAIL_OF and now - self._tail_since >= _TAIL_S:
            changed |= self._end_tail(now)
        return changed

    def cold(self, *, raised: bool) -> str:
        """Why it is thought to be cold; "" when it is not, or not any more."""
        if len(self._cold) < _COLD_LEAST or self.young > COLD_ANSWERS or not self.shift.known:
            return ""
        over = median(self._cold) - self.shift.normal
        return f"first answers take {exp(over):.1f} × their usual time" if over > (_WARM if raised else _COLD) else ""

    def slow(self) -> str:
        """Why it is thought to have become slow; "" when it has not."""
        if self.shift.on:
            return f"compute takes {exp(self.shift.excess):.2f} × its usual time"
        if self.creeps:
            return f"compute has crept up to {exp(self.creeps):.2f} × in {len(self._minutes)} minutes"
        return f"p95/p50 of compute is {exp(self.tail.excess):.1f} × its usual" if self.tail.on else ""

    def _end_sample(self) -> bool:
        level = median(self._sample)
        self._sample.clear()
        self._minute.append(level)
        return self.shift.record(level)

    def _end_minute(self, now: float) -> bool:
        if len(self._minute) >= _MINUTE_LEAST:
            self._minutes.append((now, median(self._minute)))
        self._minute.clear()
        self._minute_ends_at = now + 60.0
        before, self.creeps = self.creeps, 0.0
        if len(self._minutes) >= _MINUTES_LEAST and grows([level for _, level in self._minutes], _CREEP_SIGMAS):
            # Sen's slope × the time that was seen: log growth; it takes half as much to stay as to begin.
            grown = sen_slope(list(self._minutes)) * (self._minutes[-1][0] - self._minutes[0][0])
            self.creeps = grown if grown > (_CREEP if not before else 0.5 * _CREEP) else 0.0
        return bool(before) is not bool(self.creeps)

    def _end_tail(self, now: float) -> bool:
        ordered = sorted(self._tail)
        self._tail.clear()
        self._tail_since = now
        # residuals are logarithms, so the difference is log(p95 / p50)
        return self.tail.record(nearest_rank(ordered, 0.95) - nearest_rank(ordered, 0.5))

    def __repr__(self) -> str:
        return f"<SpeedDetector {self.slow() or self.cold(raised=True) or 'as usual'} {self.shift!r}>"


class ErrorDetector:
    """Mutable: `ended` with each attempt whose end says something of the target."""

    __slots__ = ("_cusum", "_failed", "_last")

    def __init__(self) -> None:
        self._cusum = Cusum(slack=0.0, level=_ERRORS_LEVEL)
        self._last: deque[bool] = deque(maxlen=50)

    def ended(self, *, failed: bool) -> bool:
        self._last.append(failed)
        return self._cusum.record(_FAILURE if failed else _SUCCESS)

    def look(self) -> str:
        return f"{sum(self._last)} of the last {len(self._last)} attempts failed" if self._cusum.on else ""

    def __repr__(self) -> str:
        return f"<ErrorDetector {self._cusum!r}>"


# The log likelihood ratio of a bad target (20 % of attempts fail) and a usual one (2 %), for each kind of end.
_FAILURE: Final = log(_BAD_FAILURES / _USUAL_FAILURES)
_SUCCESS: Final = log((1.0 - _BAD_FAILURES) / (1.0 - _USUAL_FAILURES))


class QueueDetector:
    """Mutable: the wait that a target reports, once a look."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WAITS)

    def look(self, wait_s: float, now: float, *, raised: bool) -> str:
        self._waits.append((now, wait_s))
        if raised:
            return f"{wait_s:.2f} s of work wait" if wait_s > 0.5 * _WAIT_S else ""
        if wait_s < _WAIT_S or len(self._waits) < _WAITS:
            return ""
        slope = sen_slope(list(self._waits))
        if slope < _WAIT_GROWTH or not grows([wait for _, wait in self._waits], _WAITS_SIGMAS):
            return ""
        return f"{wait_s:.2f} s of work wait, {slope * 1e3:.0f} ms more each second"

    def __repr__(self) -> str:
        return f"<QueueDetector of {len(self._waits)} looks>"


class PathDetector:
    """Mutable: the round trips of one path's heartbeats."""

    __slots__ = ("_shift",)

    def __init__(self) -> None:
        self._shift = Shift(slack=LINK_SLACK, level=LINK_LEVEL, clip=LINK_CLIP)

    def look(self, rtt_s: float) -> str:
        shift = self._shift
        shift.record(log(max(0.0, rtt_s) + _TIMER_S))  # + a timer's worth: fractions of it are scheduling
        if not shift.on:
            return ""
        now_ms, usual_ms = (1e3 * (exp(level) - _TIMER_S) for level in (shift.level, shift.normal))
        return f"round trips take {now_ms:.1f} ms, usually {usual_ms:.1f} ms"

    def __repr__(self) -> str:
        return f"<PathDetector {self._shift!r}>"


class MemoryDetector:
    """Mutable: the resident memory that a device reports, in one incarnation of its process."""

    __slots__ = ("_leak", "_seen_at", "_words")

    def __init__(self) -> None:
        self._leak = Leak(_LEAK_SIGMAS)
        self._seen_at: float | None = None
        self._words = ""

    def look(self, conditions: DeviceConditions, now: float) -> str:
        rss, limit = conditions.memory_bytes, conditions.memory_limit_bytes
        if rss is None or limit is None:
            return ""
        elapsed_s = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        if self._leak.record(elapsed_s, rss):
            slope = self._leak.slope()
            full_in_s = max(0.0, limit - rss) / slope if slope > 0.0 else inf
            grown = f"memory grows by {slope * 3600 / 2**20:.0f} MiB an hour and is full in {full_in_s / 3600:.1f} h"
            self._words = grown if full_in_s < HORIZON_S else ""
        return self._words

    def __repr__(self) -> str:
        return f"<MemoryDetector {self._words or 'as usual'}>"


def overheating_reason(conditions: DeviceConditions, *, raised: bool) -> str:
    """Why a device is thought to be too hot; "" when it is not, or does not know."""
    degrees = conditions.temperature_c
    told = "" if degrees is None else f"{degrees:.0f} °C"
    if conditions.throttled:
        return f"it throttles, at {told}" if told else "it throttles"
    return told if degrees is not None and degrees >= (_COOL_C if raised else _HOT_C) else ""


def stalled_loop_reason(conditions: DeviceConditions) -> str:
    """What a device says of its agent's event loop while that costs deadlines; "" while it does not."""
    held_up_s = conditions.held_up_s
    return f"its event loop was held up for {held_up_s:.1f} s of the last minute" if held_up_s else ""


def absent_models_reason(conditions: DeviceConditions) -> str:
    """What a device says of models that it is to serve and cannot; "" where there are none."""
    return f"not served: {'; '.join(conditions.absent)}" if conditions.absent else ""
