"""The batch that is sent a moment before the running one ends: when there is one, and what may still happen to it."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from cloud_pool.core.health.watchdog import FLOOR_S
from cloud_pool.scheduling.job import PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from tests.cloud_pool.scheduling.test_several_workers import pool as several
from tests.cloud_pool.workers_support import Arrays, text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import BAD_ID
from tests.support.pool.lane_pool import WORKER, by, pool, total
from tidegate import clock
from tidegate.workers.process import ComputeResult, WorkerDied


def has_prepared(scheduler: PoolScheduler) -> bool:
    return any(seat.prepared is not None for seat in scheduler.seats)


@on_virtual_time
async def test_it_is_sent_shortly_before_the_end_if_more_wait_than_it_holds() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(10))]
        await settle()
        callers += [subject.ask(text(10)) for _ in range(14)]
        await clock.sleep(0.1)
        assert not has_prepared(subject.scheduler), "it is formed late"
        await clock.sleep(0.09)
        assert has_prepared(subject.scheduler)
        assert subject.scheduler.in_flight == 1 + 8
        assert "one prepared" in repr(next(iter(subject.scheduler.seats)))
        await asyncio.gather(*callers)
        assert subject.batches == [1, 8, 6]


@on_virtual_time
async def test_it_is_not_while_a_new_arrival_could_still_join_it() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(10))]
        await settle()
        callers += [subject.ask(text(10)) for _ in range(3)]
        await clock.sleep(0.199)
        assert not has_prepared(subject.scheduler)
        callers.append(subject.ask(text(10)))
        await asyncio.gather(*callers)
        assert subject.batches == [1, 4]


@on_virtual_time
async def test_its_time_counts_from_the_end_of_the_one_before() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(10))]
        await settle()
        callers += [subject.ask(text(10)) for _ in range(12)]
        answers = await asyncio.gather(*callers)
        assert answers[1].queue_s == pytest.approx(0.2)
        assert subject.lane.service.coefficients == pytest.approx((1.0, 1.0, 0.0), abs=1e-6)
        (seat,) = subject.scheduler.seats
        assert [seen.took_s for seen in seat.take_seen()] == pytest.approx([0.2, 0.9, 0.5])
        assert seat.busy_s == pytest.approx(1.6)


@on_virtual_time
async def test_who_leaves_it_is_never_computed_if_all_have_left() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        callers = [subject.ask(text(10, fill=7)) for _ in range(12)]
        await clock.sleep(0.19)
        assert has_prepared(subject.scheduler)
        for caller in callers:
            caller.cancel()
        await settle()
        assert not has_prepared(subject.scheduler)
        await first
        assert total(await subject.ask(text(10, fill=8))) == 80.0
        assert not any((inputs["ids"] == 7).any() for inputs in subject.worker.begun)


@on_virtual_time
async def test_all_may_leave_in_the_very_moment_in_which_it_is_formed() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        callers = [subject.ask(text(10, fill=7)) for _ in range(12)]
        await settle()
        (seat,) = subject.scheduler.seats
        assert seat.prepare_at is not None

        def all_leave() -> None:
            for caller in callers:
                caller.cancel()

        asyncio.get_running_loop().call_at(seat.prepare_at, all_leave)
        await first
        await settle()
        assert subject.scheduler.in_flight == 0, "the seat of a batch whose run never took its first step is free"
        assert total(await subject.ask(text(10, fill=8))) == 80.0


@on_virtual_time
async def test_its_patience_begins_when_that_with_the_one_before_is_over() -> None:
    async with pool() as subject:
        until: list[float] = []

        async def compute(key: str, inputs: Arrays, patience_s: float) -> ComputeResult:
            until.append(clock.now() + patience_s)
            return await subject.worker.infer(key, inputs)

        subject.scheduler.detach(WORKER, "not now")
        subject.scheduler.attach("a", compute, restart_s=1.0)
        callers = [subject.ask(text(1))]
        await settle()
        callers += [subject.ask(text(1)) for _ in range(12)]
        await clock.sleep(0.1085)
        assert has_prepared(subject.scheduler)
        assert until[1] >= until[0] + FLOOR_S, "a first that takes 1.9 s would leave a second 0.1 s of its own"
        await asyncio.gather(*callers)


@on_virtual_time
async def test_the_end_of_the_worker_is_not_held_against_its_members() -> None:
    async with several() as subject:
        subject.scheduler.detach("b", "not now")
        first = subject.ask(text(10))
        await settle()
        callers = [subject.ask(text(10, fill=n)) for n in range(1, 13)]
        await clock.sleep(0.19)
        assert has_prepared(subject.scheduler)
        with capture_logs() as logs:
            subject.workers["a"].kill()
            await settle()
        assert [entry["members"] for entry in logs] == [1], "only the one that ran is suspect"
        subject.scheduler.attach("b", by(subject.workers["b"]), restart_s=1.0)
        answers = await asyncio.gather(first, *callers)
        assert all(isinstance(answer, PoolResult) for answer in answers)
        assert sorted(subject.batches("b")) == [1, 4, 8]


@on_virtual_time
async def test_one_that_fails_while_another_is_prepared_is_searched_all_the_same() -> None:
    async with pool() as subject:
        first = subject.ask(text(10))
        await settle()
        callers = [subject.ask(text(10, fill=BAD_ID if n == 3 else n)) for n in range(16)]
        with capture_logs():
            results = await asyncio.gather(first, *callers, return_exceptions=True)
        assert sum(isinstance(result, PoolResult) for result in results) == 16
        assert subject.scheduler.queued == subject.scheduler.in_flight == 0


@on_virtual_time
async def test_without_any_worker_who_was_in_it_and_cannot_wait_is_refused() -> None:
    async with pool() as subject:
        callers = [subject.ask(text(10), budget_s=60.0)]
        await settle()
        callers += [subject.ask(text(10), budget_s=2.5 + n % 2 * 60.0) for n in range(12)]
        await clock.sleep(0.19)
        assert has_prepared(subject.scheduler)
        with capture_logs():
            subject.worker.kill()
            await settle(10)
        refused = [caller for caller in callers if caller.done()]
        assert len(refused) == 6
        for caller in refused:
            with pytest.raises(WorkerDied):
                await caller
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
