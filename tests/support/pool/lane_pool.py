"""A scheduler with one model instance over a fake worker that takes as long as its model predicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.scheduling.job import PoolRequest, PoolResult
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.scheduling.worker_slots import Compute
from tests.cloud_pool.models import TEXT
from tests.cloud_pool.workers_support import Arrays
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.workers.process import ComputeResult, EngineSpec

KEY = "text:1/fp32"
WORKER = "0.1"
RESTART_S = 3.0


def service_s(inputs: Arrays) -> float:
    """Seconds of a call: a tenth, and a hundredth for each token, padding included."""
    return 0.1 + 0.01 * inputs["ids"].size


COST = [(1.0, 0.11), (1000.0, 10.1)]


class Pool:
    """A scheduler with one lane over a fake worker."""

    def __init__(self, scheduler: PoolScheduler, worker: FakeWorker, lane: ModelInstance) -> None:
        self.scheduler, self.worker, self.lane = scheduler, worker, lane

    def ask(self, arrays: Arrays, *, budget_s: float = 100.0, key: str = KEY, **more: Any) -> asyncio.Task[PoolResult]:
        """A caller in a task of its own."""
        now = clock.now()
        ask = PoolRequest(arrays, float(arrays["ids"].size), now, now + budget_s, **more)
        return asyncio.create_task(self.scheduler.submit(key, ask))

    @property
    def batches(self) -> list[int]:
        """The rows of each batch that has begun."""
        return [len(inputs["ids"]) for inputs in self.worker.begun]


@asynccontextmanager
async def pool(manifest: Manifest = TEXT) -> AsyncIterator[Pool]:
    async with FakeWorker(service_s=service_s) as worker, PoolScheduler() as scheduler:
        await worker.load(EngineSpec(KEY, "onnx", Path(__file__), ()))
        lane = ModelInstance(KEY, manifest, manifest.variants[0], COST)
        scheduler.open(lane)
        scheduler.attach(WORKER, by(worker), restart_s=RESTART_S)
        yield Pool(scheduler, worker, lane)


def by(worker: FakeWorker) -> Compute:
    """What `DeviceWorker` adds is tested with the supervisor."""

    async def compute(key: str, inputs: Arrays, patience_s: float) -> ComputeResult:
        return await worker.infer(key, inputs)

    return compute


def total(answer: PoolResult) -> float:
    return float(answer.outputs["sum"][0, 0])
