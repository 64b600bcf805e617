"""The fault matrix's short form: broker, callers, the pool's worker, placement and the gateway fail under load.

Behaviour and accounts, not speed: every request ends once and as documented, what broke is mended, logs say a change
once, and nothing is left under way. The acceptance numbers are judged by `python -m tests.bench.faults`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.bench.fault_rows import broker, callers, lives, stalls, workers
from tests.bench.fault_rows.trial import Trial
from tests.bench.faults import MODULES
from tests.bench.open_loop import LEFT
from tests.e2e.stack import eventually
from tests.support.faults.matrix import Matrix
from tests.support.faults.matrix_seen import DOCUMENTED, Seen
from tests.support.gateway.casts import paced
from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.pool.far_queue import CALLERS, SHAPE, freed_after_s
from tests.support.pool.work_done import computed

CONNECTED = "connected to the broker"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(tmp_path_factory.mktemp("matrix"), partial(paced, edges=3), modules=MODULES) as running:
        yield running


def short(matrix: Matrix, trial: Trial, *, during_s: float = 2.0, after_s: float = 1.0, load: float = 0.5) -> Seen:
    row = replace(trial.row, before_s=1.2, during_s=during_s, after_s=after_s, recover_s=0.0, load=load)
    seen = matrix.run(row)
    eventually(lambda: idle(matrix), 30.0, "nothing is under way")
    return seen


def serves(matrix: Matrix) -> bool:
    return any(one.status == 200 for one in matrix.calm().answers)


def idle(matrix: Matrix) -> bool:
    return not any(one["in_flight"] for one in matrix.fleet.targets().values())


def assert_accounted(seen: Seen, *allowed: int) -> None:
    assert seen.unaccounted == 0, f"{seen.counted} of {len(seen.answers)}"
    assert set(seen.during.statuses()) <= DOCUMENTED | set(allowed)
    assert not seen.repeated_lines


def trial(of: tuple[Trial, ...], number: str) -> Trial:
    return next(one for one in of if one.row.number == number)


def test_without_its_broker_the_fleet_serves_and_nobody_is_taken_for_gone(matrix: Matrix) -> None:
    told = {name: part.log.count(CONNECTED) for name, part in matrix.fleet.parts.items()}
    seen = short(matrix, trial(broker.TRIALS, "12a"), during_s=1.0)
    assert_accounted(seen)
    devices = [matrix.fleet.part(name) for name in matrix.edges]
    eventually(lambda: all(one.log.count(CONNECTED) > told[one.name] for one in devices), 30.0, "all are connected")
    assert "down" not in {state for look in seen.looks for state, _ in look.states.values()}
    assert sum("no broker; trying again" in line for line in seen.logs["gateway"].splitlines()) == 1


def test_a_flood_on_the_broker_invents_nobody_and_stops_nobody(matrix: Matrix) -> None:
    seen = short(matrix, broker.flood(2.0))
    assert_accounted(seen)
    assert {target for look in seen.looks for target in look.states} == {
        "pool/pool",
        *map("edge/{}".format, matrix.edges),
    }
    assert seen.during.statuses()[200] > 0


def test_a_pool_whose_worker_is_killed_has_another_and_nobody_else_fails(matrix: Matrix) -> None:
    worker = workers.worker_of(matrix).pid
    seen = short(matrix, trial(workers.TRIALS, "19"), during_s=3.0)
    assert_accounted(seen)
    assert workers.worker_of(matrix).pid != worker
    lost = [line for line in seen.logs["pool"].splitlines() if "worker lost" in line]
    assert len(lost) == 1, "\n".join(lost)
    assert seen.after.served()["pool/pool"] > 0


def test_a_pool_that_says_no_is_not_taken_for_broken(matrix: Matrix) -> None:
    seen = short(matrix, trial(workers.TRIALS, "11"), during_s=1.0)
    assert_accounted(seen)
    assert {state for look in seen.looks for state, _ in look.states.values()} == {"ready"}


def test_callers_who_ask_again_and_again_do_not_multiply_the_work(matrix: Matrix) -> None:
    storm = trial(callers.TRIALS, "17")
    seen = short(matrix, replace(storm, row=replace(storm.row, step=10.0)), during_s=3.0)
    assert_accounted(seen)
    assert sum(one.tries for one in seen.answers) > len(seen.answers), "there was a storm"
    assert callers.amplification(seen) < 1.2


def test_callers_who_leave_or_loiter_leave_nothing_behind(matrix: Matrix) -> None:
    seen = short(matrix, trial(callers.TRIALS, "18"), load=0.6)
    assert_accounted(seen, LEFT)
    assert seen.counted["cancelled"] > 0


def test_whoever_leaves_frees_its_place_in_the_pools_queue(matrix: Matrix) -> None:
    matrix.fleet.restart_gateway()  # one that a storm has not just taught to let few in
    port = int(matrix.fleet.http.rpartition(":")[2])
    done = computed(matrix.fleet)
    asyncio.run(freed_after_s(port, matrix.fleet.part("pool").addresses["grpc"], matrix.cast.model))
    eventually(lambda: idle(matrix), 30.0, "nothing is under way")
    assert computed(matrix.fleet) - done <= (CALLERS - 2) * SHAPE[0], "what had not begun was not computed"


def test_where_placement_raises_requests_go_by_least_request(matrix: Matrix) -> None:
    seen = short(matrix, trial(lives.TRIALS, "22"))
    assert_accounted(seen)
    assert seen.during.statuses()[200] > 0.5 * len(seen.during)
    assert any(step.reason == "least-request" for step in seen.steps("launched"))
    assert seen.logs["gateway"].count("placement fails") == 1


def test_a_gateway_that_is_told_to_stop_answers_whoever_is_under_way(matrix: Matrix) -> None:
    seen = short(matrix, trial(lives.TRIALS, "23a"), during_s=3.0, load=1.2)
    under_way = lives.under_way(seen)
    assert under_way and set(under_way) == {200}
    eventually(lambda: serves(matrix), 60.0, "its successor serves")


def test_workers_drop_what_a_killed_gateway_had_asked_for(matrix: Matrix) -> None:
    seen = short(matrix, trial(lives.TRIALS, "23b"), during_s=3.0, load=1.2)
    cut = [one for one in seen.answers if one.status == 0 and one.at < seen.broken_at]
    assert all(one.at + one.latency_s < seen.broken_at + 10.0 for one in cut), "callers are told at once"
    eventually(lambda: serves(matrix), 60.0, "its successor serves")


@pytest.mark.parametrize("number", ["31b", "31h"], ids=["the agent is stopped", "its event loop is blocked"])
def test_an_agent_that_stands_still_on_a_whole_connection_costs_no_request_of_a_second(
    matrix: Matrix, number: str
) -> None:
    one = trial(stalls.TRIALS, number)
    seen = short(matrix, one, during_s=2.5, after_s=3.0, load=0.3)
    assert_accounted(seen)
    assert [answer for answer in seen.during.answers if answer.status != 200 or answer.latency_s > 1.0] == []
    assert len(seen.launches("edge/device-1", seen.broken_at)) > 0, "it was asked meanwhile, or afterwards"
    used_again_s = seen.served_again_after("edge/device-1")
    assert used_again_s is not None and used_again_s < 3.0
