"""Several models on one device, and batches that need memory: the scheduler under both limits, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.device_arbiter import RETRY_AFTER_S, DeviceArbiter
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from tests.cloud_pool.models import manifest_of
from tests.cloud_pool.workers_support import Arrays, text
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.pool.fake_worker import FakeWorker
from tests.support.pool.lane_pool import by, total
from tidegate import clock
from tidegate.models.fair_share import FairShare
from tidegate.models.manifest import Batching, BatchingPolicy
from tidegate.outcome import DeadlineExceeded, OutOfMemory, Overloaded
from tidegate.workers.process import EngineSpec

MINILM, DIGITS = 100, 5  # tokens; a token takes a millisecond
COST = [(1.0, 0.001), (1000.0, 1.0)]
MIB = float(1 << 20)


class Pool:
    """A scheduler with the lanes "minilm" and "digits" over workers "a", "b", … on one device."""

    def __init__(
        self, scheduler: PoolScheduler, workers: Mapping[str, FakeWorker], lanes: Mapping[str, ModelInstance]
    ) -> None:
        self.scheduler, self.workers, self.lanes = scheduler, workers, lanes

    def ask(self, lane: str, arrays: Arrays, *, budget_s: float = 100.0) -> asyncio.Task[PoolResult]:
        now = clock.now()
        return asyncio.create_task(
            self.scheduler.submit(lane, PoolRequest(arrays, float(arrays["ids"].size), now, now + budget_s))
        )

    def seconds(self, length: int) -> float:
        """What the workers computed of the model with rows of this length."""
        begun = [inputs["ids"] for worker in self.workers.values() for inputs in worker.begun]
        return sum(0.001 * ids.size for ids in begun if ids.shape[1] == length)

    def batches(self, name: str) -> list[int]:
        return [len(inputs["ids"]) for inputs in self.workers[name].begun]


@asynccontextmanager
async def pool(
    names: str = "a",
    *,
    weights: Mapping[str, float] | None = None,
    limit_bytes: float = inf,
    policy: BatchingPolicy = "deadline",
) -> AsyncIterator[Pool]:
    allotment = DeviceArbiter(FairShare(weights))
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(PoolScheduler(allotment=allotment))
        lanes = {name: lane_of(name, policy) for name in ("minilm", "digits")}
        workers = {}
        for lane in lanes.values():
            scheduler.open(lane)
        for name in names:
            worker = FakeWorker(name, service_s=lambda inputs: 0.001 * inputs["ids"].size)
            workers[name] = await stack.enter_async_context(worker)
            for key in lanes:
                await worker.load(EngineSpec(key, "onnx", Path(__file__), ()))
            allotment.join(name, "cpu", held_bytes=0.0, limit_bytes=limit_bytes)
            scheduler.attach(name, by(worker), restart_s=1.0)
        yield Pool(scheduler, workers, lanes)


def lane_of(name: str, policy: BatchingPolicy) -> ModelInstance:
    batching = Batching(max_batch_size=8, max_queue_size=10_000, pad_axis="sequence", policy=policy)
    manifest = manifest_of(name=name, batching=batching)
    return ModelInstance(name, manifest, manifest.variants[0], COST)


async def flood(subject: Pool, lane: str, length: int, *, rate: float, budget_s: float, for_s: float) -> list[float]:
    """Open-loop load; the waits of the answered requests."""
    waited: list[float] = []

    async def one() -> None:
        began_at = clock.now()
        try:
            await subject.ask(lane, text(length), budget_s=budget_s)
        except (DeadlineExceeded, Overloaded):
            return
        waited.append(clock.now() - began_at)

    async with asyncio.TaskGroup() as callers:
        for _ in range(int(for_s * rate)):
            callers.create_task(one())
            await clock.sleep(1.0 / rate)
    return waited


@pytest.mark.slow
@on_virtual_time
async def test_a_light_model_is_answered_beside_a_heavy_one_that_is_always_due_first() -> None:
    async with pool() as subject:
        heavy, light = await asyncio.gather(
            flood(subject, "minilm", MINILM, rate=30.0, budget_s=1.0, for_s=30.0),
            flood(subject, "digits", DIGITS, rate=20.0, budget_s=60.0, for_s=30.0),
        )
        assert len(light) == 600
        # By deadline alone each would wait until a second before its own: a minute.
        assert max(light) < 2.0
        # And the heavy one has what is left: 27 s of 30, in seconds of 10 requests.
        assert len(heavy) > 0.8 * 270


@pytest.mark.slow
@on_virtual_time
async def test_two_models_in_overload_get_device_seconds_by_their_weights() -> None:
    async with pool(weights={"minilm": 3.0}) as subject:
        await asyncio.gather(
            flood(subject, "minilm", MINILM, rate=30.0, budget_s=2.0, for_s=20.0),
            flood(subject, "digits", DIGITS, rate=300.0, budget_s=1.0, for_s=20.0),
        )
        assert subject.seconds(MINILM) / subject.seconds(DIGITS) == pytest.approx(3.0, rel=0.15)


@on_virtual_time
async def test_a_request_that_would_be_late_goes_before_a_long_queue_of_another_model() -> None:
    async with pool() as subject:
        queue = [subject.ask("minilm", text(MINILM)) for _ in range(30)]
        await settle()
        _, took_s = await elapsed(subject.ask("digits", text(DIGITS), budget_s=1.5))
        assert took_s < 1.0
        await asyncio.gather(*queue)


# Memory


@on_virtual_time
async def test_batches_are_no_larger_than_the_memory_that_they_should_need() -> None:
    async with pool(limit_bytes=4 * MIB, policy="eager") as subject:
        footprint = subject.lanes["minilm"].memory.footprint
        footprint.record(MINILM, 1 * MIB)
        footprint.record(4 * MINILM, 4 * MIB)
        callers = [subject.ask("minilm", text(MINILM)) for _ in range(12)]
        await asyncio.gather(*callers)
        assert max(subject.batches("a")) == 4


@on_virtual_time
async def test_a_batch_that_does_not_fit_beside_another_workers_waits_for_it() -> None:
    async with pool("ab", limit_bytes=3 * MIB) as subject:
        for lane in subject.lanes.values():
            lane.memory.footprint.record(MINILM, 2 * MIB)
        callers = [subject.ask(lane, text(length)) for lane, length in (("minilm", MINILM), ("digits", MINILM))]
        _, took_s = await elapsed(asyncio.gather(*callers))
        assert took_s == pytest.approx(0.2)  # side by side it would be a tenth


@on_virtual_time
async def test_what_will_never_fit_is_refused_at_once_with_the_sum() -> None:
    async with pool(limit_bytes=3 * MIB) as subject:
        footprint = subject.lanes["minilm"].memory.footprint
        footprint.record(100.0, 2 * MIB)
        footprint.record(200.0, 4 * MIB)
        with pytest.raises(OutOfMemory, match=r"minilm should need 4 MiB .* but there are 3 MiB beside") as refused:
            await subject.ask("minilm", text(200))
        assert refused.value.retry_after_s == RETRY_AFTER_S
        # Of many rows each fits by itself: it runs in parts.
        answer = await subject.ask("minilm", text(100, rows=3))
        assert answer.outputs["sum"].tolist() == [[100.0]] * 3
        assert subject.batches("a") == [1, 1, 1]


@on_virtual_time
async def test_a_batch_without_memory_is_halved_and_every_caller_is_answered() -> None:
    async with pool(policy="eager") as subject:
        first = subject.ask("minilm", text(MINILM))
        await settle()
        callers = [subject.ask("minilm", text(MINILM, fill=n)) for n in range(8)]
        await settle()
        full = subject.workers["a"].service_s

        def service_s(inputs: Arrays) -> float:
            if len(inputs["ids"]) > 4:
                subject.workers["a"].fails.append(OutOfMemory("too much"))
            return full(inputs)

        subject.workers["a"].service_s = service_s
        with capture_logs() as logs:
            answers = await asyncio.gather(*callers)
        await first
        assert [total(answer) for answer in answers] == [MINILM * n for n in range(8)]
        assert max(answer.batch_rows for answer in answers) <= 4
        assert "out of memory" in [entry["event"] for entry in logs]
        # The cap is learned: the next eight do not try it again.
        begun = len(subject.batches("a"))
        await asyncio.gather(*[subject.ask("minilm", text(MINILM)) for _ in range(8)])
        assert max(subject.batches("a")[begun:]) <= 4


@on_virtual_time
async def test_who_has_no_memory_alone_is_tried_twice_and_refused_as_overload() -> None:
    async with pool() as subject:
        subject.workers["a"].fails.extend([OutOfMemory("too much")] * 3)
        with capture_logs(), pytest.raises(OutOfMemory, match="minilm had no memory for 100 units of work: too much"):
            await subject.ask("minilm", text(MINILM))
        assert subject.batches("a") == [1, 1]
        subject.workers["a"].fails.clear()
        assert total(await subject.ask("minilm", text(MINILM))) == MINILM


@on_virtual_time
async def test_once_is_no_reason_to_refuse() -> None:
    async with pool() as subject:
        subject.workers["a"].fails.append(OutOfMemory("somebody else had it"))
        with capture_logs():
            assert total(await subject.ask("minilm", text(MINILM))) == MINILM


@on_virtual_time
async def test_a_worker_that_dies_gives_its_memory_back() -> None:
    async with pool("ab", limit_bytes=3 * MIB) as subject:
        subject.lanes["minilm"].memory.footprint.record(MINILM, 2 * MIB)
        first = subject.ask("minilm", text(MINILM))
        await settle()
        busy = next(worker for worker in subject.workers.values() if worker.begun)
        with capture_logs():
            busy.kill()
            answer, took_s = await elapsed(first)
        assert total(answer) == MINILM
        assert took_s < 0.25
        assert "2 MiB reserved" not in repr(subject.scheduler.allotment)


@pytest.mark.slow
@on_virtual_time
async def test_a_batch_whose_share_is_overdue_is_waited_for() -> None:
    """Else small batches of another model, which always fit beside each other, would keep it out for ever."""
    async with pool("ab", limit_bytes=4 * MIB) as subject:
        subject.lanes["minilm"].memory.footprint.record(MINILM, 4 * MIB)
        subject.lanes["digits"].memory.footprint.record(400, 1 * MIB)
        stop = asyncio.Event()

        async def always() -> None:
            while not stop.is_set():
                await subject.ask("digits", text(50), budget_s=5.0)

        small = [asyncio.create_task(always()) for _ in range(12)]
        await clock.sleep(0.5)
        answer, took_s = await elapsed(subject.ask("minilm", text(MINILM), budget_s=60.0))
        stop.set()
        await asyncio.gather(*small)
        assert total(answer) == MINILM
        assert took_s < 3.0


def test_a_repr_says_who_holds_what() -> None:
    allotment = DeviceArbiter()
    allotment.join("a", "cpu", held_bytes=MIB, limit_bytes=8 * MIB)
    assert "1 MiB held, 0 bytes reserved of 8 MiB" in repr(allotment)
    allotment.leave("a")
    allotment.leave("a")
    assert "0 bytes held" in repr(allotment)
