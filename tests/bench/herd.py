"""Gateways side by side on the same twenty devices, simulated: what is lost against one gateway that sees all.

The scenario is `simulator/scenarios/side_by_side.yaml`: equal devices at four fifths of what they can do, so that a
gateway's choice is worth most where it knows which of them is idle. The same requests, seed by seed, come to N gateways
at random. Ratios are within a seed. `best` is the rule for one gateway alone, which looks at all targets, at any N.

    python -m tests.bench.herd [--quick] [--repeats SEEDS]
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.placement.crowd import FROM_GATEWAYS
from simulator.scenarios.scenario import Scenario
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.simulation import World
from tests.bench.harness import Goal, Report, Spread, parser, ratios, table

GATEWAYS: Final = (1, 2, 4, 8, 16, 32)
QUICK: Final = (1, 4, 16)


class _LooksAtAll(Scenario, frozen=True, kw_only=True):
    """The scenario, with gateways that never look at a few targets only."""

    @property
    def shares_targets(self) -> bool:
        return False


def run(loaded: LoadedScenario, gateways: int, seed: int, *, alone: bool) -> tuple[float, float]:
    """(attainment, p99 of answers in seconds)."""
    scenario = msgspec.structs.replace(loaded.scenario, gateways=gateways)
    if alone:
        scenario = _LooksAtAll(**{one.name: getattr(scenario, one.name) for one in msgspec.structs.fields(scenario)})
    tally = World(loaded.replaced(scenario), "tidegate", seed).run().tally.all
    return tally.attainment, tally.latencies.quantile_s(0.99)


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    seeds = range(1, 1 + (chosen.repeats or (1 if chosen.quick else 5)))
    loaded = load("side_by_side")
    if chosen.quick:
        loaded = loaded.replaced(loaded.scenario.lasting(12.0))
    report = Report("herd", {"seeds": len(seeds), "seconds": loaded.scenario.duration_s})
    rows, ones = [], [run(loaded, 1, seed, alone=False) for seed in seeds]
    for gateways in QUICK if chosen.quick else GATEWAYS:
        found = ones if gateways == 1 else [run(loaded, gateways, seed, alone=False) for seed in seeds]
        best = found
        if gateways >= FROM_GATEWAYS:
            best = [run(loaded, gateways, seed, alone=True) for seed in seeds]
        of_one = ratios([one for one, _ in found], [one for one, _ in ones])
        p99 = ratios([one for _, one in found], [one for _, one in ones])
        of_best = ratios([one for one, _ in best], [one for one, _ in ones])
        report.figures[f"n{gateways}"] = {
            "attainment": Spread.of(one for one, _ in found), "over_one": of_one, "p99_over_one": p99,
            "looking_at_all_over_one": of_best,
        }  # fmt: skip
        attainment = Spread.of(one for one, _ in found)
        rows.append((gateways, f"{attainment:.4f}", f"{of_one:.3f}", f"{of_best:.3f}", f"{p99:.2f}"))
        print(f"  {gateways} gateways: {of_one:.3f} of one", flush=True)
    table(("gateways", "attainment", "over one", "looking at all", "p99 over one"), rows)
    for gateways, share, times in ((4, 0.98, 1.5), (16, 0.95, 2.5)):
        figures = report.figures[f"n{gateways}"]
        report.goal(Goal(f"herd_attainment_of_{gateways}_gateways_over_one", figures["over_one"].median, share))
        report.goal(Goal(f"herd_p99_of_{gateways}_gateways_over_one", figures["p99_over_one"].median, times, "<="))
    report.write()


if __name__ == "__main__":
    main()
