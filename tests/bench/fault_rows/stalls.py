"""Rows 28 to 32: workers stop, or are twenty times too slow, or an agent does, while links and connections are well.

    28 one edge's worker    29 all edges' workers    30 the pool's worker    31 one edge's agent, and not its worker
    32 a foreign server in the pool's place, which gives no accept-ack

The letters go through stopped (SIGSTOP) and slowed (`tests/support/slow_worker.py`), budgets of 300 ms, 1 s and 2 s, at
0.3 and at 0.6 of the knee. Row 31 stops the agent itself (SIGSTOP), or blocks its event loop for two seconds. What may
be lost: nothing where there is a second for each request, and with 300 ms what is under way when it happens and what
comes within 100 ms.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from math import inf
from typing import Final

import psutil

from simulator.scenarios import scenario_file
from tests.bench.fault_rows.links import POOL
from tests.bench.fault_rows.trial import LATEST_S, Check, Trial
from tests.support.edge.odd_edge import BLOCKED_S
from tests.support.faults.matrix import Act, Matrix, Row
from tests.support.faults.matrix_seen import Seen
from tidegate.estimate.cost_table import CostTable

BUDGETS_MS: Final = (300, 1000, 2000)
LOADS: Final = (0.3, 0.6)
# What edges can do where the pool is gone: what one of middle speed makes in half of the budget. Of larger requests
# even a planner that knows all arrivals and times loses some (docs/design/faults.md, "Gray failure").
_MIDDLE_SLOWNESS: Final = 2.0  # of `paced_fleet.yaml`, whose devices are 1 to 3 times as slow as the first
_EDGE_MS: Final = CostTable(scenario_file.load("paced_fleet").scenario.models["encoder"].edge_ms or ())
_LARGEST: Final = 1025
_OF_THE_POOL: Final = ("30", "32")
_AT_ONCE_S: Final = 0.1
_SECOND_MS: Final = 1000
_WHOSE: Final = {
    "28": "an edge's worker",
    "29": "all edges' workers",
    "30": "the pool's worker",
    "31": "an edge's agent",
    "32": "a foreign server",
}
_SLOWED_BY: Final = signal.SIGWINCH  # `tests/support/slow_worker.py`
_HANGS_BY: Final = signal.SIGUSR1  # `tests/support/serving/foreign_server.py`, which is slowed as workers are
_BLOCKED_BY: Final = signal.SIGPROF  # `tests/support/edge/odd_edge.py`


def _names(number: str, matrix: Matrix) -> Sequence[str]:
    return {"28": matrix.edges[:1], "29": matrix.edges, "30": ["pool"], "32": ["pool"]}[number]


def _workers(number: str, matrix: Matrix) -> list[psutil.Process]:
    return [worker for name in _names(number, matrix) for worker in matrix.fleet.part(name).everyone()[1:]]


def _stop(number: str) -> tuple[object, object]:
    stopped: list[psutil.Process] = []

    def acts(matrix: Matrix) -> list[tuple[float, Act]]:
        def stop() -> None:
            stopped[:] = _workers(number, matrix)
            for worker in stopped:
                worker.suspend()

        return [(0.0, stop)]

    def resume(_matrix: Matrix) -> None:
        for worker in stopped:
            if worker.is_running():  # most were killed and replaced by now
                worker.resume()

    return acts, resume


def _slow(number: str) -> tuple[object, object]:
    def turn(matrix: Matrix) -> None:
        for name in _names(number, matrix):
            matrix.fleet.part(name).signal(_SLOWED_BY)

    return (lambda matrix: [(0.0, lambda: turn(matrix))]), turn


def _stop_agent(_number: str) -> tuple[object, object]:
    """Its worker computes on, and its connections stay."""

    def agent(matrix: Matrix) -> psutil.Process:
        return matrix.fleet.part(matrix.edges[0]).everyone()[0]

    return (lambda matrix: [(0.0, agent(matrix).suspend)]), (lambda matrix: agent(matrix).resume())


def _block_loop(_number: str) -> tuple[object, object]:
    def block(matrix: Matrix) -> None:
        matrix.fleet.part(matrix.edges[0]).signal(_BLOCKED_BY)

    return (lambda matrix: [(0.0, lambda: block(matrix))]), (lambda _matrix: None)


def _hang_foreign(_number: str) -> tuple[object, object]:
    def turn(matrix: Matrix) -> None:
        matrix.fleet.part("pool").signal(_HANGS_BY)

    return (lambda matrix: [(0.0, lambda: turn(matrix))]), turn


def _targets(number: str, seen: Seen) -> set[str]:
    known = seen.looks[0].states
    if number in ("28", "31"):
        return {"edge/device-1"}
    return {POOL} if number in _OF_THE_POOL else {one for one in known if one.startswith("edge/")}


def most_units(number: str, budget_ms: float) -> float:
    """The largest request of this row that must not be lost: what edges can do, where there is no pool."""
    if number not in _OF_THE_POOL:
        return inf
    return max(size for size in range(1, _LARGEST) if _MIDDLE_SLOWNESS * _EDGE_MS.seconds_for(size) <= budget_ms / 2.0)


def _checks(number: str, budget_ms: int) -> object:
    largest = most_units(number, budget_ms)

    def checks(seen: Seen) -> list[Check]:
        hit = _targets(number, seen)
        others = [one for one in seen.during.answers if one.units <= largest]
        lost = [one for one in others if one.status != 200 or one.latency_s > one.budget_s + LATEST_S]
        at = seen.broken_at
        under_way = {one.number for one in others if one.at < at}
        soon = {one.number for one in others if at <= one.at < at + _AT_ONCE_S}
        may_be_lost = 0 if budget_ms >= _SECOND_MS else len(under_way | soon)
        again = [seen.served_again_after(target) for target in hit]
        return [
            Check("lost", len(lost), "<=", may_be_lost),
            Check("lost_late", sum(one.at >= at + 1.0 for one in lost), "<=", 0),
            Check("used_again_s", min((one for one in again if one is not None), default=None), "<=", 3.0),
        ]

    return checks


_FAULTS: Final = {
    "": (("stop computing", _stop, 6.0), ("compute 20 times too slowly", _slow, 6.0)),
    "32": (("stops answering", _hang_foreign, 6.0), ("answers 20 times too slowly", _slow, 6.0)),
    "31": (("stands still", _stop_agent, 4.0), ("does nothing for 2 s", _block_loop, BLOCKED_S)),
}


def _trials() -> list[Trial]:
    trials = []
    for number, whose in _WHOSE.items():
        letters = iter("abcdefghijkl")
        for how, fault, during_s in _FAULTS.get(number, _FAULTS[""]):
            for load in LOADS:
                for budget_ms in BUDGETS_MS:
                    acts, end = fault(number)
                    row = Row(
                        f"{number}{next(letters)}",
                        f"{whose} {how}; budgets of {budget_ms} ms at {load:g} of the knee",
                        acts,  # type: ignore[arg-type]
                        end,  # type: ignore[arg-type]
                        during_s=during_s,
                        load=load,
                        changes=8,
                        budget_ms=budget_ms,
                    )
                    is_quick = budget_ms == _SECOND_MS and load == LOADS[0]
                    trials.append(
                        Trial(row, _checks(number, budget_ms), quick=is_quick, foreign=number == "32")  # type: ignore[arg-type]
                    )
    return trials


TRIALS: Final = tuple(_trials())
