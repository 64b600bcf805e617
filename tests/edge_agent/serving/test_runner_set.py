"""A generation that is stopped: when its worker ends, whatever becomes of the wait for its calls. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.serving.catalogue import CatalogueEntry
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import EdgeLoadable, EngineWorker, Runner
from edge_agent.serving.runner_set import RunnerSet
from edge_agent.serving.scheduler import EdgeScheduler
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.models.tiny_models import FOREVER, double_manifest, rounds_manifest
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.models.manifest import Manifest, Variant
from tidegate.outcome import Unreachable
from tidegate.runtime.backoff import Backoff
from tidegate.types import Call, Datatype, InferRequest, Tensor
from tidegate.workers.warmup import CostPoints

DRAIN_S = 30.0


class Device:
    """A host, the runners that answer in it, and the workers that were started for them."""

    def __init__(self, host: EdgeHost, on_answered: list[Callable[[], None]]) -> None:
        self.host = host
        self.on_answered = on_answered  # called in the turn of the loop in which a call has left its model
        self.workers: list[FakeWorker] = []
        self.serving = RunnerSet(host, self._runner, drain_s=DRAIN_S)

    async def started(self, manifest: Manifest, generation: int = 1) -> Runner:
        loadables = tuple(EdgeLoadable(one, Path(f"{manifest.name}.onnx")) for one in manifest.variants)
        return await self.serving.start(CatalogueEntry(manifest, loadables), generation)

    def _runner(self, entry: CatalogueEntry, generation: int) -> Runner:
        async def measure(worker: EngineWorker, key: str, manifest: Manifest, variant: Variant) -> CostPoints:
            return ((1.0, 0.001),)

        async def warm(*_: object) -> None:
            await clock.sleep(0)

        return Runner(
            entry.manifest,
            entry.loadables,
            start_worker=self._worker,
            measure=measure,
            warm=warm,
            backoff=Backoff(lambda: 0.5, base_s=1.0),
            hang_timeout_s=10 * DRAIN_S,
            generation=generation,
        )

    def _worker(self, name: str) -> FakeWorker:
        self.workers.append(FakeWorker(name, service_s=lambda _: 0.010))
        return self.workers[-1]


@asynccontextmanager
async def a_device() -> AsyncIterator[Device]:
    heard: list[Callable[[], None]] = []

    def tell(_: Runner, __: float | None) -> None:
        for one in heard:
            one()

    async with EdgeScheduler(EdgeQueue(max_size=8)) as scheduler:
        device = Device(EdgeHost("kiosk-1", [], scheduler, epoch=lambda: 1, on_answered=tell), heard)
        async with device.serving:
            yield device


def call(model: str, tensor: Tensor) -> Call:
    return Call(InferRequest(model, (tensor,)), "oip-grpc", clock.now(), clock.now() + 2 * DRAIN_S)


def endless() -> Call:
    return call("rounds", Tensor("rounds", Datatype.INT64, (1,), np.array([FOREVER]).tobytes()))


def double() -> Call:
    return call("double", Tensor("x", Datatype.FP32, (1, 2), np.ones(2, np.float32).tobytes()))


@on_virtual_time
async def test_a_generation_whose_calls_do_not_end_is_ended_after_its_drain() -> None:
    async with a_device() as device:
        old = await device.started(rounds_manifest())
        device.serving.route(old)
        inside = asyncio.create_task(device.host.infer(endless()))
        await settle()
        device.serving.route(await device.started(rounds_manifest(), 2))

        _, took_s = await elapsed(device.serving.stop(old))

        assert took_s == pytest.approx(DRAIN_S)
        assert [worker.alive for worker in device.workers] == [False, True]
        with pytest.raises(Unreachable):
            await inside


@on_virtual_time
async def test_a_stop_that_is_cancelled_while_calls_are_inside_ends_the_worker_all_the_same() -> None:
    async with a_device() as device:
        old = await device.started(rounds_manifest())
        device.serving.route(old)
        inside = asyncio.create_task(device.host.infer(endless()))
        await settle()
        new = await device.started(rounds_manifest(), 2)
        device.serving.route(new)
        stopping = asyncio.create_task(device.serving.stop(old))
        await settle()
        assert device.workers[0].alive, "a call is inside"

        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping

        assert [worker.alive for worker in device.workers] == [False, True]
        assert device.serving.runners == (new,)
        with pytest.raises(Unreachable):
            await inside


@on_virtual_time
async def test_another_model_that_is_routed_as_the_last_call_leaves_does_not_disturb_the_stop() -> None:
    async with a_device() as device:
        old = await device.started(double_manifest())
        device.serving.route(old)
        other = await device.started(rounds_manifest())
        last = asyncio.create_task(device.host.infer(double()))
        await settle()
        new = await device.started(double_manifest(), 2)
        device.serving.route(new)
        stopping = asyncio.create_task(device.serving.stop(old))
        await settle()
        assert device.workers[0].alive, "a call is inside"

        device.on_answered.append(lambda: device.serving.route(other))
        await last
        await stopping

        assert [worker.alive for worker in device.workers] == [False, True, True]
        assert device.serving.runners == (other, new)
