"""What the host of every target promises, on an edge and in a pool, over fake workers on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.host import PoolHost
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.supervisor import PoolSupervisor
from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import EdgeLoadable, EngineWorker, Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tests.support.loop import on_virtual_time
from tests.support.models.tiny_models import double_manifest
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.models.manifest import Manifest, Quality, Variant
from tidegate.oip.call import GATEWAY_HOP, HOP_KEY
from tidegate.outcome import InvalidRequest, ModelNotFound, NotSupported, Unreachable
from tidegate.runtime.backoff import Backoff
from tidegate.serving.target_host import TargetHost
from tidegate.types import Call, Datatype, InferRequest, Parameters
from tidegate.workers.warmup import CostPoints

INT8 = replace(double_manifest().variants[0], name="small", precision="int8", max_batch=None, where=("edge", "pool"))
FP32 = replace(INT8, name="full", precision="fp32")
NAMED_INT8 = replace(FP32, name="int8")  # its name is another variant's precision
MODEL = replace(double_manifest(), variants=(INT8, FP32))
missed: list[tuple[float, float]] = []  # (arrived, ended) of calls past their deadline
takes_s = [0.010]  # the last is what a call takes in a worker


def worker(name: str) -> FakeWorker:
    return FakeWorker(name, service_s=lambda _: takes_s[-1])


def note(arrived_at: float, ended_at: float) -> None:
    missed.append((arrived_at, ended_at))


@asynccontextmanager
async def edge(manifest: Manifest) -> AsyncIterator[TargetHost[Any]]:
    async def measure(worker: EngineWorker, key: str, manifest: Manifest, variant: Variant) -> CostPoints:
        return ((1.0, 0.010),)

    async def warm(*_: object) -> None:
        await clock.sleep(0)

    runner = Runner(
        manifest,
        [EdgeLoadable(one, Path("double.onnx")) for one in manifest.variants],
        start_worker=worker,
        measure=measure,
        warm=warm,
        backoff=Backoff(lambda: 0.5, base_s=1.0),
    )
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(EdgeScheduler(EdgeQueue(max_size=8)))
        await stack.enter_async_context(runner)
        yield EdgeHost("one", [runner], scheduler, epoch=lambda: 7, on_missed=note)


@asynccontextmanager
async def pool(manifest: Manifest) -> AsyncIterator[TargetHost[Any]]:
    loadables = [PoolLoadable(manifest, one, Path("double.onnx")) for one in manifest.variants]
    async with PoolScheduler() as scheduler:
        supervisor = PoolSupervisor(
            loadables,
            scheduler,
            start_process=lambda name, cores: worker(name),
            new_backoff=lambda: Backoff(lambda: 0.5, base_s=1.0),
        )
        async with supervisor:
            yield PoolHost(
                "one", loadables, scheduler, supervisor, epoch=7, on_missed=lambda *times: missed.append(times)
            )


TARGETS = {"edge": edge, "pool": pool}
Target = Callable[[Manifest], AbstractAsyncContextManager[TargetHost[Any]]]


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def call(model: str = "double", version: str = "", parameters: Parameters | None = None, **changes: Any) -> Call:
    tensor = array_to_tensor("x", np.ones((1, 2), dtype=np.float32), Datatype.FP32)
    request = InferRequest(model, (tensor,), model_version=version, id="id-1", parameters=parameters or {})
    return replace(Call(request, "oip-grpc", clock.now(), clock.now() + 1.0), **changes)


@pytest.mark.parametrize(
    ("demanded", "used"),
    [("full", "full"), ("small", "small"), ("fp32", "full"), ("int8", "small")],
)
def test_a_variant_is_demanded_by_its_name_or_by_its_precision(target: Target, demanded: str, used: str) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            reply = await host.infer(call(variant=demanded))

            assert reply.variant == used
            assert reply.route is not None
            assert (reply.route.served_by, reply.route.variant, reply.route.degraded) == (host.server_name, used, False)

    check()


def test_a_name_is_not_taken_for_the_precision_of_another_variant(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(replace(MODEL, variants=(INT8, NAMED_INT8))) as host:
            assert (await host.infer(call(variant="int8"))).variant == "int8"
            assert (await host.infer(call(variant="small"))).variant == "small"

    check()


def test_a_demand_that_no_variant_satisfies_is_refused_with_the_variants_that_are_there(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            with pytest.raises(NotSupported, match=r"has no variant 'bf16' of 'double.*' \(here: small, full\)"):
                await host.infer(call(variant="bf16"))

    check()


@pytest.mark.parametrize("place", ["header", "parameter"])
def test_a_version_may_be_demanded_beside_the_path_and_no_other_answers(target: Target, place: str) -> None:
    def demanding(version: str, named: str = "") -> Call:
        said = {"tidegate-version": version}
        return call(version=named, headers=said) if place == "header" else call(version=named, parameters=said)

    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            assert (await host.infer(demanding("1"))).response.model_version == "1"
            with pytest.raises(ModelNotFound, match=r"no version '9' on .*/one"):
                await host.infer(demanding("9"))
            # A gateway has resolved what its caller said, and names the version.
            assert (await host.infer(demanding("candidate", named="1"))).response.model_version == "1"

    check()


MEASURED = replace(
    MODEL,
    variants=(replace(INT8, quality=Quality("cosine", 0.9, 10)), replace(FP32, quality=Quality("cosine", 1.0, 10))),
)


@pytest.mark.parametrize(
    ("of_model", "of_caller", "demanded", "used"),
    [
        (0.0, 0.95, "", "full"),
        (0.95, 0.0, "", "full"),
        (0.95, 0.5, "", "full"),  # a caller never lowers what its model demands
        (0.0, 0.9, "small", "small"),
        (0.0, 0.95, "small", ""),
        (0.95, 0.0, "int8", ""),
    ],
)
def test_a_least_quality_is_kept_or_refused_with_what_is_there(
    target: Target, of_model: float, of_caller: float, demanded: str, used: str
) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(replace(MEASURED, min_quality=of_model)) as host:
            asked = call(min_quality=of_caller, variant=demanded)
            if used:
                assert (await host.infer(asked)).variant == used
            else:
                with pytest.raises(NotSupported, match=r"of quality 0\.95 or better \(here: small 0\.9\)"):
                    await host.infer(asked)

    check()


def test_bytes_that_are_no_text_are_the_callers_fault_where_an_engine_reads_texts(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            tensor = array_to_tensor("x", np.array([[b"a", b"\xff"]], dtype=object), Datatype.BYTES)
            asked = call(request=replace(call().request, inputs=(tensor,)))
            with pytest.raises(InvalidRequest, match="input 'x': element 1 of its data is no UTF-8"):
                await host.infer(asked)

    check()


def test_a_variant_without_a_measure_meets_no_least_quality(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(replace(MODEL, variants=(replace(INT8, quality=None),))) as host:
            with pytest.raises(NotSupported, match=r"of quality 0\.01 or better \(here: small\)"):
                await host.infer(call(min_quality=0.01))

    check()


@pytest.mark.parametrize("passed_on", [{"protocol": "link"}, {"headers": {HOP_KEY: GATEWAY_HOP}}])
def test_a_gateway_has_kept_the_least_quality_of_what_it_passes_on(target: Target, passed_on: dict[str, Any]) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(replace(MEASURED, min_quality=0.95)) as host:
            assert (await host.infer(call(variant="small", **passed_on))).variant == "small"

    check()


@pytest.mark.parametrize(
    ("model", "version", "message"),
    [("triple", "", r"no model 'triple' on .*/one \(models: double\)"), ("double", "2", r"no version '2' on .*/one")],
)
def test_what_is_not_here_is_not_found(target: Target, model: str, version: str, message: str) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            with pytest.raises(ModelNotFound, match=message):
                await host.infer(call(model, version))
            assert not host.model_ready(model, version)

    check()


def test_an_answer_says_where_it_was_computed_and_how_busy_the_target_is(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            first, second = await host.infer(call()), await host.infer(call())

            (output,) = second.response.outputs
            np.testing.assert_array_equal(tensor_to_array(output), [[2.0, 2.0]])
            assert second.response.id == "id-1"
            assert set(second.stages) == {"queue", "compute"}
            assert first.load is not None
            assert second.load is not None
            assert (second.load.epoch, second.load.sequence - first.load.sequence) == (7, 1)

    check()


def test_a_call_that_ends_past_its_deadline_is_told_and_one_in_time_is_not(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        missed.clear()
        async with target(MODEL) as host:
            await host.infer(call())
            assert missed == []

            takes_s.append(5.0)
            arrived_at = clock.now()
            waiting = asyncio.create_task(host.infer(call()))
            await clock.sleep(1.5)
            waiting.cancel()  # as a gateway does whose own deadline is over
            await asyncio.wait([waiting])
            assert missed == [(arrived_at, pytest.approx(arrived_at + 1.5, abs=0.51))]

    try:
        check()
    finally:
        del takes_s[1:]


def test_a_draining_target_refuses_new_calls(target: Target) -> None:
    @on_virtual_time
    async def check() -> None:
        async with target(MODEL) as host:
            assert host.ready()
            assert host.model_ready("double")

            host.drain()

            with pytest.raises(Unreachable, match="/one is shutting down"):
                await host.infer(call())
            assert host.draining
            assert not host.ready()
            assert not host.model_ready("double", "1")

    check()
