"""Many runs: every policy at every load with every seed, over as many processes as there are cores to give.

Loads are fractions of the knee, the rate at which a plain policy begins to fail: the highest at which a static
threshold with the ledger still answers `KNEE_ATTAINMENT` in time, found by bisection. It belongs to the fleet and not
to the policy under test, so an improved placement moves its figures and not the axis. A scenario may name its knee, to
spare the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import sqrt

from simulator.report.figures import PolicyFigures, figures
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.simulation import Run, simulate

KNEE_POLICY = "static+ledger"
KNEE_ATTAINMENT = 0.9
_BISECTIONS = 6
OnRun = Callable[[int, int], None]  # (runs done, runs in all)


def sweep(
    loaded: LoadedScenario,
    policies: Sequence[str],
    loads: Sequence[float],
    seeds: Sequence[int],
    *,
    knee_rps: float,
    processes: int = 1,
    on_run: OnRun = lambda _done, _total: None,
) -> list[PolicyFigures]:
    """The figures of every policy at every load, in this order; loads are fractions of `knee_rps`."""
    points = list(product(policies, loads))
    work = [(_at(loaded, load * knee_rps), policy, seed) for policy, load in points for seed in seeds]
    found: list[PolicyFigures] = []
    runs: list[Run] = []
    for done, run in enumerate(_runs(work, processes), 1):
        runs.append(run)
        on_run(done, len(work))
        if len(runs) == len(seeds):
            load = points[len(found)][1]
            found.append(figures(runs, load=load, rate=load * knee_rps))
            runs = []
    return found


def knee(loaded: LoadedScenario, *, seeds: Sequence[int] = (1, 2), on_run: OnRun = lambda _done, _total: None) -> float:
    """Requests a second at which the fleet begins to fail; the scenario's own figure if it has one."""
    if loaded.scenario.knee_rps is not None:
        return loaded.scenario.knee_rps

    def attained(rate: float) -> float:
        runs = [simulate(_at(loaded, rate), KNEE_POLICY, seed) for seed in seeds]
        return sum(run.tally.all.in_time for run in runs) / max(1, sum(run.tally.all.arrivals for run in runs))

    low = high = loaded.scenario.arrivals.rate
    while attained(high) >= KNEE_ATTAINMENT:
        low, high = high, 2.0 * high
    while low == high or attained(low) < KNEE_ATTAINMENT:
        high, low = low, low / 2.0
        if low < 1e-3 * loaded.scenario.arrivals.rate:
            raise ValueError(f"{KNEE_POLICY} fails at any rate here: name knee_rps in the scenario")
    for step in range(_BISECTIONS):
        middle = sqrt(low * high)  # geometric: rates differ by factors
        low, high = (middle, high) if attained(middle) >= KNEE_ATTAINMENT else (low, middle)
        on_run(step + 1, _BISECTIONS)
    return sqrt(low * high)


def _at(loaded: LoadedScenario, rate: float) -> LoadedScenario:
    return loaded.replaced(loaded.scenario.with_rate(rate))


def _runs(work: list[tuple[LoadedScenario, str, int]], processes: int) -> Iterator[Run]:
    if processes <= 1:
        yield from (simulate(*one) for one in work)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(_simulate, work)


def _simulate(work: tuple[LoadedScenario, str, int]) -> Run:
    return simulate(*work)
