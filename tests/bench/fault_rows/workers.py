"""Rows 11, 19 and 20: the pool says no to everything; its worker crashes; its worker hangs."""

from __future__ import annotations

import signal
from typing import Final

import psutil

from tests.bench.fault_rows.links import POOL
from tests.bench.fault_rows.trial import Check, Trial, milliseconds, points
from tests.support.faults.matrix import Act, Matrix, Row
from tests.support.faults.matrix_seen import Seen

MODULES: Final = {"pool": "tests.support.pool.odd_pool"}
_ONLY_POOL: Final = 512  # units that no edge takes more of
_SETTLED_S: Final = 0.2


def worker_of(matrix: Matrix) -> psutil.Process:
    (worker,) = matrix.fleet.part("pool").everyone()[1:]
    return worker


def _refusing(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: matrix.fleet.part("pool").signal(signal.SIGUSR1))]


def _willing(matrix: Matrix) -> None:
    matrix.fleet.part("pool").signal(signal.SIGUSR1)


def _checks_refusing(seen: Seen) -> list[Check]:
    states = {state for look in seen.looks for state, _ in look.states.values()}
    usual = seen.launch_share(POOL, seen.phases[0], seen.broken_at)
    moved_s = _moved_after(seen, 0.25 * usual)
    feasible = seen.in_time_of_feasible(seen.broken_at, seen.healed_at, _ONLY_POOL)
    return [
        Check("load_moved_ms", milliseconds(moved_s), "<=", 200.0),
        Check("targets_ejected", len(states - {"ready"}), "<=", 0),
        Check("edge_feasible_percent", points(feasible), ">=", 90.0),
        Check("used_again_s", seen.served_again_after(POOL), "<=", 1.0),
    ]


def _moved_after(seen: Seen, share: float) -> float | None:
    """How long after the first refusal until the pool gets at most this share of what an edge could take as well."""
    refused = sorted(one.at for one in seen.steps("failed") if one.target == POOL and one.at >= seen.broken_at)
    if not refused:
        return None
    optional = {flight.number for flight in seen.flights if flight.units <= _ONLY_POOL}
    sent = [
        (step.at, step.target == POOL)
        for flight in seen.flights
        for step in flight.steps
        if step.what == "launched" and flight.number in optional and refused[0] < step.at < seen.healed_at
    ]
    for turn in range(40):
        since = [at_pool for at, at_pool in sent if at >= refused[0] + turn / 40.0]
        if since and sum(since) <= share * len(since):
            return turn / 40.0
    return None


def _crash(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: worker_of(matrix).send_signal(signal.SIGKILL))]


def _hang(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: worker_of(matrix).send_signal(signal.SIGSTOP))]


def _checks_replaced(seen: Seen) -> list[Check]:
    optional = seen.during.where(lambda one: one.units <= _ONLY_POOL)
    return [
        Check("replaced_s", _replaced_s(seen), "<=", 10.0),
        Check("edge_feasible_percent", points(optional.attainment()), ">=", 90.0),
        Check("most_attempts_of_one_request", _most_attempts(seen), "<=", 3),
    ]


def _replaced_s(seen: Seen) -> float | None:
    """When the pool gave its first answer to a request that was sent after the fault."""
    at = [
        step.at
        for flight in seen.flights
        if flight.at >= seen.broken_at + _SETTLED_S
        for step in flight.steps
        if step.what == "answered" and step.target == POOL
    ]
    return min(at) - seen.broken_at if at else None


def _most_attempts(seen: Seen) -> int:
    return max(sum(step.what == "launched" for step in flight.steps) for flight in seen.flights)


TRIALS: Final = (
    Trial(Row("11", "the pool says no for 1 s", _refusing, _willing, during_s=1.0, recover_s=0.5), _checks_refusing),
    Trial(Row("19", "the pool's worker crashes", _crash, during_s=8.0, changes=2), _checks_replaced),
    Trial(Row("20", "the pool's worker hangs", _hang, during_s=10.0, changes=2), _checks_replaced),
)
