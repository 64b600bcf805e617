"""Not every attached worker may begin a batch: reserve, slow start, limited concurrency. Virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from cloud_pool.core.health.slow_start import WARM_S
from cloud_pool.core.health.standby import Standby
from tests.cloud_pool.models import TEXT, manifest_of
from tests.cloud_pool.scheduling.test_several_workers import Pool, pool
from tests.cloud_pool.workers_support import text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import FakeWorker
from tests.support.pool.lane_pool import RESTART_S, by
from tidegate import clock
from tidegate.workers.process import EngineSpec


async def add(subject: Pool, name: str, *, standby: bool = False) -> FakeWorker:
    worker = FakeWorker(name, service_s=subject.workers["a"].service_s)
    await worker.__aenter__()
    for spec in subject.workers["a"].loaded.values():
        await worker.load(EngineSpec(spec.key, "onnx", spec.artefact, ()))
    subject.workers[name] = worker
    subject.scheduler.attach(name, by(worker), restart_s=RESTART_S, standby=standby)
    return worker


class TestReserve:
    @on_virtual_time
    async def test_it_rests_while_the_others_do_it_and_helps_when_the_wait_is_long(self) -> None:
        async with pool("a") as subject:
            subject.scheduler.seats.standby = Standby(wait_s=1.0, calm_s=30.0)
            reserve = await add(subject, "s", standby=True)
            with capture_logs() as logs:
                for _ in range(5):
                    await subject.ask(text(10))
                assert reserve.begun == []
                await asyncio.gather(*[subject.ask(text(50)) for _ in range(10)])
            assert reserve.begun != []
            assert [entry["event"] for entry in logs] == ["reserve called in"]
            assert logs[0]["reason"].startswith("wait of ")

    @on_virtual_time
    async def test_it_helps_at_once_when_a_worker_is_out_and_rests_again_when_that_is_back(self) -> None:
        async with pool("a") as subject:
            subject.scheduler.seats.standby = Standby(wait_s=1.0, calm_s=30.0)
            subject.scheduler.seats.expected = 1
            reserve = await add(subject, "s", standby=True)
            with capture_logs() as logs:
                subject.scheduler.detach("a", "gone")
                await subject.ask(text(10), budget_s=1.0)
                assert len(reserve.begun) == 1
                await add(subject, "b")
                await clock.sleep(31.0)
                await subject.ask(text(10))
                await subject.ask(text(10))
            assert len(reserve.begun) == 1
            assert [entry["event"] for entry in logs] == ["reserve called in", "reserve rests again"]

    @on_virtual_time
    async def test_a_predicted_wait_counts_on_it_only_while_it_helps(self) -> None:
        async with pool("a") as subject:
            subject.scheduler.seats.standby = Standby(wait_s=1e9)
            await add(subject, "s", standby=True)
            running = [subject.ask(text(90)), subject.ask(text(90))]
            await settle()
            assert subject.scheduler.queue_delay_s(clock.now()) > 0.9
            await asyncio.gather(*running)


class TestSlowStart:
    @on_virtual_time
    async def test_who_has_just_come_takes_a_growing_share_beside_others(self) -> None:
        async with pool("a") as subject:
            await clock.sleep(WARM_S)
            fresh = await add(subject, "b")
            shares = []
            for _ in range(4):
                before = len(subject.workers["a"].begun), len(fresh.begun)
                ends_at = clock.now() + 5.0
                while clock.now() < ends_at:
                    await asyncio.gather(subject.ask(text(10)), clock.sleep(0.01), subject.ask(text(30)))
                done = len(subject.workers["a"].begun) - before[0], len(fresh.begun) - before[1]
                shares.append(done[1] / sum(done))
            assert shares[0] < 0.4
            assert shares[-1] == pytest.approx(0.5, abs=0.1)

    @on_virtual_time
    async def test_who_comes_alone_or_with_all_others_takes_everything(self) -> None:
        async with pool("ab") as subject:
            callers = [subject.ask(text(50)) for _ in range(4)]
            await asyncio.gather(*callers)
            subject.scheduler.detach("b", "gone")
            began_at = clock.now()
            for _ in range(5):
                await subject.ask(text(10))
            assert clock.now() - began_at == pytest.approx(5 * 0.2)


@on_virtual_time
async def test_where_memory_is_short_fewer_compute_at_once() -> None:
    async with pool("ab") as subject:
        subject.scheduler.seats.most_at_once = 1
        callers = [subject.ask(text(50))]
        await settle()
        callers.append(subject.ask(text(50)))
        await settle()
        assert [len(subject.batches(name)) for name in "ab"] == [1, 0]
        await asyncio.gather(*callers)


@on_virtual_time
async def test_capped_batches_hold_fewer_rows_also_in_queues_of_one_worker() -> None:
    async with pool("a") as subject:
        subject.scheduler.queues.cap_batches(0.25)
        callers = [subject.ask(text(10))]
        await settle()
        callers += [subject.ask(text(10)) for _ in range(4)] + [subject.ask(text(10), worker="a") for _ in range(2)]
        await asyncio.gather(*callers)
        assert max(subject.batches("a")) == 2
        subject.scheduler.queues.cap_batches(1.0)
        callers = [subject.ask(text(10))]
        await settle()
        await asyncio.gather(*callers, *[subject.ask(text(10)) for _ in range(4)])
        assert max(subject.batches("a")) == 4


@on_virtual_time
async def test_where_few_compute_at_once_who_has_nothing_to_do_takes_nobodys_turn() -> None:
    async with pool("ab") as subject:
        subject.scheduler.seats.most_at_once = 1
        await subject.ask(text(10), worker="b", budget_s=1.0)
        assert len(subject.batches("b")) == 1, "a has idled for longer, but it may not have what is b's"


@on_virtual_time
async def test_who_is_let_in_again_begins_at_once() -> None:
    async with pool("ab") as subject:
        subject.scheduler.seats.most_at_once = 1
        callers = [subject.ask(text(50), worker=name) for name in "ab"]
        await settle()
        assert subject.batches("b") == []
        subject.scheduler.seats.most_at_once = 2
        subject.scheduler.look()
        await settle()
        assert subject.batches("b") == [1]
        await asyncio.gather(*callers)


@on_virtual_time
async def test_a_batch_that_is_due_while_no_worker_may_begin_it_causes_no_busy_loop() -> None:
    delayed = msgspec.structs.replace(TEXT.batching, max_queue_delay_s=0.05, policy="window")
    async with pool("ab", manifest_of(batching=delayed)) as subject:
        subject.scheduler.seats.most_at_once = 1
        loop, looks = asyncio.get_running_loop(), list[float]()
        call_at = loop.call_at

        def counted(when: float, *more: Any, **keys: Any) -> asyncio.TimerHandle:
            looks.append(when)
            return call_at(when if len(looks) < 100 else when + 1.0, *more, **keys)  # or it would go on for ever

        loop.call_at = counted  # type: ignore[method-assign]
        callers = [subject.ask(text(50)), subject.ask(text(50, fill=2), worker="a")]
        await asyncio.gather(*callers, subject.ask(text(50), worker="b"))
        assert len(looks) < 100
