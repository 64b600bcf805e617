"""Figures of finished runs: what a policy achieved over several seeds, and how sure a difference between two is.

Each seed is another world; policies are compared within a world. A difference is the mean over seeds of the paired
differences, with the 95 % interval that bootstrapping them gives: worlds differ by more than policies do, so unpaired
intervals would hide the difference.

Figures, for requests that arrived after the warm-up:

    attainment      answered in time, of all that arrived (refused and late are misses)
    goodput         answers in time per second
    pool s/1k       seconds of pool compute, wasted ones included, per thousand answers in time
    waste           share of all compute that led to no answer
    quality         mean quality of the answers in time
    calibration     expected calibration error of the claimed chances; `cover` is of 95 % predictions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

from simulator.report.generation_figures import (
    GENERATION_HEADER,
    GenerationFigures,
    generation_figures,
    generation_row,
)
from simulator.simulation import Run
from simulator.world.tally import TIMELINE_BIN_S

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean over seeds, and the 95 % interval around it; of one seed it is a point."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> MeanInterval:
        mean = fmean(samples)
        if len(samples) < 2:
            return cls(mean, mean, mean)
        draw = Random(len(samples))  # the same resamples for every figure: they are then comparable
        means = sorted(fmean(draw.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
        return cls(mean, means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES) - 1])

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy at one load: samples by seed, and what adds up over seeds."""

    policy: str
    load: float
    rate: float
    seeds: tuple[int, ...]
    attainment: tuple[float, ...]
    goodput: tuple[float, ...]
    pool_s_per_1k: tuple[float, ...]
    waste: tuple[float, ...]
    quality: tuple[float, ...]
    hedged: tuple[float, ...]
    attempts: tuple[float, ...]  # per request that arrived, hedges and fallbacks included
    extra_attempts: tuple[float, ...]
    calibration_error: tuple[float, ...]
    covered: tuple[float, ...]
    by_class: dict[str, tuple[float, ...]]
    by_priority: dict[int, tuple[float, ...]]
    outcomes: dict[str, int]
    shares: dict[str, float]  # of answers, by target
    p50_ms: float
    p99_ms: float
    arrivals: int
    timeline: tuple[tuple[float, int, int], ...]  # (from, arrivals, in time), all seeds together
    generations: GenerationFigures | None = None  # of models that generate

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        found["generations"] = None if self.generations is None else self.generations._asdict()
        for name in ("attainment", "goodput", "pool_s_per_1k", "waste", "quality", "hedged", "calibration_error"):
            interval = MeanInterval.of(getattr(self, name))
            found[f"{name}_mean"] = {"mean": interval.mean, "low": interval.low, "high": interval.high}
        return found


def figures(runs: Sequence[Run], *, load: float, rate: float) -> PolicyFigures:
    """The figures of one policy at one load, from a run for each seed."""
    tallies = [run.tally for run in runs]
    classes = sorted({name for tally in tallies for name in tally.by_class})
    priorities = sorted({level for tally in tallies for level in tally.by_priority})
    outcomes: Counter[str] = Counter()
    served: Counter[str] = Counter()
    timeline: dict[int, list[int]] = {}
    for tally in tallies:
        outcomes.update(tally.all.outcomes)
        served.update(tally.served_by)
        for place, (arrivals, in_time) in tally.timeline.items():
            sums = timeline.setdefault(place, [0, 0])
            sums[0] += arrivals
            sums[1] += in_time
    answers = max(1, served.total())
    return PolicyFigures(
        policy=runs[0].policy,
        load=load,
        rate=rate,
        seeds=tuple(run.seed for run in runs),
        attainment=tuple(tally.all.attainment for tally in tallies),
        goodput=tuple(run.tally.all.in_time / run.counted_s for run in runs),
        pool_s_per_1k=tuple(1e3 * run.compute_s["pool"] / max(1, run.tally.all.in_time) for run in runs),
        waste=tuple(_waste(run) for run in runs),
        quality=tuple(tally.quality / max(1, tally.all.in_time) for tally in tallies),
        hedged=tuple(tally.hedged / max(1, tally.all.arrivals) for tally in tallies),
        attempts=tuple(tally.launches / max(1, tally.all.arrivals) for tally in tallies),
        extra_attempts=tuple(tally.attempts / max(1, tally.served_by.total()) - 1.0 for tally in tallies),
        calibration_error=tuple(tally.reliability.error for tally in tallies),
        covered=tuple(tally.within_margin[0] / max(1, tally.within_margin[1]) for tally in tallies),
        by_class={
            name: tuple(tally.by_class[name].attainment for tally in tallies if name in tally.by_class)
            for name in classes
        },
        by_priority={
            level: tuple(tally.by_priority[level].attainment for tally in tallies if level in tally.by_priority)
            for level in priorities
        },
        outcomes=dict(sorted(outcomes.items())),
        shares={target: count / answers for target, count in sorted(served.items())},
        p50_ms=1e3 * fmean(tally.all.latencies.quantile_s(0.5) for tally in tallies),
        p99_ms=1e3 * fmean(tally.all.latencies.quantile_s(0.99) for tally in tallies),
        arrivals=sum(tally.all.arrivals for tally in tallies),
        timeline=tuple((place * TIMELINE_BIN_S, sums[0], sums[1]) for place, sums in sorted(timeline.items())),
        generations=generation_figures(runs),
    )


def difference(one: Sequence[float], other: Sequence[float]) -> MeanInterval:
    """How much larger `one` is, paired by seed."""
    return MeanInterval.of([a - b for a, b in zip(one, other, strict=True)])


def miss_ratio(ours: PolicyFigures, theirs: PolicyFigures) -> float:
    """How many times as many misses they have; infinite where we have none and they do."""
    mine, others = 1.0 - fmean(ours.attainment), 1.0 - fmean(theirs.attainment)
    return others / mine if mine > 0.0 else (float("inf") if others > 0.0 else 1.0)


def tier_share(of: PolicyFigures, tier: str) -> float:
    """The share of answers that came from a tier."""
    return sum(share for target, share in of.shares.items() if target.startswith(f"{tier}/"))


def rows(found: Iterable[PolicyFigures]) -> list[tuple[str, ...]]:
    """For a table: the header first."""
    found = list(found)
    classes = list(found[0].by_class) if found else []
    header = ("policy", "load", "in time", "95 %", *classes, "p50", "p99", "pool s/1k", "pool", "waste", "hedged")
    lines: list[tuple[str, ...]] = [header]
    for one in found:
        attained = MeanInterval.of(one.attainment)
        lines.append(
            (
                one.policy,
                f"{one.load:g}",
                f"{attained.mean:.2%}",
                f"{attained.low:.1%}..{attained.high:.1%}",
                *(f"{fmean(one.by_class[name]):.1%}" for name in classes),
                f"{one.p50_ms:.0f} ms",
                f"{one.p99_ms:.0f} ms",
                f"{fmean(one.pool_s_per_1k):.2f}",
                f"{tier_share(one, 'pool'):.0%}",
                f"{fmean(one.waste):.1%}",
                f"{fmean(one.hedged):.1%}",
            )
        )
    return lines


def generation_rows(found: Iterable[PolicyFigures]) -> list[tuple[str, ...]]:
    """The same of what was generated; empty where nothing was."""
    lines = [generation_row(one.policy, one.load, one.generations) for one in found if one.generations is not None]
    return [GENERATION_HEADER, *lines] if lines else []


def _waste(run: Run) -> float:
    spent_s = sum(run.compute_s.values())
    return 1.0 - min(1.0, sum(run.tally.useful_s.values()) / spent_s) if spent_s > 0.0 else 0.0
