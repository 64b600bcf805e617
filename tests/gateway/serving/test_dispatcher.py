"""The dispatcher on virtual time: what the machine decides is performed; tasks, timers and counts are given back."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from msgspec.structs import replace

from gateway.core.fleet.attestation import Attestation
from gateway.core.fleet.link_events import LinkAttested, LinkDown
from gateway.core.health.breaker import BreakerState
from gateway.core.history.recorder import AnswerRecord
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Decision
from tests.support.gateway.conductor import FP32, INT8, Scene, target
from tests.support.gateway.fleets import variant
from tests.support.loop import elapsed, on_virtual_time, settle
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, InternalError, NothingAlive, Overloaded, ServeError, Unreachable
from tidegate.types import Accepted, LoadReport


@on_virtual_time
async def test_the_first_attempt_answers_and_teaches_the_estimators() -> None:
    edge = target("edge_a")
    edge.load = LoadReport(1, 1, 3, 1, 0.2)
    scene = Scene({"edge_a": (edge, INT8), "pool_main": (target("pool_main"), FP32)})

    reply, took_s = await elapsed(scene.dispatcher.infer(scene.call()))

    assert took_s == pytest.approx(0.010)
    assert reply.route is not None
    assert (reply.route.served_by, reply.route.reason, reply.route.variant) == ("edge/a", "cheapest", "int8")
    assert reply.stages["link"] == pytest.approx(0.003)
    assert (reply.stages["queue"], reply.stages["compute"]) == (0.001, 0.006)
    assert reply.budget_left_s == pytest.approx(0.99)
    assert reply.load is None, "a target's load is not the gateway's"
    assert scene.fleet.targets["edge/a"].queue_estimate.load == edge.load
    assert edge.seen[0][0].model_version == "1", "the version is settled before it is sent"
    assert edge.seen[0][1:] == ("int8", pytest.approx(1.0))
    scene.assert_at_rest()


@on_virtual_time
async def test_a_failure_is_answered_by_the_next_target_within_the_same_budget() -> None:
    edge = target("edge_a", takes_s=0.2, error=Overloaded("full"))
    pool = target("pool_main")
    scene = Scene({"edge_a": (edge, INT8), "pool_main": (pool, FP32)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.route.reason, reply.route.fallback, reply.route.attempts) == ("fallback", True, 2)
    assert pool.seen[0][2] == pytest.approx(0.8), "what is left, not a fresh budget"
    scene.assert_at_rest()


@on_virtual_time
async def test_a_hedge_wins_over_a_silent_target_and_the_loser_is_cancelled() -> None:
    silent = target("edge_a", takes_s=60.0)
    scene = Scene({"edge_a": (silent, INT8), "pool_main": (target("pool_main"), FP32)})

    reply, took_s = await elapsed(scene.dispatcher.infer(scene.call()))

    assert 0.8 < took_s < 1.0
    assert reply.route is not None
    assert (reply.route.served_by, reply.route.hedged, reply.route.attempts) == ("pool/main", True, 2)
    await settle()
    assert silent.cancelled == 1
    scene.assert_at_rest()


@on_virtual_time
async def test_the_first_attempt_may_still_win_beside_its_hedge() -> None:
    slow, pool = target("edge_a", takes_s=0.95), target("pool_main", takes_s=0.5)
    scene = Scene({"edge_a": (slow, INT8), "pool_main": (pool, FP32)})

    reply, took_s = await elapsed(scene.dispatcher.infer(scene.call()))

    assert took_s == pytest.approx(0.95)
    assert reply.route is not None
    assert (reply.route.served_by, reply.route.reason, reply.route.hedged) == ("edge/a", "cheapest", True)
    await settle()
    assert pool.cancelled == 1
    scene.assert_at_rest()


@on_virtual_time
async def test_an_error_waits_for_the_hedge_that_is_under_way() -> None:
    dying = target("edge_a", takes_s=0.95, error=Unreachable("gone"))
    scene = Scene({"edge_a": (dying, INT8), "pool_main": (target("pool_main", takes_s=0.06), FP32)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.hedged) == ("pool/main", True)
    await settle()
    scene.assert_at_rest()


@on_virtual_time
async def test_when_first_and_hedge_fail_the_third_target_is_awaited() -> None:
    dying = target("edge_a", takes_s=0.95, error=Unreachable("gone"))
    also = target("edge_b", takes_s=0.02, error=Unreachable("gone too"))
    last = target("edge_c", takes_s=0.01)
    scene = Scene({"edge_a": (dying, INT8), "edge_b": (also, variant("int8", compute_s=0.08)), "edge_c": (last, INT8)})
    for _ in range(8):
        scene.fleet.targets["edge/c"].link.record(0.12, clock.now())

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.attempts) == ("edge/c", 3)
    scene.assert_at_rest()


@on_virtual_time
async def test_the_deadline_ends_a_silent_request_in_time() -> None:
    silent = target("pool_main", takes_s=60.0, ignores_budget=True)  # so that the gateway's timer has to end it
    scene = Scene({"pool_main": (silent, FP32)})
    call = scene.call(budget_s=0.5)

    with pytest.raises(DeadlineExceeded):
        await scene.dispatcher.infer(call)

    assert clock.now() == pytest.approx(call.deadline)
    assert silent.cancelled == 1
    scene.assert_at_rest()


@on_virtual_time
async def test_every_attempt_is_cancelled_when_its_caller_leaves() -> None:
    edge, pool = target("edge_a", takes_s=60.0), target("pool_main", takes_s=60.0)
    scene = Scene({"edge_a": (edge, INT8), "pool_main": (pool, FP32)})
    asking = asyncio.create_task(scene.dispatcher.infer(scene.call()))
    await clock.sleep(0.97)
    assert (edge.under_way, pool.under_way) == (1, 1)

    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await settle()

    assert asking.cancelled()
    assert (edge.cancelled, pool.cancelled) == (1, 1)
    scene.assert_at_rest()


@on_virtual_time
async def test_a_caller_that_leaves_in_the_instant_of_the_deadline_is_cancelled_and_not_answered() -> None:
    scene = Scene({"pool_main": (target("pool_main", takes_s=60.0, ignores_budget=True), FP32)})
    call = scene.call(budget_s=0.5)
    asking = asyncio.create_task(scene.dispatcher.infer(call))
    await settle()
    assert call.deadline is not None
    asyncio.get_running_loop().call_at(call.deadline, asking.cancel)

    await asyncio.gather(asking, return_exceptions=True)

    assert asking.cancelled()
    scene.assert_at_rest()


@on_virtual_time
async def test_an_outer_timeout_still_works_around_it() -> None:
    scene = Scene({"pool_main": (target("pool_main", takes_s=0.9), FP32)})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await scene.dispatcher.infer(scene.call())
    await settle()
    scene.assert_at_rest()


@on_virtual_time
async def test_a_defect_in_a_target_is_logged_and_the_request_goes_on_elsewhere() -> None:
    broken = target("edge_a", error=KeyError("oops"))
    scene = Scene({"edge_a": (broken, INT8), "pool_main": (target("pool_main"), FP32)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert reply.route.fallback
    scene.assert_at_rest()


@on_virtual_time
async def test_a_target_that_left_between_placing_and_sending_is_a_failure_like_any() -> None:
    scene = Scene({"pool_main": (target("pool_main"), FP32)})
    scene.targets.clear()
    with pytest.raises(NothingAlive, match="pool/main: pool/main has just left"):
        await scene.dispatcher.infer(scene.call())


@on_virtual_time
async def test_a_target_that_keeps_failing_is_no_longer_asked() -> None:
    failing = target("edge_a", error=InternalError("crashed"))
    scene = Scene({"edge_a": (failing, INT8), "pool_main": (target("pool_main"), FP32)})
    for _ in range(8):
        await scene.dispatcher.infer(scene.call())
    assert len(failing.seen) == 5
    assert scene.fleet.targets["edge/a"].breaker.state is BreakerState.OPEN


@on_virtual_time
async def test_a_promise_keeps_the_hedge_back() -> None:
    slow, pool = target("edge_a", takes_s=0.95), target("pool_main")
    slow.promise = Accepted(queue_ahead=9, finish_in_s=0.96)
    scene = Scene({"edge_a": (slow, INT8), "pool_main": (pool, FP32)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.hedged) == ("edge/a", False)
    assert pool.seen == []


@on_virtual_time
async def test_finished_requests_are_remembered_without_their_tensors() -> None:
    scene = Scene({"edge_a": (target("edge_a"), INT8)})
    await scene.dispatcher.infer(scene.call())
    scene.targets["edge/a"].error = Overloaded("full")
    with pytest.raises(Overloaded):
        await scene.dispatcher.infer(scene.call())

    answered, refused = scene.dispatcher.recorder
    assert isinstance(answered.end, AnswerRecord)
    assert refused.end == "overloaded: edge/a: full"
    assert answered.request_id == "7"
    assert answered.elapsed_s == pytest.approx(0.010)


@on_virtual_time
async def test_the_work_of_a_call_is_described_on_demand() -> None:
    scene = Scene({"edge_a": (target("edge_a"), INT8), "pool_main": (target("pool_main"), FP32)})
    said = scene.dispatcher.ask_builder.describe(scene.call(budget_s=1.0))
    assert (said.feature, said.units, said.cost_class, said.budget_s) == ("tokens", 4.0, "cheap", 1.0)


@on_virtual_time
async def test_many_requests_at_once_with_random_faults_leave_nothing_behind() -> None:
    scene = Scene(
        {
            "edge_a": (target("edge_a", takes_s=0.3), INT8),
            "edge_b": (target("edge_b", takes_s=5.0), INT8),
            "pool_main": (target("pool_main", takes_s=0.2, error=Unreachable("flaky")), FP32),
        }
    )

    async def one(number: int) -> str:
        try:
            await asyncio.wait_for(
                scene.dispatcher.infer(scene.call(budget_s=0.2 + number % 7 / 10)), 0.1 + number % 5 / 5
            )
        except ServeError as error:
            return error.code
        except TimeoutError:
            return "left"
        return "ok"

    ends = await asyncio.gather(*(one(number) for number in range(300)))
    await clock.sleep(10.0)

    assert {"ok", "left", "deadline_exceeded"} <= set(ends)
    scene.assert_at_rest()
    await scene.dispatcher.close()


class Fickle:
    """Places well, and the evidence of whom it chose ends in the very next moment, before anything is sent."""

    def __init__(self, scene: Scene, keeps: str = "") -> None:
        self._scene = scene
        self._keeps = keeps

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        decision = self._scene.dispatcher.placer.decide(ask, now, exclude)
        if decision.chosen is not None and decision.chosen.target.id != self._keeps:
            self._scene.fleet.fold(LinkAttested(decision.chosen.target.id, Attestation("revoked")), now)
        return decision


@pytest.mark.parametrize(("keeps", "served_by"), [("", None), ("pool/main", "pool/main")])
def test_evidence_that_ends_between_the_choice_and_the_launch_keeps_the_request_from_there(
    keeps: str, served_by: str | None
) -> None:
    @on_virtual_time
    async def scenario() -> None:
        edge, pool = target("edge_a"), target("pool_main")
        scene = Scene({"edge_a": (edge, INT8), "pool_main": (pool, FP32)})
        for target_id in scene.targets:
            scene.fleet.fold(
                LinkAttested(target_id, Attestation("", clock.now() + 9.0, "software", target_id, 0.0)), clock.now()
            )
        scene.dispatcher.placement = Fickle(scene, keeps)
        call = replace(scene.call(), attested=True)
        if served_by is None:
            with pytest.raises(ServeError, match="edge/a is attested no more: revoked"):
                await scene.dispatcher.infer(call)
            assert pool.seen == []
        else:
            reply = await scene.dispatcher.infer(call)
            assert reply.route is not None and reply.route.served_by == served_by
            assert reply.attested == "software; key=pool/main; expires=1970-01-01T00:00:00Z"
        assert edge.seen == []
        scene.assert_at_rest()

    scenario()


@on_virtual_time
async def test_how_many_rows_a_call_may_have_is_told_by_what_is_there() -> None:
    small = variant("int8", max_batch=4)
    scene = Scene({"edge_a": (target("edge_a"), small), "pool_main": (target("pool_main"), FP32)})
    call = scene.call()
    assert scene.dispatcher.most_rows(call, 32) == 32
    assert scene.dispatcher.most_rows(replace(call, pin="edge", deadline=None), 32) == 4
    scene.fleet.fold(LinkDown("pool/main", "away"), clock.now())
    assert scene.dispatcher.most_rows(call, 32) == 4
    scene.fleet.fold(LinkDown("edge/a", "away"), clock.now())
    assert scene.dispatcher.most_rows(call, 32) is None
    scene.assert_at_rest()
