"""What was found against what was aimed at, and all of it in figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.bench.batching.bench import Bench
from tests.bench.batching.contenders import BUDGETS_S
from tests.bench.harness import Goal, Report, Spread, ratios

PEERS: Final = ("mosec-b1", "mosec-b8", "triton")
_NO_PEER: Final = "no peer is installed: make peers"
_NOT_SOUGHT: Final = "its rates are sought in a full run only"
_NO_PACKED: Final = "the demo model has no such variant"


def conclude(bench: Bench, report: Report) -> None:
    """Figures and goals into the report."""
    rates, figures = bench.rates, report.figures
    figures["limit_rps"], figures["fifo1_rps"] = Spread.of(bench.limit), Spread.of(bench.fifo)
    figures["bare_p50_s"] = Spread.of(bench.bare_s)
    for budget_s in BUDGETS_S:
        figures[f"rate_{budget_s * 1e3:g}"] = {
            name: Spread.of(held) for (name, budget), held in rates.found.items() if budget == budget_s
        }
    figures["closed_rps"] = {
        name: {f"c{callers}": Spread.of(rps) for callers, rps in found.items()} for name, found in bench.closed.items()
    }
    figures["latency_s"] = {
        name: {f"c{callers}": {of: Spread.of(held) for of, held in one.items()} for callers, one in found.items()}
        for name, found in bench.latency_s.items()
    }
    figures["p50_c1_s"] = {name: Spread.of(found) for name, found in bench.p50_s.items()}
    figures["generator_late_p99_s"] = max(rates.late_p99_s, default=0.0)
    figures["skipped"] = {name: why for name, why in bench.skipped.items() if why}
    _against_others(bench, report)
    _against_limit(bench, report)
    _packed(bench, report)
    report.goal(Goal("split.short_passed_ratio", bench.split["short_passed_ratio"], 0.01, "<="))
    report.goal(Goal("overload.goodput_ratio", bench.overload["goodput_ratio"], 0.9))
    report.goal(Goal("overload.refused_in_time", bench.overload["refused_in_time"], 0.99))


def _against_others(bench: Bench, report: Report) -> None:
    in_100, in_250 = BUDGETS_S
    for name, budget_s, over, aim in (
        ("rate_100_over_best_peer", in_100, PEERS, 1.15),
        ("rate_100_over_best_peer.stretch", in_100, PEERS, 1.5),
        ("rate_100_over_sjf", in_100, ("sjf",), 1.0),
        ("rate_250_over_best_peer", in_250, PEERS, 1.05),
        ("rate_250_over_sjf", in_250, ("sjf",), 1.05),
    ):
        report.goal(_over(bench, name, "deadline", budget_s, over, aim))
        if (spread := _spread(bench, "deadline", budget_s, over)) is not None:
            report.figures[name] = spread
    held = bench.rates.of("deadline", in_250)
    report.goal(Goal("rate_250_over_limit.stretch", ratios(held, bench.limit[: len(held)]).median, 0.9))


def _over(bench: Bench, name: str, ours: str, budget_s: float, over: Sequence[str], aim: float) -> Goal:
    if not bench.rates.of(ours, budget_s):
        return Goal(name, None, aim, why=_NOT_SOUGHT)
    spread = _spread(bench, ours, budget_s, over)
    return Goal(name, None, aim, why=_NO_PEER) if spread is None else Goal(name, spread.median, aim)


def _spread(bench: Bench, ours: str, budget_s: float, over: Sequence[str]) -> Spread | None:
    """Our rate over the best of the others', repeat by repeat; None without both."""
    held = bench.rates.of(ours, budget_s)
    best = [bench.rates.best(over, budget_s, repeat) for repeat in range(len(held))]
    return ratios(held, best) if held and all(best) else None


def _against_limit(bench: Bench, report: Report) -> None:
    closed = ratios(bench.closed["deadline"][64], bench.limit)
    report.figures["closed_64_over_limit"] = closed
    report.figures["closed_64_over_limit_of"] = {
        name: ratios(found[64], bench.limit[: len(found[64])]) for name, found in bench.closed.items() if found.get(64)
    }
    report.goal(Goal("closed_64_over_limit", closed.median, 0.95))
    for name in ("deadline", "deadline-oip"):
        found = ratios(bench.p50_s[name], bench.bare_s[: len(bench.p50_s[name])])
        report.figures[f"p50_c1_over_bare.{name}"] = found
        if name == "deadline":
            report.goal(Goal("p50_c1_over_bare", found.median, 1.15, "<="))


def _packed(bench: Bench, report: Report) -> None:
    """The limit itself raised: no padding, and half the bits."""
    for precision, aim in (("bf16", 1.8), ("fp32", 1.0)):
        name = bench.packed.get(precision)
        figure = ratios(bench.closed[name][64], bench.limit).median if name else None
        report.goal(Goal(f"packed_{precision}_over_limit", figure, aim, why="" if name else _NO_PACKED))
    for suffix, aim in (("", 2.0), (".stretch", 2.5)):
        words = f"packed_bf16_rate_100_over_best_peer{suffix}"
        if (name := bench.packed.get("bf16")) is None:
            report.goal(Goal(words, None, aim, why=_NO_PACKED))
        else:
            report.goal(_over(bench, words, name, BUDGETS_S[0], PEERS, aim))
