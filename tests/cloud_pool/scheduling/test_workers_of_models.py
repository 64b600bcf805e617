"""Workers that hold one model each and share a place: one computes at a time, by the order of deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from tests.cloud_pool.models import TEXT
from tests.cloud_pool.workers_support import text
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.pool.fake_worker import FakeWorker
from tests.support.pool.lane_pool import COST, RESTART_S, by, service_s
from tidegate import clock
from tidegate.outcome import InternalError, Unreachable
from tidegate.workers.process import EngineSpec, WorkerDied


class Pool:
    def __init__(self, scheduler: PoolScheduler, workers: dict[str, FakeWorker]) -> None:
        self.scheduler, self.workers = scheduler, workers

    def ask(self, model: str, length: int = 90, *, budget_s: float = 100.0) -> asyncio.Task[PoolResult]:
        now = clock.now()
        ask = PoolRequest(text(length), float(length), now, now + budget_s)
        return asyncio.create_task(self.scheduler.submit(model, ask))


@asynccontextmanager
async def pool(*places: str) -> AsyncIterator[Pool]:
    """One worker for each "MODEL@PLACE"."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(PoolScheduler())
        workers = dict[str, FakeWorker]()
        for name in places:
            model, _, place = name.partition("@")
            worker = workers[name] = await stack.enter_async_context(FakeWorker(name, service_s=service_s))
            await worker.load(EngineSpec(model, "onnx", Path(__file__), ()))
            if model not in scheduler.queues:
                scheduler.open(ModelInstance(model, replace(TEXT, name=model), TEXT.variants[0], COST))
            lanes = frozenset({model})
            scheduler.attach(name, by(worker), restart_s=RESTART_S, lanes=lanes, place=place)
        yield Pool(scheduler, workers)


@on_virtual_time
async def test_of_the_workers_at_one_place_one_computes_at_a_time() -> None:
    async with pool("a@0", "b@0") as subject:
        _, took_s = await elapsed(asyncio.gather(subject.ask("a"), subject.ask("b")))
        assert took_s == pytest.approx(2.0)
        assert subject.scheduler.seats.width == 1


@on_virtual_time
async def test_workers_at_two_places_compute_at_once() -> None:
    async with pool("a@0", "b@0", "a@1", "b@1") as subject:
        _, took_s = await elapsed(asyncio.gather(subject.ask("a"), subject.ask("b")))
        assert took_s == pytest.approx(1.0)
        assert subject.scheduler.seats.width == 2


@on_virtual_time
async def test_the_model_whose_deadline_is_next_goes_first_whichever_worker_has_idled_longest() -> None:
    async with pool("a@0", "b@0", "c@0") as subject:
        first = subject.ask("a")
        await settle()
        later = subject.ask("b", budget_s=50.0)
        urgent = subject.ask("c", budget_s=5.0)
        await first
        await urgent
        assert not later.done()
        assert subject.scheduler.queue_delay_s(clock.now()) == pytest.approx(1.0, abs=0.1)
        await later


@on_virtual_time
async def test_a_model_without_a_worker_refuses_what_cannot_wait_though_others_have_theirs() -> None:
    async with pool("a@0", "b@0") as subject:
        running = subject.ask("a")
        await settle()
        with capture_logs():
            subject.workers["a@0"].kill()
            await settle(20)
            with pytest.raises(WorkerDied):
                await subject.ask("a", budget_s=1.0)
            assert (await subject.ask("b")).worker == "b@0"
            # with time it waits for the next worker, and the scheduler does not spin meanwhile
            again = FakeWorker("next", service_s=service_s)
            async with again:
                await again.load(EngineSpec("a", "onnx", Path(__file__), ()))
                subject.scheduler.attach("a@0.2", by(again), restart_s=1.0, lanes=frozenset({"a"}), place="0")
                assert (await running).worker == "a@0.2"


@on_virtual_time
async def test_a_model_that_is_shut_refuses_what_waits_and_what_comes() -> None:
    async with pool("a@0", "b@0") as subject:
        running = subject.ask("b")
        await settle()
        waiting = subject.ask("a")
        await settle()
        subject.scheduler.shut("a", Unreachable("model a was unloaded"))
        with pytest.raises(Unreachable, match="was unloaded"):
            await waiting
        with pytest.raises(Unreachable, match="not loaded yet"):
            await subject.ask("a")
        assert (await running).worker == "b@0"
        assert subject.scheduler.unsettled == 0


@on_virtual_time
async def test_a_batch_that_fails_when_its_model_is_served_no_longer_is_not_tried_again() -> None:
    async with pool("a@0") as subject:
        asked = [subject.ask("a", budget_s=50.0) for _ in range(2)]
        await settle()
        subject.workers["a@0"].fails.append(InternalError("one of them is bad"))
        subject.scheduler.shut("a", Unreachable("model a was unloaded"))
        with capture_logs():
            outcomes, took_s = await elapsed(asyncio.gather(*asked, return_exceptions=True))
        assert took_s < 5.0
        assert [type(one) for one in outcomes] == [Unreachable, Unreachable]


@on_virtual_time
async def test_a_worker_that_goes_after_its_model_leaves_no_word_of_its_absence() -> None:
    async with pool("a@0", "b@0") as subject:
        subject.scheduler.shut("a", Unreachable("model a was unloaded"))
        subject.scheduler.detach("a@0", "model a was unloaded")
        absence = subject.scheduler.seats.absence_of("a")
        assert absence is not None and "unloaded" not in absence[0]


@on_virtual_time
async def test_a_worker_of_all_models_takes_nothing_of_one_that_has_a_worker_of_its_own() -> None:
    async with pool("b@0") as subject, FakeWorker("shared", service_s=service_s) as shared:
        scheduler = subject.scheduler
        await shared.load(EngineSpec("a", "onnx", Path(__file__), ()))
        scheduler.open(ModelInstance("a", replace(TEXT, name="a"), TEXT.variants[0], COST))
        scheduler.attach("shared", by(shared), restart_s=RESTART_S, place="0")
        for _ in range(2):
            _, took_s = await elapsed(asyncio.gather(subject.ask("a"), subject.ask("b")))
            assert took_s == pytest.approx(2.0)  # one after the other, at one place
        scheduler.detach("b@0", "b has died")
        with pytest.raises(WorkerDied, match="b has died"):
            await subject.ask("b", budget_s=1.5)
        assert (await subject.ask("a")).outputs

        again = await subject_again(subject, "b@0.2")
        assert (await subject.ask("b")).outputs
        scheduler.detach("shared", "all have died")
        with pytest.raises(WorkerDied, match="all have died"):
            await subject.ask("a", budget_s=1.5)
        assert (await subject.ask("b")).outputs and again.begun
        scheduler.shut("b", Unreachable("b has left"))
        scheduler.detach("b@0.2", "it has left")
        scheduler.attach("shared.2", by(shared), restart_s=RESTART_S, place="0")
        assert (await subject.ask("a")).outputs and not scheduler.seats.partial


async def subject_again(subject: Pool, name: str) -> FakeWorker:
    """Another worker of `b` at the same place."""
    worker = FakeWorker(name, service_s=service_s)
    await worker.__aenter__()
    await worker.load(EngineSpec("b", "onnx", Path(__file__), ()))
    subject.scheduler.attach(name, by(worker), restart_s=RESTART_S, lanes=frozenset({"b"}), place="0")
    return worker
