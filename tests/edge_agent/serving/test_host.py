"""One call through an edge, from its tensors to its answer: on virtual time, with a worker that takes 10 ms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from msgspec.structs import replace as with_fields

from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import EdgeLoadable, EngineWorker, Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tests.support.loop import on_virtual_time, settle
from tests.support.models.tiny_models import FOREVER, double_manifest, rounds_manifest
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.models.manifest import Manifest, TensorSpec, Variant
from tidegate.oip.host import ModelHost, TimedCount
from tidegate.outcome import (
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    NotSupported,
    Overloaded,
    ServeError,
    Unreachable,
)
from tidegate.runtime.backoff import Backoff
from tidegate.types import Accepted, Call, Datatype, InferRequest, LoadReport, Reply, RequestedOutput, Route, Tensor

COMPUTE_S = 0.010


class Edge:
    """A host over fake workers, which stay at hand."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.host: EdgeHost

    def start_worker(self, name: str) -> FakeWorker:
        self.workers[name] = FakeWorker(name, service_s=lambda _: COMPUTE_S)
        return self.workers[name]

    def changed(self, runner: Runner) -> None:
        self.host.refresh(runner)  # the host is made after its runners

    def runner(self, manifest: Manifest, costs: dict[str, float]) -> Runner:
        async def measure(worker: EngineWorker, key: str, manifest: Manifest, variant: Variant) -> tuple[Any, ...]:
            return ((1.0, costs.get(variant.name, COMPUTE_S)),)

        async def warm(*_: object) -> None:
            await clock.sleep(0)

        return Runner(
            manifest,
            [EdgeLoadable(one, Path(f"{manifest.name}.onnx")) for one in manifest.variants],
            start_worker=self.start_worker,
            measure=measure,
            warm=warm,
            backoff=Backoff(lambda: 0.5, base_s=1.0),
            on_change=self.changed,
        )


@asynccontextmanager
async def edge(*manifests: Manifest, max_size: int = 8, costs: dict[str, float] | None = None) -> AsyncIterator[Edge]:
    one = Edge()
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(EdgeScheduler(EdgeQueue(max_size=max_size)))
        runners = [one.runner(manifest, costs or {}) for manifest in manifests or (double_manifest(),)]
        one.host = EdgeHost("kiosk-1", runners, scheduler, epoch=lambda: 7)
        for runner in runners:
            await stack.enter_async_context(runner)
        yield one


def doubles(shape: tuple[int, int] = (1, 2), *, budget_s: float | None = 1.0, **changes: Any) -> Call:
    """A call for `double` with ones of that shape; `changes` are fields of Call."""
    tensor = array_to_tensor("x", np.ones(shape, dtype=np.float32), Datatype.FP32)
    request = InferRequest("double", (tensor,), id="id-1")
    now = clock.now()
    call = Call(request, "oip-grpc", now, None if budget_s is None else now + budget_s)
    return replace(call, **changes)


def endless(budget_s: float = 1.0) -> Call:
    tensor = Tensor("rounds", Datatype.INT64, (1,), np.array([FOREVER]).tobytes())
    return Call(InferRequest("rounds", (tensor,)), "oip-grpc", clock.now(), clock.now() + budget_s)


# --- answers -------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_an_answer_carries_its_tensors_its_times_its_route_and_the_edges_load() -> None:
    async with edge() as one:
        heard: list[Accepted] = []

        reply = await one.host.infer(doubles((1, 2), on_accepted=heard.append))

        assert heard == [Accepted(0, pytest.approx(COMPUTE_S))]
        (output,) = reply.response.outputs
        np.testing.assert_array_equal(tensor_to_array(output), [[2.0, 2.0]])
        assert (reply.response.id, output.name, output.datatype) == ("id-1", "y", Datatype.FP32)
        assert reply.stages == {"queue": 0.0, "compute": pytest.approx(COMPUTE_S)}
        assert reply.route == Route("edge/kiosk-1", "only", "int8")
        assert (reply.variant, reply.batch_size) == ("int8", 1)
        assert reply.budget_left_s == pytest.approx(1.0 - COMPUTE_S)
        assert reply.load == LoadReport(epoch=7, sequence=1, queued=0, in_flight=0, queue_delay_s=0.0)


@on_virtual_time
async def test_a_requirement_that_only_a_gateway_can_keep_is_refused() -> None:
    async with edge() as one:
        with pytest.raises(NotSupported, match="verifies no evidence; ask a gateway"):
            await one.host.infer(doubles(attested=True))


@on_virtual_time
async def test_only_the_outputs_that_were_asked_for_are_sent() -> None:
    two = with_fields(
        double_manifest(), outputs=(TensorSpec("z", Datatype.FP32, ("batch",)), *double_manifest().outputs)
    )
    async with edge(two) as one:
        call = doubles()

        reply = await one.host.infer(replace(call, request=replace(call.request, outputs=(RequestedOutput("y"),))))

        assert [output.name for output in reply.response.outputs] == ["y"]


@on_virtual_time
async def test_an_artefact_that_does_not_give_what_its_manifest_says_is_a_defect_with_a_name() -> None:
    other = with_fields(double_manifest(), outputs=(TensorSpec("z", Datatype.FP32, ("batch",)),))
    async with edge(other) as one:
        with pytest.raises(InternalError, match=r"gave no output 'z' \(it gave y\)"):
            await one.host.infer(doubles())


@on_virtual_time
async def test_a_caller_without_a_deadline_gets_the_models_default() -> None:
    async with edge() as one:
        reply = await one.host.infer(doubles(budget_s=None))

        assert reply.budget_left_s == pytest.approx(2.0 - COMPUTE_S)


# --- which variant -------------------------------------------------------------------------------------------------


def two_variants() -> Manifest:
    """`int8` up to 4 rows of 16, `fp32` without limits."""
    (int8,) = double_manifest().variants
    return with_fields(
        double_manifest(), variants=(int8, with_fields(int8, name="fp32", max_batch=None, max_tokens=None))
    )


@pytest.mark.parametrize(
    ("shape", "demanded", "costs", "used"),
    [
        ((1, 2), "", {"int8": 0.010, "fp32": 0.020}, "int8"),
        ((1, 2), "", {"int8": 0.020, "fp32": 0.010}, "fp32"),  # a device without int8 instructions
        ((1, 2), "fp32", {"int8": 0.010, "fp32": 0.020}, "fp32"),
        ((5, 2), "", {"int8": 0.010, "fp32": 0.020}, "fp32"),
        ((1, 17), "", {"int8": 0.010, "fp32": 0.020}, "fp32"),
    ],
)
def test_the_cheapest_variant_here_that_takes_the_work_is_used_unless_one_is_demanded(
    shape: tuple[int, int], demanded: str, costs: dict[str, float], used: str
) -> None:
    @on_virtual_time
    async def check() -> None:
        async with edge(two_variants(), costs=costs) as one:
            assert (await one.host.infer(doubles(shape, variant=demanded))).variant == used

    check()


@pytest.mark.parametrize(
    ("shape", "demanded", "message"),
    [
        ((5, 2), "", r"too much work for 'double:1' on edge/kiosk-1: 5 rows, but int8 takes at most 4 \(max_batch\)"),
        ((1, 17), "", r"rows of 17, but int8 takes at most 16 \(max_tokens\)"),
        ((1, 2), "bf16", r"edge/kiosk-1 has no variant 'bf16' of 'double:1' \(here: int8\)"),
    ],
)
def test_work_that_no_variant_takes_is_refused_with_the_limits_name(
    shape: tuple[int, int], demanded: str, message: str
) -> None:
    @on_virtual_time
    async def check() -> None:
        async with edge() as one:
            with pytest.raises(NotSupported, match=message):
                await one.host.infer(doubles(shape, variant=demanded))
            assert one.host.load_report().queued == 0

    check()


@pytest.mark.parametrize(("manifest", "shape", "demanded", "most"), [
    (double_manifest(), (1, 2), "", 4),
    (double_manifest(), (1, 2), "int8", 4),
    (double_manifest(), (1, 17), "", None),
    (double_manifest(), (1, 2), "bf16", None),
    (two_variants(), (1, 2), "", 32),
    (two_variants(), (1, 2), "int8", 4),
])  # fmt: skip
def test_how_many_rows_a_call_may_have_is_what_its_variants_take(
    manifest: Manifest, shape: tuple[int, int], demanded: str, most: int | None
) -> None:
    @on_virtual_time
    async def check() -> None:
        async with edge(manifest) as one:
            assert one.host.most_rows(doubles(shape, variant=demanded), 32) == most

    check()


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "version"), [("triple", ""), ("double", "2"), ("", "")])
def test_what_is_not_here_is_not_found(name: str, version: str) -> None:
    @on_virtual_time
    async def check() -> None:
        async with edge() as one:
            call = doubles()
            with pytest.raises(ModelNotFound, match="edge/kiosk-1"):
                await one.host.infer(
                    replace(call, request=replace(call.request, model_name=name, model_version=version))
                )
            assert not one.host.model_ready(name, version) or not name

    check()


@on_virtual_time
async def test_a_queue_without_room_and_a_budget_without_hope_are_refused_at_the_door() -> None:
    async with edge(rounds_manifest(), double_manifest(), max_size=1) as one:
        calls = [asyncio.create_task(one.host.infer(endless()))]
        await settle()
        calls.append(asyncio.create_task(one.host.infer(doubles())))
        await settle()

        with pytest.raises(Overloaded):
            await one.host.infer(doubles())
        assert one.host.load_report() == LoadReport(
            7, 1, queued=1, in_flight=1, queue_delay_s=pytest.approx(2 * COMPUTE_S)
        )
        calls.pop().cancel()
        await settle()
        with pytest.raises(DeadlineExceeded):
            await one.host.infer(doubles(budget_s=0.001))
        with pytest.raises(DeadlineExceeded):
            await calls[0]


@on_virtual_time
async def test_a_worker_killed_during_a_call_fails_it_and_those_behind_it_and_the_offers_say_so() -> None:
    async with edge(rounds_manifest(), double_manifest()) as one:
        calls = [asyncio.create_task(one.host.infer(endless())) for _ in range(3)]
        other = asyncio.create_task(one.host.infer(doubles()))
        await settle()

        one.workers["rounds:1/1"].kill()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [Unreachable] * 3
        assert {offer.name: offer.state for offer in one.host.offers()} == {"rounds": "loading", "double": "ready"}
        assert not one.host.ready()
        assert not one.host.model_ready("rounds")
        assert one.host.model_ready("double", "1")
        assert isinstance(await other, Reply)
        with pytest.raises(Unreachable, match="'rounds:1' is loading here"):
            await one.host.infer(endless())
        await clock.sleep(1.0)
        assert one.host.ready()


@on_virtual_time
async def test_those_that_wait_for_a_dead_worker_do_not_wait_for_another_models_computation_first() -> None:
    async with edge(rounds_manifest(), double_manifest()) as one:
        computing = asyncio.create_task(one.host.infer(endless(budget_s=20.0)))
        await settle()
        waiting = asyncio.create_task(one.host.infer(doubles(budget_s=10.0)))
        await settle()

        one.workers["double:1/1"].kill()

        with pytest.raises(Unreachable, match="'double:1' is loading here"):
            await waiting
        assert not computing.done()
        assert one.host.load_report().queued == 0
        computing.cancel()


@on_virtual_time
async def test_a_draining_edge_takes_nothing_new_and_answers_what_it_took() -> None:
    async with edge() as one:
        taken = asyncio.create_task(one.host.infer(doubles()))
        await settle()

        one.host.drain()

        with pytest.raises(Unreachable, match="edge/kiosk-1 is shutting down"):
            await one.host.infer(doubles())
        assert isinstance(await taken, Reply)
        assert not one.host.ready()
        assert not one.host.model_ready("double")


# --- what it learns and counts -------------------------------------------------------------------------------------


@on_virtual_time
async def test_a_device_that_became_slow_promises_later_finishes() -> None:
    async with edge() as one:
        heard: list[Accepted] = []
        one.workers["double:1/1"].service_s = lambda _: 5 * COMPUTE_S
        for _ in range(40):
            await one.host.infer(doubles(on_accepted=heard.append))

        assert heard[0].finish_in_s == pytest.approx(COMPUTE_S)
        assert heard[-1].finish_in_s == pytest.approx(5 * COMPUTE_S, rel=0.1)


@on_virtual_time
async def test_a_call_whose_caller_left_still_teaches_what_it_cost() -> None:
    async with edge() as one:
        one.workers["double:1/1"].service_s = lambda _: 5 * COMPUTE_S
        gone = asyncio.create_task(one.host.infer(doubles()))
        await settle()
        gone.cancel()

        await clock.sleep(1.0)
        heard: list[Accepted] = []
        await one.host.infer(doubles(on_accepted=heard.append))

        assert heard[0].finish_in_s > COMPUTE_S


@on_virtual_time
async def test_statistics_count_answers_rows_and_failures() -> None:
    async with edge(double_manifest(), rounds_manifest()) as one:
        for shape in ((1, 2), (3, 2)):
            await one.host.infer(doubles(shape))
        with pytest.raises(ServeError):
            await one.host.infer(doubles((5, 2)))

        (double,) = one.host.statistics("double", "1")

        assert (double.inference_count, double.execution_count) == (4, 2)
        assert (double.success.count, double.fail.count) == (2, 1)
        assert double.compute_infer == TimedCount(2, pytest.approx(2 * COMPUTE_S * 1e9, rel=1e-6))
        assert sorted(double.batches) == [1, 3]
        assert double.last_inference_ms > 0
        assert [model.name for model in one.host.statistics()] == ["double", "rounds"]


@on_virtual_time
async def test_it_is_a_model_host_and_prints_its_state() -> None:
    async with edge() as one:
        host: ModelHost = one.host

        assert host.server_name == "edge/kiosk-1"
        assert [manifest.name for manifest in host.manifests()] == ["double"]
        assert host.manifest("double").version == "1"
        assert repr(host) == "<EdgeHost kiosk-1 double:1 ready <EdgeScheduler <EdgeQueue 0/8 waiting, 0/1 computing>>>"
