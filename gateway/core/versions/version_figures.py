"""Version figures compare two versions: requests in time, late and failed, their durations and their quality.

What is counted is each version's own: a request that the candidate failed and the standing version answered is a
failure of the one and an answer of the other, with the time that each took. Quality is what can be known here: how
often a classifier was not sure (provisional and escalated answers), and how far the two agree on inputs that both were
given (`compare`). Counted from the beginning of a split; a minute's figures are in
`gateway/core/estimate/sliding_stats.py`.

Agreement of two answers: for each output of floats with more than one column, the cosine of each row. Of classes a row
agrees where its largest column is the same, of anything else where the cosine is at least `ALIKE`.

O(1) a record. Source of the interval: Wilson, "Probable inference, the law of succession, and statistical inference",
Journal of the American Statistical Association 22, 1927.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import Final, NamedTuple, get_args

from gateway.core.estimate.sliding_stats import Ending, bucket_of, quantiles

ALIKE: Final = 0.98  # cosine; int8 against fp32 of the same model is above 0.99 for most texts
Z: Final = 1.96  # 95 %


class WilsonInterval(NamedTuple):
    low: float
    high: float


class FigureCounts(NamedTuple):
    """The counts behind `VersionFigures`, as another process is told them."""

    endings: dict[str, int]
    buckets: dict[int, int]
    failures: dict[str, int]
    provisional: int
    escalated: int
    degraded: int


class AgreementCounts(NamedTuple):
    """The counts behind `Agreement`."""

    rows: int
    agreeing: int
    cosine_sum: float
    cosine_least: float
    unanswered: int


@dataclass(slots=True)
class VersionFigures:
    """Mutable: one version's, since the split began."""

    endings: Counter[Ending] = field(default_factory=Counter)
    buckets: dict[int, int] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    provisional: int = 0
    escalated: int = 0
    degraded: int = 0

    def record(self, ending: Ending, took_s: float, failure: str = "") -> None:
        self.endings[ending] += 1
        if ending == "failed":
            self.failures[failure] += 1
            return
        bucket = bucket_of(took_s)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    @property
    def counted(self) -> FigureCounts:
        endings: dict[str, int] = dict(zip(self.endings.keys(), self.endings.values(), strict=True))
        lesser = self.provisional, self.escalated, self.degraded
        return FigureCounts(endings, dict(self.buckets), dict(self.failures), *lesser)

    def add(self, counts: FigureCounts) -> None:
        """Count what was counted elsewhere too."""
        for ending in get_args(Ending):
            self.endings[ending] += counts.endings.get(ending, 0)
        for bucket, count in counts.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.failures.update(counts.failures)
        self.provisional += counts.provisional
        self.escalated += counts.escalated
        self.degraded += counts.degraded

    @property
    def asked(self) -> int:
        return sum(self.endings.values())

    @property
    def in_time_ratio(self) -> float | None:
        return self.endings["in_time"] / self.asked if self.asked else None

    @property
    def in_time_interval(self) -> WilsonInterval | None:
        return wilson_interval(self.endings["in_time"], self.asked) if self.asked else None

    @property
    def quantiles_s(self) -> tuple[float, ...]:
        """p50, p95, p99 of what was answered; empty where nothing was."""
        return quantiles(self.buckets)


@dataclass(slots=True)
class Agreement:
    """Mutable: how far two versions agree on the same inputs."""

    rows: int = 0
    agreeing: int = 0
    cosine_sum: float = 0.0
    cosine_least: float = 1.0
    unanswered: int = 0  # the other version gave no answer to compare with

    def record(self, cosines: list[float], same_class: list[bool], *, classes: bool) -> None:
        for cosine, same in zip(cosines, same_class, strict=True):
            self.rows += 1
            self.agreeing += same if classes else cosine >= ALIKE
            self.cosine_sum += cosine
            self.cosine_least = min(self.cosine_least, cosine)

    @property
    def counted(self) -> AgreementCounts:
        return AgreementCounts(self.rows, self.agreeing, self.cosine_sum, self.cosine_least, self.unanswered)

    def add(self, counts: AgreementCounts) -> None:
        """Count what was counted elsewhere too."""
        self.rows += counts.rows
        self.agreeing += counts.agreeing
        self.cosine_sum += counts.cosine_sum
        self.cosine_least = min(self.cosine_least, counts.cosine_least)
        self.unanswered += counts.unanswered

    @property
    def ratio(self) -> float | None:
        return self.agreeing / self.rows if self.rows else None

    @property
    def cosine(self) -> float | None:
        return self.cosine_sum / self.rows if self.rows else None


def wilson_interval(hits: int, of: int) -> WilsonInterval:
    """Where the true share lies with 95 % confidence."""
    share, spread = hits / of, Z * Z / of
    middle = (share + spread / 2.0) / (1.0 + spread)
    half = Z * sqrt(share * (1.0 - share) / of + spread / (4.0 * of)) / (1.0 + spread)
    return WilsonInterval(max(0.0, middle - half), min(1.0, middle + half))
