"""Attainment over jitter: one fleet under ever worse links, our decisions beside other rules, in simulation.

The fleet is `office_wifi` at 0.6 of the knee that it has with its usual links. Jitter and bad weather are multiplied
by each of `TIMES`, for WiFi and WAN alike. Every policy sees the same requests and weather, seed by seed. `static` is a
threshold of the request's size; `static+ledger` and `least-request+ledger` decide with our estimate of every queue.

Beside what is in time, the figures say how we decide: the share of answers that came from the pool, and of requests
that were hedged.

    python -m tests.bench.jitter [--quick] [--repeats SEEDS] [--seconds 20] [--processes 2]
"""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

from simulator.baselines.policies import UNHEDGED
from simulator.report.figures import MeanInterval, PolicyFigures, difference, tier_share
from simulator.scenarios.scenario_file import load
from simulator.sweep import knee, sweep
from tests.bench.harness import Goal, Report, parser, table

SCENARIO: Final = "office_wifi"
LOAD: Final = 0.6
TIMES: Final = (0.0, 1.0, 2.0, 4.0, 8.0)
QUICK: Final = (1.0, 4.0)
OURS: Final = "tidegate"
OTHERS: Final = ("static", "static+ledger", "least-request+ledger", "all-cloud")
ESTIMATING: Final = "least-request+ledger"  # the strongest of them while links are well


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time")
    chosen = options.parse_args()
    seeds = range(1, 1 + (chosen.repeats or (1 if chosen.quick else 8)))
    loaded = load(SCENARIO)
    knee_rps = knee(loaded)
    loaded = loaded.replaced(loaded.scenario.lasting(chosen.seconds or (6.0 if chosen.quick else 20.0)))
    report = Report(
        "jitter",
        {"scenario": SCENARIO, "load": LOAD, "seeds": len(seeds), "seconds": loaded.scenario.duration_s},
    )
    rows = []
    for times in QUICK if chosen.quick else TIMES:
        jittering = loaded.replaced(loaded.scenario.with_jitter(times))
        policies = (OURS, UNHEDGED, *OTHERS)
        found = {
            one.policy: one
            for one in sweep(jittering, policies, (LOAD,), tuple(seeds), knee_rps=knee_rps, processes=chosen.processes)
        }
        report.figures[f"x{times:g}"] = {name: plain(one) for name, one in found.items()}
        rows.append((f"{times:g}", *(f"{fmean(found[name].attainment):.2%}" for name in policies)))
        print(f"  jitter x{times:g}: {fmean(found[OURS].attainment):.2%} in time", flush=True)
        if times in (1.0, 4.0):
            gain = difference(found[OURS].attainment, found[ESTIMATING].attainment)
            why = f"95 % between {gain.low:.4f} and {gain.high:.4f}"
            report.goal(Goal(f"jitter_x{times:g}_gain_over_{ESTIMATING}", gain.mean, 0.0, why=why))
    table(("jitter times", OURS, UNHEDGED, *OTHERS), rows)
    report.write()


def plain(one: PolicyFigures) -> dict[str, Any]:
    """What pages and plots show of one policy, each with its 95 % interval over seeds where it has one."""
    return {
        "in_time": spread(MeanInterval.of(one.attainment)),
        "hedged": spread(MeanInterval.of(one.hedged)),
        "pool_share": tier_share(one, "pool"),
    }


def spread(found: MeanInterval) -> dict[str, float]:
    return {"mean": found.mean, "low": found.low, "high": found.high}


if __name__ == "__main__":
    main()
