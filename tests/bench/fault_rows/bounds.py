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
from simulator.simulation import World
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
        most = most_units(OF_THE_POOL, self.budget_ms)
        tally = World(fleet, self.policy, self.seed, tally=lambda since: SmallOnes(since, most)).run().tally
        assert isinstance(tally, SmallOnes)
        return tally


def main() -> None:
    cases = list(_cases())
    with ProcessPoolExecutor(len(cores())) as processes:
        tallies = dict(zip(cases, processes.map(Case.tally, cases), strict=True))
    columns = [(load, policy) for load in LOADS for policy in POLICIES]

    def share(group: str, fleet: str, budget_ms: int, load: float, policy: str) -> float:
        found: list[TallyGroup] = [
            getattr(tallies[Case(fleet, budget_ms, load, policy, seed)], group) for seed in SEEDS
        ]
        return sum(one.in_time for one in found) / sum(one.arrivals for one in found)

    rows = [
        (fleet, f"{budget_ms} ms", *(f"{100 * share('all', fleet, budget_ms, *one):.1f}" for one in columns))
        for fleet in FLEETS
        for budget_ms in BUDGETS_MS
    ]
    heads = [f"{policy} at {load:g}" for load, policy in columns]
    table(("in time, %", "budgets", *heads), rows)
    rows = [
        (
            f"{most_units(OF_THE_POOL, budget_ms):g} units",
            f"{budget_ms} ms",
            *(f"{100 - 100 * share('small', FLEETS[-1], budget_ms, *one):.2f}" for one in columns),
        )
        for budget_ms in BUDGETS_MS
    ]
    print(f"\nof {FLEETS[-1]}, requests of at most so many units:")
    table(("lost, %", "budgets", *heads), rows)


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


if __name__ == "__main__":
    main()
