"""How well Tidegate decides, beside everyone else's rules over the very same workers, in simulation.

One fleet (`office_wifi`: eight devices of mixed speed on jittering WiFi, heat and local callers, one GPU over a WAN) at
fractions of its knee, many seeds; every policy sees the same requests, weather and heat in each. What each baseline may
see is said in `simulator/baselines/policies.py`; `+ledger` also gives it our in-flight ledger. Then the same fleet
with four times the jitter, devices behind cellular links (`lte_fleet`), the pool cut off, and a step of five times the
load.

Seeds are spent where they tell something: all baselines run `BROAD_SEEDS` of them, and ours, ours without hedges and
the best of either kind all of them; the clairvoyant, which is slow, the broad ones only. A goal compares figures of the
same seeds. Ratios of misses are of sums over seeds; differences come with the 95 % interval of the paired ones.

Regret is against a bound that no policy can beat (`simulator/optimum`): a linear program that knows the future, tears
computations apart and never pads a batch, so part of the regret is the bound's generosity; the clairvoyant stands
beside it as what a greedy rule with perfect estimates attains.

    python -m tests.bench.routing [--quick] [--repeats SEEDS] [--seconds 40] [--processes 2] [--policy NAME]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from simulator.baselines.policies import AS_AUTHORS, ORACLE, POLICIES, UNHEDGED, WITH_LEDGER
from simulator.optimum.bound import AttainmentBound, NoSolver, upper_bound
from simulator.report.figures import MeanInterval, PolicyFigures, difference, miss_ratio, rows, tier_share
from simulator.report.plot import NoPlot, draw_loads, draw_timeline
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.sweep import knee, sweep
from simulator.world.tally import TIMELINE_BIN_S
from tests.bench.harness import RESULTS, Goal, Report, parser, table

SCENARIO = "office_wifi"
LOADS = (0.3, 0.6, 0.9, 1.2)
BROAD_SEEDS = 5
QUICK = ("static", "least-request", "all-cloud", "static+ledger", "least-request+ledger", "headroom+ledger")
FINALISTS = 2
# Two baselines attain the same if they are within a point: then their costs may be compared.
EQUAL_ATTAINMENT = 0.01


@dataclass(frozen=True)
class Plan:
    """How much is simulated."""

    policy: str
    seeds: tuple[int, ...]
    seconds: float
    loads: tuple[float, ...]
    processes: int
    as_authors: tuple[str, ...]
    with_ledger: tuple[str, ...]

    @property
    def broad(self) -> tuple[int, ...]:
        return self.seeds[:BROAD_SEEDS]


class Found:
    """The figures by policy and load."""

    def __init__(self, figures: Sequence[PolicyFigures], plan: Plan) -> None:
        self.figures = list(figures)
        self._of = {(one.policy, one.load): one for one in figures}
        self._plan = plan

    def ours(self, load_: float) -> PolicyFigures:
        return self._of[self._plan.policy, load_]

    def of(self, policy: str, load_: float) -> PolicyFigures | None:
        return self._of.get((policy, load_))

    def best(self, names: Sequence[str], load_: float) -> PolicyFigures:
        """The baseline that attains most, of those that ran the most seeds."""
        there = [self._of[name, load_] for name in names if (name, load_) in self._of]
        return max(there, key=lambda one: (len(one.seeds), fmean(one.attainment)))

    @property
    def all(self) -> list[PolicyFigures]:
        """Each policy at each load once: with most seeds."""
        return list(self._of.values())


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time")
    options.add_argument("--policy", default="tidegate", choices=POLICIES, help="the policy that the goals are for")
    arguments = options.parse_args()
    seeds = arguments.repeats or (1 if arguments.quick else 20)
    plan = Plan(
        policy=arguments.policy,
        seeds=tuple(range(1, seeds + 1)),
        seconds=arguments.seconds or (6.0 if arguments.quick else 40.0),
        loads=LOADS,
        processes=arguments.processes,
        as_authors=tuple(name for name in AS_AUTHORS if not arguments.quick or name in QUICK),
        with_ledger=tuple(name for name in WITH_LEDGER if not arguments.quick or name in QUICK),
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
    found = _loads(loaded, knee_rps, plan, report)
    bounds = _regret(loaded, found, knee_rps, plan, report)
    _pictures(loaded, found, bounds, plan)
    _jitter(knee_rps, plan, report)
    _cellular(plan, report)
    _overload(plan, report)
    report.figures["wall_s"] = time.perf_counter() - began
    report.write()


def _loads(loaded: LoadedScenario, knee_rps: float, plan: Plan, report: Report) -> Found:
    broad = Found(
        _swept(loaded, (*plan.as_authors, *plan.with_ledger, ORACLE), plan.loads, knee_rps, plan, plan.broad), plan
    )
    best = [name for kind in (plan.as_authors, plan.with_ledger) for name in _finalists(broad, kind, plan)]
    print(f"finalists, with all seeds: {', '.join(best)}\n")
    full = _swept(loaded, (plan.policy, UNHEDGED, "all-cloud", *best), plan.loads, knee_rps, plan, plan.seeds)
    found = Found([*broad.figures, *full], plan)
    for load_ in plan.loads:
        of_load = [one for one in found.all if one.load == load_]
        lines = rows(sorted(of_load, key=lambda one: -fmean(one.attainment)))
        table(lines[0], lines[1:])
        print()
    report.figures["attainment"] = {}
    for one in found.all:
        report.figures["attainment"].setdefault(one.policy, {})[f"{one.load:g}"] = fmean(one.attainment)
    report.figures["in_time"] = {f"{load_:g}": _in_time(found, load_) for load_ in plan.loads}
    report.figures["loads"] = [one.plain() for one in found.all]
    report.figures["gains"] = {str(load_): _gain(found, load_) for load_ in plan.loads}
    for goal in _goals(found):
        report.goal(goal)
    return found


def _in_time(found: Found, load_: float) -> dict[str, Any]:
    """Shares in time, ours and the best of each kind: the mean over seeds with its 95 % interval."""
    ours, seeing = found.ours(load_), found.of(ORACLE, load_)
    samples = {
        "tidegate": ours.attainment,
        "highest_class": ours.by_priority[min(ours.by_priority)],
        "best_as_authors": found.best(AS_AUTHORS, load_).attainment,
        "best_with_ledger": found.best(WITH_LEDGER, load_).attainment,
        **({"clairvoyant": seeing.attainment} if seeing else {}),
    }
    return {name: asdict(MeanInterval.of(values)) for name, values in samples.items()}


def _finalists(broad: Found, names: Sequence[str], plan: Plan) -> list[str]:
    """The best of a kind: over all loads, and at each goal's load."""

    def attained(name: str, loads: Sequence[float]) -> float:
        return sum(fmean(one.attainment) for load_ in loads if (one := broad.of(name, load_)))

    overall = sorted(names, key=lambda name: -attained(name, plan.loads))[:FINALISTS]
    return list(dict.fromkeys([*overall, *(broad.best(names, load_).policy for load_ in (0.3, 0.6, 1.2))]))


def _regret(
    loaded: LoadedScenario, found: Found, knee_rps: float, plan: Plan, report: Report
) -> dict[float, tuple[AttainmentBound, ...]]:
    """What is missing to a bound that nobody beats, seed by seed."""
    work = [(_at(loaded, load_ * knee_rps), seed) for load_ in plan.loads for seed in plan.broad]
    try:
        with ProcessPoolExecutor(plan.processes) as pool:
            flat = list(pool.map(_bound, work))
    except NoSolver as reason:
        report.goal(Goal("regret_at_0.6", None, 0.02, "<=", str(reason)))
        return {}
    bounds = {load_: tuple(flat[n * len(plan.broad) :][: len(plan.broad)]) for n, load_ in enumerate(plan.loads)}
    detail = report.figures["regret"] = {}
    for load_, of_load in bounds.items():
        ceiling = [one.attainment for one in of_load]
        ours = difference(ceiling, found.ours(load_).attainment[: len(ceiling)])
        seeing = found.of(ORACLE, load_)
        detail[str(load_)] = {"bound": fmean(ceiling), "regret": ours.mean, "low": ours.low, "high": ours.high}
        against = f", the clairvoyant {fmean(seeing.attainment):.2%}" if seeing else ""
        print(f"load {load_}: bound {fmean(ceiling):.2%}{against}, regret {_points(ours)}")
    report.goal(Goal("regret_at_0.6", detail["0.6"]["regret"], 0.02, "<="))
    report.goal(Goal("regret_at_1.2", detail["1.2"]["regret"], 0.08, "<="))
    return bounds


def _bound(work: tuple[LoadedScenario, int]) -> AttainmentBound:
    return upper_bound(*work)


def _pictures(
    loaded: LoadedScenario, found: Found, bounds: dict[float, tuple[AttainmentBound, ...]], plan: Plan
) -> None:
    ceiling = [(load_, fmean(one.attainment for one in of_load)) for load_, of_load in bounds.items()]
    shown = _shown(found)
    RESULTS.mkdir(exist_ok=True)
    try:
        draw_loads(
            [one for policy in shown for one in found.all if one.policy == policy],
            loaded.scenario.summary, RESULTS / "routing.png", ceiling=ceiling,
        )  # fmt: skip
        outage = load("pool_outage")
        rate = outage.scenario.arrivals.rate
        figures = _swept(outage, [name for name in shown if name != ORACLE], (1.0,), rate, plan, plan.broad)
        draw_timeline(figures, outage.scenario, RESULTS / "routing_outage.png")
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
        Goal("cover_of_95_percent_at_0.6", fmean(found.ours(usual).covered), 0.93),
        Goal("cover_of_95_percent_at_0.6_at_most", fmean(found.ours(usual).covered), 0.97, "<="),
    ]


def _misses(found: Found, names: Sequence[str], load_: float) -> float:
    return miss_ratio(found.ours(load_), found.best(names, load_))


def _pool_cost_saved(found: Found, load_: float) -> tuple[float | None, str]:
    """Against the cheapest baseline that attains at least what we do, to within a point."""
    ours = found.ours(load_)
    equal = [
        one
        for one in found.all
        if one.load == load_
        and one.policy in (*AS_AUTHORS, *WITH_LEDGER)
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


def _shown(found: Found) -> list[str]:
    at = 0.6
    ours, theirs, queue_estimate = found.ours(at), found.best(AS_AUTHORS, at), found.best(WITH_LEDGER, at)
    return list(dict.fromkeys([ours.policy, theirs.policy, queue_estimate.policy, "all-cloud", ORACLE]))


def _jitter(knee_rps: float, plan: Plan, report: Report) -> None:
    """Four times the jitter, at the low and the usual load; what hedging recovers and what it costs."""
    loaded = _lasting(load("jitter_x4"), plan.seconds)
    best = ("static+ledger", "least-request+ledger", "headroom+ledger", "all-cloud", ORACLE)
    loads = (0.3, 0.6)
    figures = _swept(loaded, best, loads, knee_rps, plan, plan.broad)
    found = Found([*figures, *_swept(loaded, (plan.policy, UNHEDGED), loads, knee_rps, plan, plan.seeds)], plan)
    print("\nfour-fold jitter")
    _print(found.figures)
    report.figures["jitter_x4"] = [one.plain() for one in found.figures]
    for at in loads:
        ours, unhedged = found.ours(at), found.of(UNHEDGED, at)
        assert unhedged is not None
        gained = difference(ours.attainment, unhedged.attainment)
        extra = MeanInterval.of([b / a - 1.0 for a, b in zip(unhedged.attempts, ours.attempts, strict=True)])
        recovered = gained.mean / (1.0 - fmean(unhedged.attainment)) if fmean(unhedged.attainment) < 1.0 else 0.0
        print(f"load {at}: hedging recovers {recovered:.1%} of what is missed without it "
              f"({_points(gained)}), with {extra:+.1%} attempts")  # fmt: skip
        report.figures[f"hedging_at_{at}"] = {"recovered": recovered, "gain": gained.mean, "extra": extra.mean}
        report.goal(Goal(f"jitter_x4_recovered_by_hedging_at_{at}", recovered, 0.0))
        report.goal(Goal(f"jitter_x4_extra_attempts_at_{at}", extra.mean, 0.05, "<="))
    ours = found.ours(0.3)
    report.goal(Goal("jitter_x4_misses_vs_best_at_0.3", _misses(found, best[:-1], 0.3), 1.0))


def _cellular(plan: Plan, report: Report) -> None:
    """Another family of links: devices behind LTE, which comes and goes."""
    loaded = _lasting(load("lte_fleet"), plan.seconds)
    knee_rps = knee(loaded)
    best = ("static+ledger", "least-request+ledger", "headroom+ledger", "least-request", "all-cloud", ORACLE)
    figures = _swept(loaded, (plan.policy, *best), (0.6,), knee_rps, plan, plan.broad)
    found = Found(figures, plan)
    print(f"\ncellular links, knee {knee_rps:.0f} requests/s")
    _print(found.figures)
    report.figures["lte_fleet"] = [one.plain() for one in figures]
    report.goal(Goal("lte_in_time_at_0.6", fmean(found.ours(0.6).attainment), 0.99))
    report.goal(Goal("lte_misses_vs_best_at_0.6", _misses(found, best[:-1], 0.6), 2.0))


def _overload(plan: Plan, report: Report) -> None:
    """A step of five times the load: goodput while it lasts, and how soon all is well again."""
    loaded = load("overload_step")  # whole also in a quick run: the step comes late
    rate = loaded.scenario.arrivals.rate
    policies = (plan.policy, "all-cloud", "static+ledger")
    found = Found(_swept(loaded, policies, (1.0,), rate, plan, plan.broad), plan)
    print("\na step of five times the load")
    _print(found.figures)
    ours = found.ours(1.0)
    step = loaded.scenario.arrivals.steps[0]
    begins, ends = 1.0 + step.at_s, 1.0 + step.at_s + step.for_s  # a run's clock starts a second early
    runs = len(plan.broad)
    during = [in_time / runs / TIMELINE_BIN_S for at, _, in_time in ours.timeline if begins + 1.0 <= at < ends]
    peak = max(
        fmean(one for at, _, one in other.timeline if begins + 1.0 <= at < ends) / runs / TIMELINE_BIN_S
        for other in found.figures
    )
    report.figures["overload_step"] = [one.plain() for one in found.figures]
    report.goal(Goal("overload_goodput_vs_best", fmean(during) / peak, 0.8))
    report.goal(Goal("overload_recovery_s", _recovery_s(ours, begins, ends), 5.0, "<="))


def _recovery_s(ours: PolicyFigures, begins: float, ends: float) -> float:
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


def _points(one: MeanInterval) -> str:
    return f"{100 * one.mean:+.2f} points [{100 * one.low:+.2f}, {100 * one.high:+.2f}]"


def _print(figures: Sequence[PolicyFigures]) -> None:
    lines = rows(figures)
    table(lines[0], lines[1:])


def _at(loaded: LoadedScenario, rate: float) -> LoadedScenario:
    return loaded.replaced(loaded.scenario.with_rate(rate))


def _lasting(loaded: LoadedScenario, seconds: float) -> LoadedScenario:
    return loaded.replaced(loaded.scenario.lasting(seconds))


def _swept(
    loaded: LoadedScenario,
    policies: Sequence[str],
    loads: Sequence[float],
    knee_rps: float,
    plan: Plan,
    seeds: Sequence[int],
) -> list[PolicyFigures]:
    def on_run(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} runs", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return sweep(loaded, policies, loads, seeds, knee_rps=knee_rps, processes=plan.processes, on_run=on_run)


if __name__ == "__main__":
    main()
