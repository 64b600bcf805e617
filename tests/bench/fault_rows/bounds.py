"""What a part of the fault matrix's fleet can do, simulated: how much of rows 28 to 32 is lost for want of capacity.

The rows say what must not be lost while a part of the fleet is gone. This says what is lost where that part was never
there and everything else is well: by Tidegate, and by a rule that knows each machine's state and all times.

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
from simulator.simulation import simulate
from simulator.world.tally import OutcomeTally
from tests.bench.fault_rows.stalls import BUDGETS_MS, LOADS
from tests.bench.harness import cores, table
from tests.support.gateway.casts import EDGES, KNEE_RPS

FLEETS: Final = ("whole", "the pool alone", "the edges alone")
POLICIES: Final = ("value", ORACLE)
SEEDS: Final = (1, 2)


class Case(NamedTuple):
    """One simulation; `load` is of the whole fleet's knee."""

    fleet: str
    budget_ms: int
    load: float
    policy: str
    seed: int

    def tally(self) -> OutcomeTally:
        return simulate(_fleet(self.fleet, self.budget_ms, self.load), self.policy, self.seed).tally


def main() -> None:
    cases = list(_cases())
    with ProcessPoolExecutor(len(cores())) as processes:
        tallies = dict(zip(cases, processes.map(Case.tally, cases), strict=True))
    rows = []
    for fleet in FLEETS:
        for budget_ms in BUDGETS_MS:
            shares = [
                f"{_in_time_percent([tallies[Case(fleet, budget_ms, load, policy, seed)] for seed in SEEDS]):.1f}"
                for load in LOADS
                for policy in POLICIES
            ]
            rows.append((fleet, f"{budget_ms} ms", *shares))
    table(("in time, %", "budgets", *(f"{policy} at {load:g}" for load in LOADS for policy in POLICIES)), rows)


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


def _in_time_percent(tallies: list[OutcomeTally]) -> float:
    return 100.0 * sum(one.all.in_time for one in tallies) / sum(one.all.arrivals for one in tallies)


if __name__ == "__main__":
    main()
