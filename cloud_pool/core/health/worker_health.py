"""Worker health compares one worker with itself when it was warm, and complains when it has degraded.

A process that serves for weeks decays in ways that no error shows: a driver throttles it, an allocator fragments, a
library leaks, a thread spins. A fresh process cures such decay, if it is noticed; and it has to be noticed by
comparison, since every device, model and hour has its own normal.

Once a check (`CHECK_S`) each of these signs is looked at, and one becomes a complaint when it showed in `failures` of
the last `window` checks:

    drift   batches take longer than their cost table predicts, by more than in the worker's first hour, and by more
            than those of its peers do now: what makes all slow at once is no worker's fault. CUSUM over the median
            log-residual of each check, clipped at 3 sigma.
    p99     of the last batches is over a limit: one in seconds, or the model's own (`latency_targets.py`), which is
            lengthened by what slows all workers at once
    memory  more than `rss_ratio` times what it was when warm
    leak    memory grows (Mann-Kendall, p < 0.01) at a rate (Sen's slope) that reaches the limit within `horizon_s`
    cpu     it keeps its cores busy while hardly a batch runs

How far drift may go: the textbook's k = 0.5 with h = 10 is one false alarm in two worker-weeks of checks, if they are
independent. Those of a busy machine are not: simulated with a correlation of 0.5 from check to check, tails of one in
twenty at thrice the spread and 15 % of noise, that was 100 a week; with k = 1 and a floor of 20 % under sigma it is
less than one, and a worker that becomes 1.5 times slower is reported within 20 checks
(`tests/cloud_pool/core/health/test_worker_health.py`).

Invariants: no complaint before `BASELINE` checks with batches for drift, TREND_LEAST minutes for the leak; no clock, no
IO. It can be wrong when the work itself changes in a way that the cost table does not see.

Source: docs/design/faults.md, "Degradation"; Page 1954; Hawkins and Olwell, "Cumulative Sum Charts", on starting them
without a known mean; Mann 1945, Kendall 1975, Sen 1968.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import median
from typing import Final, NamedTuple

from tidegate.estimate.trend import Leak

CHECK_S: Final = 10.0
BASELINE: Final = 30  # checks until drift is judged
BASELINE_MOST: Final = 360  # checks, an hour: then the baseline is fixed, or a slow decay would become the normal
FLOOR_SIGMA: Final = 0.2  # of a check's median
SLACK: Final = 1.0  # k: a drift of 20 % or less is never an alarm
CLIP: Final = 3.0
_RECENT: Final = 512  # newest batches from which p99 is computed
_FEWEST_FOR_P99: Final = 100
_IDLE_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """The limits of each sign. Ratios are of 1; infinity or 0 switches a sign off where it says so.

    Args:
        drift_level: h of the CUSUM; 9 to 12.
        p99_s: most seconds of a batch at p99; None: each batch's own `limit_s`; infinity: no limit.
        rss_ratio: most resident memory, relative to that of the warm worker.
        horizon_s: growth counts as a leak if it reaches the limit of memory sooner than this.
        cpu_ratio: share of its threads that is busy, while batches run in less than half of the time.
        window, failures: the number of checks considered, and how many of them must show the sign.
    """

    drift_level: float = 10.0
    p99_s: float | None = None
    rss_ratio: float = 1.5
    horizon_s: float = 6 * 3600.0
    cpu_ratio: float = 0.95
    window: int = 6
    failures: int = 3


class BatchTime(NamedTuple):
    """One batch: its seconds by the cost table, those that it took, and the most that its model allows at p99."""

    table_s: float
    took_s: float
    limit_s: float = inf


@dataclass(frozen=True, slots=True)
class Vitals:
    """Readings of one worker since the last check. `memory_limit_bytes` is how much this worker may grow to."""

    elapsed_s: float
    busy_s: float
    cpu_s: float
    threads: int
    rss_bytes: float
    memory_limit_bytes: float = inf
    batches: Sequence[BatchTime] = ()


@dataclass(slots=True)
class DriftDetector:
    """A CUSUM that learns what is normal from its own first samples. Mutable: `record`."""

    level: float
    sum: float = 0.0
    excess: float | None = None  # excess of the last sample over the baseline, in log
    _count: int = 0
    _mean: float = 0.0
    _squares: float = 0.0

    @property
    def alarms(self) -> bool:
        return self.sum > self.level

    @property
    def sigma(self) -> float:
        return max(FLOOR_SIGMA, sqrt(self._squares / (self._count - 1))) if self._count > 1 else inf

    def record(self, sample: float, common: float) -> None:
        """Learn from one check: its median log-residual, and the peers' common excess over their own normal."""
        value = sample - common
        self.excess = sample - self._mean if self._count >= BASELINE else None
        if self._count >= BASELINE:
            deviation = (value - self._mean) / self.sigma
            # CUSUM: sum the deviations beyond SLACK sigmas, each clipped, and never below zero.
            self.sum = max(0.0, self.sum + max(-CLIP, min(CLIP, deviation)) - SLACK)
            if abs(deviation) > CLIP:
                return  # an outlier is no part of the baseline
        if self._count < BASELINE_MOST and not self.alarms:
            # Welford's running mean and sum of squares.
            self._count += 1
            before = self._mean
            self._mean += (value - before) / self._count
            self._squares += (value - before) * (value - self._mean)


class StrikeCounter:
    """Whether a sign showed often enough lately. Mutable: `record`."""

    def __init__(self, window: int, failures: int) -> None:
        self._failures = failures
        self._shown: deque[bool] = deque(maxlen=window)

    def record(self, shown: bool) -> bool:
        self._shown.append(shown)
        return sum(self._shown) >= self._failures

    def __repr__(self) -> str:
        return f"<StrikeCounter {sum(self._shown)} of {self._failures}>"


class WorkerHealth:
    """Mutable: `check` once every `CHECK_S`, for one incarnation of a worker. `complaint` is the last check's."""

    def __init__(self, limits: HealthLimits, *, warm_rss_bytes: float) -> None:
        self.complaint: str | None = None
        self.drift = DriftDetector(limits.drift_level)
        self._limits = limits
        self._warm_rss_bytes = warm_rss_bytes
        self._leak = Leak()
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # (share of its limit, seconds that it took)
        self._strikes = {sign: StrikeCounter(limits.window, limits.failures) for sign in _SIGNS}

    @property
    def p99(self) -> tuple[float, float]:
        """The batch at the p99 of the last ones: its share of its limit, and its seconds; 0 while they are too few."""
        if len(self._recent) < _FEWEST_FOR_P99:
            return 0.0, 0.0
        return sorted(self._recent)[int(0.99 * len(self._recent))]

    def check(self, vitals: Vitals, *, common: float = 0.0) -> str | None:
        """The complaint, which begins with the name of its sign; None while the worker is well.

        Args:
            common: median excess of the peers' drift, 0 without peers (`common_excess`).
        """
        if vitals.batches:
            self.drift.record(median(log(one.took_s / one.table_s) for one in vitals.batches), common)
            self._recent.extend((self._share(one, common), one.took_s) for one in vitals.batches)
        self._leak.record(vitals.elapsed_s, vitals.rss_bytes)
        found = self._signs(vitals)
        shown = [f"{sign}: {found[sign]}" for sign in _SIGNS if self._strikes[sign].record(bool(found.get(sign)))]
        self.complaint = next((words for words in shown if not words.endswith(": None")), None)
        return self.complaint

    def _share(self, batch: BatchTime, common: float) -> float:
        """How much of its limit a batch took."""
        if self._limits.p99_s is not None:
            return batch.took_s / self._limits.p99_s
        return batch.took_s / (batch.limit_s * exp(max(0.0, common)))  # what slows all workers is no worker's fault

    def _signs(self, vitals: Vitals) -> dict[str, str | None]:
        limits, rss, (share, p99_s) = self._limits, vitals.rss_bytes, self.p99
        reaches_in_s = self._leak.limit_in_s(vitals.memory_limit_bytes)
        cpu_ratio = vitals.cpu_s / (vitals.elapsed_s * max(1, vitals.threads))
        spins = cpu_ratio > limits.cpu_ratio and vitals.busy_s < _IDLE_RATIO * vitals.elapsed_s
        return {
            "drift": f"{self.drift.excess or 0.0:+.0%} over its normal" if self.drift.alarms else None,
            "p99": f"{p99_s:.3g} s, limit {p99_s / share:.3g} s" if share > 1.0 else None,
            "memory": f"{rss / 1e6:.0f} MB, warm it had {self._warm_rss_bytes / 1e6:.0f}"
            if rss > limits.rss_ratio * self._warm_rss_bytes
            else None,
            "leak": f"memory is full in {reaches_in_s / 3600:.1f} h" if reaches_in_s < limits.horizon_s else None,
            "cpu": f"{cpu_ratio:.0%} of its cores without work" if spins else None,
        }

    def __repr__(self) -> str:
        return f"<WorkerHealth {self.complaint or 'well'}, drift {self.drift.sum:.1f} of {self._limits.drift_level:g}>"


_SIGNS: Final = ("memory", "leak", "drift", "p99", "cpu")  # the most dangerous sign first


def common_excess(peers: Sequence[WorkerHealth]) -> float:
    """The median excess of these workers over their normal; 0 while none is known."""
    known = [peer.drift.excess for peer in peers if peer.drift.excess is not None]
    return median(known) if known else 0.0
