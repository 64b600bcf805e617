"""How well Tidegate decides, beside everyone else's rules over the very same workers, in simulation.

One fleet (`office_wifi`: eight devices of mixed speed on jittering WiFi, heat and local callers, one GPU over a WAN) at
fractions of its knee, many seeds; every policy sees the same requests, weather and heat in each. What each baseline may
see is said in `simulator/baselines.py`; `+ledger` also gives it our in-flight ledger. Then the same fleet with four
times the jitter, and a step of five times the load.

Goals are those of the decision core's plan. Ratios of misses are of sums over all seeds; the difference to the best
baseline comes with the 95 % interval of its paired differences.

    python -m tests.bench.routing [--quick] [--repeats SEEDS] [--seconds 40] [--processes 2] [--policy NAME]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from simulator.baselines import AS_AUTHORS, POLICIES, WITH_LEDGER
from simulator.plot import NoPlot, draw
from simulator.report import Figures, difference, miss_ratio, rows, tier_share
from simulator.scenario import Loaded, load
from simulator.sweep import knee, sweep
from simulator.tally import TIMELINE_BIN_S
from tests.bench.harness import RESULTS, Goal, Report, parser, table

SCENARIO = "office_wifi"
LOADS = (0.3, 0.6, 0.9, 1.2)
# Two baselines attain the same if they are within a point: then their costs may be compared.
EQUAL_ATTAINMENT = 0.01


@dataclass(frozen=True)
class Plan:
    """How much is simulated."""

    policy: str
    seeds: tuple[int, ...]
    seconds: float
    loads: tuple[float, ...]
    baselines: tuple[str, ...]
    processes: int


class Found:
    """The figures by policy and load."""

    def __init__(self, figures: Sequence[Figures], plan: Plan) -> None:
        self.figures = list(figures)
        self._of = {(one.policy, one.load): one for one in figures}
        self._plan = plan

    def ours(self, load_: float) -> Figures:
        return self._of[self._plan.policy, load_]

    def of(self, policy: str, load_: float) -> Figures | None:
        return self._of.get((policy, load_))

    def best(self, names: Sequence[str], load_: float) -> Figures:
        """The baseline that attains most."""
        there = [self._of[name, load_] for name in names if (name, load_) in self._of]
        return max(there, key=lambda one: fmean(one.attainment))


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time")
    options.add_argument("--policy", default="tidegate", choices=POLICIES, help="the policy that the goals are for")
    arguments = options.parse_args()
    seeds = arguments.repeats or (2 if arguments.quick else 20)
    plan = Plan(
        policy=arguments.policy,
        seeds=tuple(range(1, seeds + 1)),
        seconds=arguments.seconds or (15.0 if arguments.quick else 40.0),
        loads=LOADS,
        baselines=(*AS_AUTHORS, *WITH_LEDGER),
        processes=arguments.processes,
    )
    report = Report(
        "routing",
        {"scenario": SCENARIO, "policy": plan.policy, "seeds": seeds, "seconds": plan.seconds, "loads": plan.loads},
    )
    began = time.perf_counter()
    loaded = _lasting(load(SCENARIO), plan.seconds)
    knee_rps = knee(loaded)
    print(f"knee: {knee_rps:.0f} requests/s\n")
    report.figures["knee_rps"] = knee_rps
    _loads(loaded, knee_rps, plan, report)
    _jitter(knee_rps, plan, report)
    _overload(plan, report)
    report.figures["wall_s"] = time.perf_counter() - began
    report.write()


def _loads(loaded: Loaded, knee_rps: float, plan: Plan, report: Report) -> None:
    figures = _swept(loaded, (plan.policy, *plan.baselines), plan.loads, knee_rps, plan)
    found = Found(figures, plan)
    for load_ in plan.loads:
        lines = rows(sorted((one for one in figures if one.load == load_), key=lambda one: -fmean(one.attainment)))
        table(lines[0], lines[1:])
        print()
    report.figures["attainment"] = {
        policy: {str(load_): fmean(one.attainment) for load_ in plan.loads if (one := found.of(policy, load_))}
        for policy in (plan.policy, *plan.baselines)
    }
    report.figures["loads"] = [one.plain() for one in figures]
    report.figures["gains"] = {str(load_): _gain(found, load_) for load_ in plan.loads}
    for goal in _goals(found):
        report.goal(goal)
    try:
        draw([one for one in figures if one.policy in _shown(found)], loaded.scenario, RESULTS / "routing.png")
    except NoPlot as reason:
        print(f"no picture: {reason}")


def _goals(found: Found) -> list[Goal]:
    low, usual, over = 0.3, 0.6, 1.2
    cost, against = _pool_cost_saved(found, usual)
    quality = fmean(found.ours(usual).quality) / fmean(found.best(("all-cloud",), usual).quality)
    highest = min(found.ours(over).by_priority)
    return [
        Goal("in_time_at_0.6", fmean(found.ours(usual).attainment), 0.99),
        *(Goal(f"misses_vs_best_as_authors_at_{at}", _misses(found, AS_AUTHORS, at), 5.0) for at in (low, usual)),
        *(Goal(f"misses_vs_best_with_ledger_at_{at}", _misses(found, WITH_LEDGER, at), 2.0) for at in (low, usual)),
        Goal("misses_vs_best_as_authors_at_1.2", _misses(found, AS_AUTHORS, over), 1.6),
        Goal("highest_class_at_1.2", fmean(found.ours(over).by_priority[highest]), 0.95),
        Goal("pool_compute_saved_at_0.6", cost, 0.30, why=against),
        Goal("quality_vs_all_cloud_at_0.6", quality, 0.98),
        Goal("calibration_error_at_0.6", fmean(found.ours(usual).calibration_error), 0.03, "<="),
        Goal("cover_of_95_percent_at_0.6", fmean(found.ours(usual).covered), 0.93, why="and at most 0.97"),
    ]


def _misses(found: Found, names: Sequence[str], load_: float) -> float:
    return miss_ratio(found.ours(load_), found.best(names, load_))


def _pool_cost_saved(found: Found, load_: float) -> tuple[float | None, str]:
    """Against the cheapest baseline that attains at least what we do, to within a point."""
    ours = found.ours(load_)
    equal = [
        one
        for one in found.figures
        if one.load == load_
        and one.policy != ours.policy
        and fmean(one.attainment) >= fmean(ours.attainment) - EQUAL_ATTAINMENT
    ]
    if not equal:
        return None, "no baseline attains as much"
    other = min(equal, key=lambda one: fmean(one.pool_s_per_1k))
    return 1.0 - fmean(ours.pool_s_per_1k) / fmean(other.pool_s_per_1k), f"against {other.policy}"


def _gain(found: Found, load_: float) -> dict[str, object]:
    """Ours over the best of each kind, paired by seed."""
    ours = found.ours(load_)
    gains: dict[str, object] = {"attainment": fmean(ours.attainment), "pool_share": tier_share(ours, "pool")}
    for kind, names in (("as_authors", AS_AUTHORS), ("with_ledger", WITH_LEDGER)):
        best = found.best(names, load_)
        gain = difference(ours.attainment, best.attainment)
        gains[kind] = {"best": best.policy, "gain": gain.mean, "low": gain.low, "high": gain.high}
        print(f"load {load_}: {ours.policy} over {best.policy} ({kind}): {gain:+.4f} of all requests")
    return gains


def _shown(found: Found) -> set[str]:
    at = 0.6
    return {found.ours(at).policy, found.best(AS_AUTHORS, at).policy, found.best(WITH_LEDGER, at).policy, "all-cloud"}


def _jitter(knee_rps: float, plan: Plan, report: Report) -> None:
    """Four times the jitter, at the low and the usual load; what hedging recovers and what it costs."""
    loaded = _lasting(load("jitter_x4"), plan.seconds)
    best = ("static+ledger", "least-request+ledger", "headroom+ledger", "all-cloud")
    found = Found(_swept(loaded, (plan.policy, *best), (0.3, 0.6), knee_rps, plan), plan)
    print("\nfour-fold jitter")
    lines = rows(found.figures)
    table(lines[0], lines[1:])
    report.figures["jitter_x4"] = [one.plain() for one in found.figures]
    at = 0.3
    report.goal(Goal("jitter_x4_misses_vs_best_at_0.3", _misses(found, best, at), 1.0))
    report.goal(Goal("jitter_x4_extra_attempts_at_0.3", fmean(found.ours(at).extra_attempts), 0.05, "<="))


def _overload(plan: Plan, report: Report) -> None:
    """A step of five times the load: goodput while it lasts, and how soon all is well again."""
    loaded = load("overload_step")
    rate = loaded.scenario.arrivals.rate
    found = Found(_swept(loaded, (plan.policy, "all-cloud", "static+ledger"), (1.0,), rate, plan), plan)
    print("\na step of five times the load")
    lines = rows(found.figures)
    table(lines[0], lines[1:])
    ours = found.ours(1.0)
    step = loaded.scenario.arrivals.steps[0]
    begins, ends = 1.0 + step.at_s, 1.0 + step.at_s + step.for_s  # a run's clock starts a second early
    runs = len(plan.seeds)
    during = [in_time / runs / TIMELINE_BIN_S for at, _, in_time in ours.timeline if begins + 1.0 <= at < ends]
    peak = max(
        fmean(one for at, _, one in other.timeline if begins + 1.0 <= at < ends) / runs / TIMELINE_BIN_S
        for other in found.figures
    )
    report.figures["overload_step"] = [one.plain() for one in found.figures]
    report.goal(Goal("overload_goodput_vs_best", fmean(during) / peak, 0.8))
    report.goal(Goal("overload_recovery_s", _recovery_s(ours, begins, ends), 5.0, "<="))


def _recovery_s(ours: Figures, begins: float, ends: float) -> float:
    """From the end of the step until a second in which attainment is within two points of what it was before."""
    before = [(arrivals, in_time) for at, arrivals, in_time in ours.timeline if 2.0 <= at < begins]
    usual = sum(in_time for _, in_time in before) / sum(arrivals for arrivals, _ in before)
    after = [(at, arrivals, in_time) for at, arrivals, in_time in ours.timeline if at >= ends]
    width = round(1.0 / TIMELINE_BIN_S)
    for place in range(len(after) - width + 1):
        second = after[place : place + width]
        if sum(one[2] for one in second) >= (usual - 0.02) * sum(one[1] for one in second):
            return second[0][0] - ends
    return float("inf")


def _lasting(loaded: Loaded, seconds: float) -> Loaded:
    return loaded.replaced(loaded.scenario.lasting(seconds))


def _swept(
    loaded: Loaded, policies: Sequence[str], loads: Sequence[float], knee_rps: float, plan: Plan
) -> list[Figures]:
    def on_run(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} runs", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return sweep(loaded, policies, loads, plan.seeds, knee_rps=knee_rps, processes=plan.processes, on_run=on_run)


if __name__ == "__main__":
    main()
