"""What a part of the fault matrix's fleet can do, simulated: how much of rows 28 to 32 is lost for want of capacity.

The rows say what must not be lost while a part of the fleet is gone. This says what is lost where that part was never
there and everything else is well: by Tidegate, and by a rule that knows each machine's state and all times. Of the
edges alone it also says what is lost of the requests that rows 30 and 32 count: those that an edge of middle speed
makes in half of the budget.

    python -m tests.bench.fault_rows.bounds
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Final, NamedTuple

from msgspec.structs import replace

from simulator.baselines.policies import ORACLE
from simulator.scenarios import scenario_file
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.simulation import SETTLING_S, World
from simulator.world.tally import OutcomeTally, RequestEnd, TallyGroup
from tests.bench.fault_rows.stalls import BUDGETS_MS, LOADS, most_units
from tests.bench.harness import cores, table
from tests.support.gateway.casts import EDGES, KNEE_RPS

FLEETS: Final = ("whole", "the pool alone", "the edges alone")
POLICIES: Final = ("value", ORACLE)
SEEDS: Final = (1, 2)
OF_THE_POOL: Final = "30"  # a row without a pool


class SmallOnes(OutcomeTally):
    """Counts requests of up to `most_units` apart, too."""

    def __init__(self, counts_from: float, most_units: float) -> None:
        super().__init__(counts_from)
        self.small = TallyGroup()
        self._most_units = most_units

    def end(self, end: RequestEnd) -> None:
        super().end(end)
        if end.units <= self._most_units and end.arrived_at >= self.counts_from:
            self.small.add(end)


class Case(NamedTuple):
    """One simulation; `load` is of the whole fleet's knee."""

    fleet: str
    budget_ms: int
    load: float
    policy: str
    seed: int

    def tally(self) -> SmallOnes:
        fleet = _fleet(self.fleet, self.budget_ms, self.load)
        tally = SmallOnes(SETTLING_S + fleet.scenario.warmup_s, most_units(OF_THE_POOL, self.budget_ms))
        World(fleet, self.policy, self.seed, tally=tally).run()
        return tally


def main() -> None:
    cases = list(_cases())
    with ProcessPoolExecutor(len(cores())) as processes:
        tallies = dict(zip(cases, processes.map(Case.tally, cases), strict=True))
    rows = []
    small = []
    for fleet in FLEETS:
        for budget_ms in BUDGETS_MS:
            shares = [
                f"{_in_time_percent([tallies[Case(fleet, budget_ms, load, policy, seed)] for seed in SEEDS]):.1f}"
                for load in LOADS
                for policy in POLICIES
            ]
            rows.append((fleet, f"{budget_ms} ms", *shares))
            if fleet == "the edges alone":
                lost = [
                    f"{_lost_percent([tallies[Case(fleet, budget_ms, load, policy, seed)] for seed in SEEDS]):.2f}"
                    for load in LOADS
                    for policy in POLICIES
                ]
                small.append((f"{most_units(OF_THE_POOL, budget_ms):g} units", f"{budget_ms} ms", *lost))
    table(("in time, %", "budgets", *(f"{policy} at {load:g}" for load in LOADS for policy in POLICIES)), rows)
    print("\nof the edges alone, requests of at most so many units:")
    table(("lost, %", "budgets", *(f"{policy} at {load:g}" for load in LOADS for policy in POLICIES)), small)


def _cases() -> Iterator[Case]:
    for fleet in FLEETS:
        for budget_ms in BUDGETS_MS:
            for load in LOADS:
                for policy in POLICIES:
                    yield from (Case(fleet, budget_ms, load, policy, seed) for seed in SEEDS)


def _fleet(name: str, budget_ms: int, load: float) -> LoadedScenario:
    loaded = scenario_file.load("paced_fleet")
    whole = loaded.scenario
    changed = replace(
        whole,
        classes=tuple(replace(one, budget_ms=float(budget_ms)) for one in whole.classes),
        edges=() if name == "the pool alone" else tuple(replace(one, count=EDGES) for one in whole.edges),
        pools=() if name == "the edges alone" else whole.pools,
    )
    return loaded.replaced(changed.with_rate(load * KNEE_RPS))


def _lost_percent(tallies: list[SmallOnes]) -> float:
    return 100.0 - 100.0 * sum(one.small.in_time for one in tallies) / sum(one.small.arrivals for one in tallies)


def _in_time_percent(tallies: list[SmallOnes]) -> float:
    return 100.0 * sum(one.all.in_time for one in tallies) / sum(one.all.arrivals for one in tallies)


if __name__ == "__main__":
    main()
