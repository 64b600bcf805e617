"""Figures of generations, of one policy at one load over its seeds: goodput, smooth goodput, times, and calibration.

kept            share of requests whose tokens kept their budgets, and how many a second: goodput
smooth          tokens a second that came by their own instants (`simulator/world/generation_tally.py`)
first, each     milliseconds to the first token, and for each further one, of an answer
raced           share of requests of which two attempts were under way when the first token came, and what the losers
                had computed by then, of all tokens of prompts and answers
handed over     share of requests whose answers another worker took over as planned, of which one was asked in vain, and
                what was computed twice or in vain for that, of all tokens of prompts and answers
gap             the longest silence inside of an answer
calibration     by tenths of what was claimed: (mean claim, share that was kept, how many)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

from simulator.simulation import Run
from simulator.world.histograms import ReliabilityTally

ENOUGH: Final = 200  # claims in a tenth, below which its gap is noise


class Decile(NamedTuple):
    claimed: float
    kept: float
    claims: int

    @property
    def gap(self) -> float:
        return abs(self.claimed - self.kept)


class GenerationFigures(NamedTuple):
    """All of it; samples are by seed."""

    kept: tuple[float, ...]
    goodput: tuple[float, ...]
    smooth_tokens_per_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    first_p50_ms: float
    first_p99_ms: float
    each_p50_ms: float
    each_p99_ms: float
    gap_p99_ms: float
    raced: tuple[float, ...]  # share of requests of which two attempts were under way when the first token came
    race_waste: tuple[float, ...]  # tokens that lost races had computed, per token of all prompts and answers
    handed_over: tuple[float, ...]  # share of requests whose answers another worker took over as planned
    handovers_lost: tuple[float, ...]  # share of requests of which a worker was asked to, in vain
    handover_waste: tuple[float, ...]  # tokens that were computed twice for that or in vain, per token as above
    calibration: dict[str, tuple[Decile, ...]]  # of the first token, the next ones, the whole, and all three

    @property
    def worst_gap(self) -> float:
        """Of the tenths with enough claims, how far the worst is off."""
        deciles = [one for found in self.calibration.values() for one in found]
        return max((one.gap for one in deciles if one.claims >= ENOUGH), default=0.0)


def generation_figures(runs: Sequence[Run]) -> GenerationFigures | None:
    """None where nothing was generated."""
    tallies = [run.tally.generations for run in runs]
    if not any(one.requests for one in tallies):
        return None
    return GenerationFigures(
        kept=tuple(one.kept / max(1, one.requests) for one in tallies),
        goodput=tuple(run.tally.generations.kept / run.counted_s for run in runs),
        smooth_tokens_per_s=tuple(run.tally.generations.tokens_in_time / run.counted_s for run in runs),
        tokens_per_s=tuple(run.tally.generations.tokens / run.counted_s for run in runs),
        first_p50_ms=1e3 * fmean(one.first.quantile_s(0.5) for one in tallies),
        first_p99_ms=1e3 * fmean(one.first.quantile_s(0.99) for one in tallies),
        each_p50_ms=1e3 * fmean(one.each.quantile_s(0.5) for one in tallies),
        each_p99_ms=1e3 * fmean(one.each.quantile_s(0.99) for one in tallies),
        gap_p99_ms=1e3 * fmean(one.gaps.quantile_s(0.99) for one in tallies),
        raced=tuple(one.races / max(1, one.requests) for one in tallies),
        race_waste=tuple(one.race_tokens / max(1, one.prompt_tokens + one.tokens) for one in tallies),
        handed_over=tuple(one.handovers / max(1, one.requests) for one in tallies),
        handovers_lost=tuple(one.handovers_lost / max(1, one.requests) for one in tallies),
        handover_waste=tuple(one.handover_tokens / max(1, one.prompt_tokens + one.tokens) for one in tallies),
        calibration={name: _deciles([one.chances[name] for one in tallies]) for name in tallies[0].chances},
    )


def generation_row(policy: str, load: float, one: GenerationFigures) -> tuple[str, ...]:
    """For a table under `GENERATION_HEADER`."""
    return (
        policy,
        f"{load:g}",
        f"{fmean(one.kept):.1%}",
        f"{fmean(one.goodput):.2f}",
        f"{fmean(one.smooth_tokens_per_s):.0f}",
        f"{fmean(one.tokens_per_s):.0f}",
        f"{one.first_p50_ms:.0f}/{one.first_p99_ms:.0f} ms",
        f"{one.each_p50_ms:.0f}/{one.each_p99_ms:.0f} ms",
        f"{one.gap_p99_ms:.0f} ms",
        f"{fmean(one.raced):.1%}/{fmean(one.race_waste):.1%}",
        f"{fmean(one.handed_over):.1%}/{fmean(one.handovers_lost):.1%}/{fmean(one.handover_waste):.1%}",
        f"{one.worst_gap:.3f}" if any(one.calibration.values()) else "",
    )


GENERATION_HEADER: Final = (
    "policy", "load", "kept", "goodput/s", "smooth tok/s", "tok/s", "first p50/p99", "each p50/p99", "gap p99",
    "raced/lost tok", "handed over/lost/tok", "worst decile",
)  # fmt: skip


def _deciles(tallies: Sequence[ReliabilityTally]) -> tuple[Decile, ...]:
    sums: dict[int, tuple[float, float, int]] = {}
    for tally in tallies:
        for claimed, kept, count in tally.deciles():
            place = min(9, int(10.0 * claimed))
            said, came, many = sums.get(place, (0.0, 0.0, 0))
            sums[place] = said + claimed * count, came + kept * count, many + count
    return tuple([Decile(said / many, came / many, many) for _, (said, came, many) in sorted(sums.items())])
