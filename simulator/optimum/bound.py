"""An upper bound on answers in time that no policy can beat: a linear program, and the proof by its prices.

Time is cut into slots. Let z(i, j, k) be the share of request i's computation that worker j does in slot k. Whatever a
policy does, the answers that it gives in time fulfil

    Σ_jk z(i, j, k) ≤ 1                         each request counts once, however often it was tried
    Σ_i  charge(i, j, k) · z(i, j, k) ≤ time(j, k)      a worker has no more time in a slot than the slot is long
    0 ≤ z(i, j, k) ≤ overlap(i, j, k) / lasts(i, j, k)  no computation advances faster than time passes

where z is 0 outside the request's window at the worker (`reach`), and charge and lasts are the least that it can take
there (`machines`). So the largest Σ w(i) · z(i, j, k) under these conditions is no less than the weight of what any
policy answers in time: computations may be torn, shared among workers and run at once, batches never pad, and the
future is known. Slots only widen it, since a window counts in each slot that it touches with the overlap that it has.

The solver's result is not trusted for it. For any prices π ≥ 0 of the rows, weak duality gives

    Σ π · limit + Σ upper(z) · max(0, w − π · column)   ≥ the optimum

and this sum, at the prices that the solver found, is what is reported: a tolerance, or a solver that stopped early,
makes it larger and never wrong. The warm-up's requests are worth nothing here: leaving them unanswered is allowed.

It is generous, not exact: `Machine` and `LinkReach` say what is taken at its best. Gateways' limits, queues' sizes,
which gateway may reach which device and the devices' own callers are ignored.
Source: time-indexed relaxations, Dyer and Wolsey, Discrete Applied Mathematics 1990; docs/design/routing.md, "Upper
bound".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from simulator.optimum.machines import Floats, Machine, machines
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.world.arrivals import SimulatedRequest, requests
from simulator.world.conditions import SETTLING_S, WorldConditions

SLOT_S = 0.1


class NoSolver(Exception):
    """No solver is installed."""


@dataclass(frozen=True, slots=True)
class AttainmentBound:
    """No policy attains more. `by_class` is how one best plan shares it out: no bound for a class by itself."""

    attainment: float  # weighted, of the requests that count
    by_class: dict[str, float]
    requests: int
    variables: int


def upper_bound(
    loaded: LoadedScenario, seed: int, *, weights: Mapping[str, float] | None = None, slot_s: float = SLOT_S
) -> AttainmentBound:
    """The bound of one seed's world.

    Args:
        weights: of an answer in time, by class; None: all alike, so that the bound is of plain attainment.

    Raises:
        NoSolver: scipy is not installed.
        ValueError: a model generates: the program knows nothing of tokens.
    """
    scenario = loaded.scenario
    if generating := [name for name, model in scenario.models.items() if model.generation is not None]:
        raise ValueError(
            f"the upper bound is of single answers, and {', '.join(generating)} generates: the policy clairvoyant, "
            "which is no bound, knows the future of generations"
        )
    asked = [request._replace(at=request.at + SETTLING_S) for request in requests(scenario, seed)]
    counts = np.array([request.at >= SETTLING_S + scenario.warmup_s for request in asked], bool)
    worth = np.array([1.0 if weights is None else weights[request.kind.name] for request in asked]) * counts
    if not worth.sum():
        return AttainmentBound(1.0, {}, 0, 0)
    until = SETTLING_S + scenario.duration_s + max(request.kind.budget_ms for request in asked) / 1e3
    program = Program(machines(scenario, WorldConditions(loaded, seed), asked, until), worth, until, slot_s)
    proven, answered = program.best()
    counted = [(request, share) for request, share, one in zip(asked, answered, counts, strict=True) if one]
    return AttainmentBound(proven / float(worth.sum()), _by_class(counted), len(counted), program.variables)


class Program:
    """The linear program: rows of requests first, then of slots."""

    def __init__(self, fleet: Sequence[Machine], worth: Floats, until: float, slot_s: float) -> None:
        self._worth = worth
        self._count = count = len(worth)
        slots = ceil(until / slot_s)
        columns = [
            _columns(machine, worth, slots, slot_s, count + place * slots) for place, machine in enumerate(fleet)
        ]
        self._request = np.concatenate([one.request for one in columns])
        self._row = np.concatenate([one.row for one in columns])
        self._charge = np.concatenate([one.charge for one in columns])
        self._most = np.concatenate([one.most for one in columns])
        self._limits = np.concatenate([np.ones(count), *(_time(machine, slots, slot_s) for machine in fleet)])

    @property
    def variables(self) -> int:
        return len(self._request)

    def best(self) -> tuple[float, Floats]:
        """The bound on the weight that can be answered, and how much of each request a best plan answers."""
        if not self.variables:
            return 0.0, np.zeros(self._count)
        found, prices = _solved(-self._worth[self._request], self._matrix(), self._limits, self._most)
        answered: Floats = np.bincount(self._request, weights=found, minlength=self._count).astype(float)
        return self.proven(prices), answered

    def proven(self, prices: Floats) -> float:
        """What weak duality makes of any prices: never below the optimum."""
        prices = np.maximum(prices, 0.0)
        gain = self._worth[self._request] - self._charge * prices[self._row] - prices[self._request]
        return float(prices @ self._limits + self._most @ np.maximum(gain, 0.0))

    def _matrix(self) -> Any:
        sparse = _scipy("sparse")
        columns = np.arange(self.variables)
        return sparse.csr_array(
            (
                np.concatenate([np.ones(self.variables), self._charge]),
                (np.concatenate([self._request, self._row]), np.concatenate([columns, columns])),
            ),
            shape=(len(self._limits), self.variables),
        )

    def __repr__(self) -> str:
        return f"<Program of {self._count} requests, {self.variables} variables, {len(self._limits)} rows>"


@dataclass(frozen=True)
class _Columns:
    """Variables of one worker: of which request, in which slot's row, its charge there, and the most of it."""

    request: Any
    row: Any
    charge: Floats
    most: Floats


def _columns(machine: Machine, worth: Floats, slots: int, slot_s: float, first_row: int) -> _Columns:
    can = np.flatnonzero((worth > 0.0) & (machine.due > machine.release) & np.isfinite(machine.lasts_s))
    first = np.floor(machine.release[can] / slot_s).astype(int)
    last = np.minimum(np.ceil(machine.due[can] / slot_s).astype(int) - 1, slots - 1)
    each = np.maximum(0, last - first + 1)
    request = np.repeat(can, each)
    slot = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each) + np.repeat(first, each)
    start, end = slot * slot_s, (slot + 1) * slot_s
    overlap = np.minimum(end, machine.due[request]) - np.maximum(start, machine.release[request])
    factor = _least_factor(machine, request, start, end)
    overlap = np.minimum(overlap, _time(machine, slots, slot_s)[slot])
    most = np.minimum(1.0, overlap / (factor * machine.lasts_s[request]))
    # A request that cannot be done whole in its window cannot be done in time.
    whole = np.bincount(request, weights=most, minlength=len(machine.due)) >= 1.0 - 1e-9
    kept = whole[request] & (most > 0.0)
    return _Columns(request[kept], first_row + slot[kept], (factor * machine.charge_s[request])[kept], most[kept])


def _least_factor(machine: Machine, request: Any, start: Floats, end: Floats) -> Floats:
    """How slow the worker is at least for a computation that is under way within the slot.

    A computation keeps the factor of the instant it began. It began within a piece with factor f only if there is an
    instant in it, not before the release and before the slot's end, from which it lasts beyond the slot's start.
    """
    least = np.full(len(start), np.inf)
    release, lasts_s = machine.release[request], machine.lasts_s[request]
    for piece in machine.pieces:
        latest_start = np.minimum(piece.end, end)
        possible = (np.maximum(piece.start, release) < latest_start) & (latest_start + piece.factor * lasts_s > start)
        least = np.where(possible, np.minimum(least, piece.factor), least)
    return np.asarray(least, float)


def _time(machine: Machine, slots: int, slot_s: float) -> Floats:
    """How long the worker can compute in each slot."""
    starts = np.arange(slots) * slot_s
    time = np.full(slots, slot_s)
    for down_from, down_to in machine.down:
        time -= np.clip(np.minimum(down_to, starts + slot_s) - np.maximum(down_from, starts), 0.0, None)
    return np.asarray(np.maximum(time, 0.0), float)


def _solved(costs: Floats, matrix: Any, limits: Floats, most: Floats) -> tuple[Floats, Floats]:
    """The best point and the prices of the rows."""
    found = _scipy("optimize").linprog(
        costs, A_ub=matrix, b_ub=limits, bounds=np.column_stack([np.zeros(len(most)), most]), method="highs"
    )
    if found.x is None:
        raise ArithmeticError(f"the program was not solved: {found.message}")
    return found.x, -found.ineqlin.marginals


def _by_class(answered: Iterable[tuple[SimulatedRequest, float]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for request, share in answered:
        sums.setdefault(request.kind.name, []).append(float(share))
    return {name: sum(shares) / len(shares) for name, shares in sorted(sums.items())}


def _scipy(part: str) -> Any:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise NoSolver("the bound needs scipy, which is not installed: pip install 'tidegate[simulate]'") from error
    return {"optimize": optimize, "sparse": sparse}[part]
