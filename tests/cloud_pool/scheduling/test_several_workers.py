"""Several workers share one queue, and the end of one does not harm the others. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from tests.cloud_pool.models import TEXT
from tests.cloud_pool.workers_support import Arrays, text
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.pool.fake_worker import BAD_ID, FakeWorker
from tests.support.pool.lane_pool import COST, KEY, RESTART_S, by, service_s, total
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.outcome import InternalError
from tidegate.types import Accepted
from tidegate.workers.process import EngineSpec, WorkerDied


class Pool:
    """A scheduler with one lane over fake workers "a", "b", …"""

    def __init__(self, scheduler: PoolScheduler, workers: dict[str, FakeWorker], lane: ModelInstance) -> None:
        self.scheduler, self.workers, self.lane = scheduler, workers, lane

    def ask(self, arrays: Arrays, *, budget_s: float = 100.0, **more: Any) -> asyncio.Task[PoolResult]:
        now = clock.now()
        ask = PoolRequest(arrays, float(arrays["ids"].size), now, now + budget_s, **more)
        return asyncio.create_task(self.scheduler.submit(KEY, ask))

    def batches(self, name: str) -> list[int]:
        return [len(inputs["ids"]) for inputs in self.workers[name].begun]


@asynccontextmanager
async def pool(names: str = "ab", manifest: Manifest = TEXT) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        workers = {name: await stack.enter_async_context(FakeWorker(name, service_s=service_s)) for name in names}
        scheduler = await stack.enter_async_context(PoolScheduler())
        lane = ModelInstance(KEY, manifest, manifest.variants[0], COST)
        scheduler.open(lane)
        for name, worker in workers.items():
            await worker.load(EngineSpec(KEY, "onnx", Path(__file__), ()))
            scheduler.attach(name, by(worker), restart_s=RESTART_S)
        yield Pool(scheduler, workers, lane)


@on_virtual_time
async def test_two_workers_compute_at_once() -> None:
    async with pool() as subject:
        first = subject.ask(text(90))
        await settle()
        second = subject.ask(text(90, fill=2))
        answers, took_s = await elapsed(asyncio.gather(first, second))
        assert took_s == pytest.approx(1.0)
        assert {answer.worker for answer in answers} == {"a", "b"}


@on_virtual_time
async def test_who_is_free_takes_what_is_due_so_that_a_slow_worker_takes_less() -> None:
    async with pool() as subject:
        subject.workers["b"].service_s = lambda inputs: 4.0 * service_s(inputs)
        callers = []
        for _ in range(40):
            callers.append(subject.ask(text(10), budget_s=1000.0))
            await clock.sleep(0.2)
        await asyncio.gather(*callers)
        assert sum(subject.batches("a")) > 2 * sum(subject.batches("b")) > 0


@on_virtual_time
async def test_a_worker_that_dies_touches_only_its_own_batch_and_the_others_take_it_over() -> None:
    async with pool() as subject:
        first = subject.ask(text(90))
        await settle()
        second = subject.ask(text(90, fill=2))
        await settle()
        with capture_logs():
            subject.workers["a"].kill()
            answers, took_s = await elapsed(asyncio.gather(first, second))
        assert [total(answer) for answer in answers] == [90.0, 180.0]
        assert took_s == pytest.approx(2.0), "b ended its own batch and then computed that of a"
        assert len(subject.workers["b"].begun) == 2


@on_virtual_time
async def test_while_one_is_left_no_request_is_refused_for_the_death_of_another() -> None:
    async with pool() as subject:
        long = [subject.ask(text(90, fill=n)) for n in (1,)]
        await settle()
        long.append(subject.ask(text(90, fill=2)))
        await settle()
        hurried = subject.ask(text(10, fill=3), budget_s=RESTART_S - 0.5)
        await settle()
        with capture_logs():
            subject.workers["a"].kill()
            await settle()
        assert total(await hurried) == 30.0
        await asyncio.gather(*long)


@on_virtual_time
async def test_when_the_last_is_gone_those_who_cannot_wait_are_refused() -> None:
    async with pool() as subject:
        for name in "ab":
            subject.scheduler.detach(name, f"{name} is gone")
        with pytest.raises(WorkerDied, match="b is gone"):
            await subject.ask(text(10), budget_s=1.0)


@on_virtual_time
async def test_a_poisoned_batch_on_one_worker_leaves_the_other_alone() -> None:
    async with pool() as subject:
        good = subject.ask(text(90))
        await settle()
        bad = subject.ask(text(10, fill=BAD_ID))
        with pytest.raises(InternalError):
            await bad
        assert total(await good) == 90.0
        assert len(subject.scheduler.seats) == 2


@on_virtual_time
async def test_a_retiring_worker_ends_its_batch_and_gets_no_other() -> None:
    async with pool() as subject:
        running = subject.ask(text(90))
        await settle()
        retired = asyncio.create_task(subject.scheduler.retire("a"))
        await settle()
        assert not retired.done()
        others = [subject.ask(text(10)) for _ in range(3)]
        await asyncio.gather(running, retired, *others)
        assert (len(subject.batches("a")), sum(subject.batches("b"))) == (1, 3)
        await subject.scheduler.retire("a")
        await subject.scheduler.retire("nobody")


@on_virtual_time
async def test_a_predicted_wait_counts_on_all_workers() -> None:
    async with pool() as subject:
        heard: list[Accepted] = []
        running = [subject.ask(text(90))]
        await settle()
        running.append(subject.ask(text(40)))
        await settle()
        waiting = subject.ask(text(10, fill=2), budget_s=20.0)
        await settle()
        last = subject.ask(text(20), on_accepted=heard.append)
        await settle()
        assert heard == [Accepted(queue_ahead=3, finish_in_s=pytest.approx(0.5 + 0.2 / 2 + 0.3))]
        assert subject.scheduler.queue_delay_s(clock.now()) == pytest.approx(0.5 + (0.2 + 0.3) / 2)
        await asyncio.gather(*running, waiting, last)


class TestBound:
    @on_virtual_time
    async def test_it_waits_for_its_own_worker_and_lets_others_pass(self) -> None:
        async with pool() as subject:
            running = subject.ask(text(90), worker="a")
            await settle()
            bound = subject.ask(text(10, fill=2), worker="a", budget_s=50.0)
            free = subject.ask(text(10, fill=3))
            assert (await free).worker == "b"
            assert not bound.done()
            assert (await bound).worker == "a"
            await running

    @on_virtual_time
    async def test_it_is_refused_when_its_worker_is_gone(self) -> None:
        async with pool() as subject:
            running = subject.ask(text(90), worker="a")
            await settle()
            waiting = subject.ask(text(10), worker="a")
            await settle()
            subject.workers["a"].kill()
            failures = await asyncio.gather(running, waiting, return_exceptions=True)
            assert [type(failure) for failure in failures] == [WorkerDied, WorkerDied]
            with pytest.raises(WorkerDied, match="worker a is gone"):
                await subject.ask(text(10), worker="a")
            assert subject.scheduler.queued == 0
