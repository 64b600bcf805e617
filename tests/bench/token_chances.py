"""Whether the chances that placement sees for generations are true, by tenths of what was claimed; in simulation.

Of every request that generates, placement claims three chances when it sends it: that the first token is in time, that
each further one is, and that the answer has ended in time; and the chance of all of it. Claims are gathered by tenths;
a tenth with `ENOUGH` claims is off by the difference between its mean claim and the share that came true.

Scenarios are those with streams: an office's WiFi, agents over LTE, and a pool that is far. Loads are of the knee; the
same seeds for each. At the far pool the rule that a knee is found by keeps too few first tokens at any rate; there the
rate that its scenario comes with stands for one. A run lasts as long as its fleet takes to be asked often enough.

    python -m tests.bench.token_chances [--quick] [--repeats SEEDS] [--seconds SECONDS] [--processes 2]
"""

from __future__ import annotations

from typing import Any, Final

from simulator.report.generation_figures import ENOUGH, Decile, GenerationFigures
from simulator.scenarios.scenario_file import load
from simulator.sweep import knee, sweep
from tests.bench.harness import Goal, Report, parser, table

SCENARIOS: Final = ("talk_office", "agents_lte", "talk_far_pool")
LOADS: Final = (0.3, 0.6)
KNEES: Final = {"talk_far_pool": load("talk_far_pool").scenario.arrivals.rate}
REQUESTS: Final = 4000  # at the lowest load, of all seeds together
MOST_OFF: Final = 0.03
OURS: Final = "tidegate"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time")
    chosen = options.parse_args()
    seeds = tuple(range(1, 1 + (chosen.repeats or (1 if chosen.quick else 8))))
    requests = REQUESTS / 20 if chosen.quick else REQUESTS
    report = Report("token_chances", {"seeds": len(seeds), "requests": requests, "loads": LOADS, "enough": ENOUGH})
    rows = []
    for scenario in SCENARIOS[:1] if chosen.quick else SCENARIOS:
        loaded = load(scenario)
        knee_rps = KNEES.get(scenario) or knee(loaded)
        seconds = chosen.seconds or requests / len(seeds) / min(LOADS) / knee_rps
        lasting = loaded.replaced(loaded.scenario.lasting(seconds))
        for one in sweep(lasting, (OURS,), LOADS, seeds, knee_rps=knee_rps, processes=chosen.processes):
            generations = one.generations
            assert generations is not None
            name = f"{scenario}.{one.load:g}"
            report.figures[name] = told = figures(generations)
            rows.append((scenario, f"{one.load:g}", *(_shown(told[what]["worst"]) for what in told)))
            for what, found in told.items():
                report.goal(Goal(f"{name}.{what}", found["worst"], MOST_OFF, "<=", why=found["where"]))
    table(("scenario", "load", *(what for what in report.figures[name])), rows)
    report.write()


def figures(generations: GenerationFigures) -> dict[str, Any]:
    """By what was claimed: how far the worst tenth with enough claims is off, where that is, and all tenths."""
    told = {}
    for what, deciles in generations.calibration.items():
        counted = [one for one in deciles if one.claims >= ENOUGH]
        worst = max(counted, key=lambda one: one.gap, default=None)
        told[what] = {
            "worst": None if worst is None else worst.gap,
            "where": f"no tenth has {ENOUGH} claims" if worst is None else _words(worst),
            "deciles": [list(one) for one in deciles],
        }
    return told


def _shown(off: float | None) -> str:
    return "-" if off is None else f"{off:.3f}"


def _words(one: Decile) -> str:
    return f"claimed {one.claimed:.3f}, came true {one.kept:.3f}, of {one.claims}"


if __name__ == "__main__":
    main()
