"""A call at the pool's door: from tensors to its answer, on virtual time over a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.host import PoolHost
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.supervisor import PoolSupervisor
from tests.cloud_pool.models import TEXT, manifest_of
from tests.cloud_pool.workers_support import Arrays, text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import BAD_ID, FakeWorker
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.models.manifest import Batching, Manifest, Quality
from tidegate.outcome import DeadlineExceeded, InternalError, ModelNotFound, NotSupported, Unreachable
from tidegate.runtime.backoff import Backoff
from tidegate.types import Accepted, Call, InferRequest, Reply, RequestedOutput

FP32 = msgspec.structs.replace(TEXT.variants[0], quality=Quality("cosine", 1.0, 9))
HALF = msgspec.structs.replace(FP32, name="half", precision="bf16", max_tokens=32, quality=None)
MODEL = manifest_of(variants=(FP32, HALF), default_budget_s=5.0)


class Pool:
    def __init__(self, host: PoolHost, processes: list[FakeWorker]) -> None:
        self.host, self.processes = host, processes

    async def infer(self, arrays: Arrays, *, outputs: tuple[str, ...] = (), **more: Any) -> Reply:
        request = InferRequest(
            more.pop("model", "text"),
            tuple(array_to_tensor(spec.name, arrays[spec.name], spec.datatype) for spec in TEXT.inputs),
            model_version=more.pop("version", ""),
            id="7",
            outputs=tuple(RequestedOutput(name) for name in outputs),
        )
        return await self.host.infer(Call(request, "link", clock.now(), **more))


@asynccontextmanager
async def pool(manifest: Manifest = MODEL, *, fixed_s: float = 0.0) -> AsyncIterator[Pool]:
    processes = list[FakeWorker]()

    def start_process(life: str, cores: frozenset[int]) -> FakeWorker:
        processes.append(FakeWorker(service_s=lambda inputs: fixed_s + 0.001 * inputs["ids"].size))
        return processes[-1]

    loadables = [PoolLoadable(manifest, variant, Path(__file__)) for variant in manifest.variants]
    async with PoolScheduler() as scheduler:
        supervisor = PoolSupervisor(
            loadables,
            scheduler,
            start_process=start_process,
            new_backoff=lambda: Backoff(lambda: 1.0),
            warmup_budget_s=1e6,
        )
        host = PoolHost("p", loadables, scheduler, supervisor, epoch=42)
        assert not host.ready()
        assert [variant.cost for offer in host.offers() for variant in offer.variants] == [(), ()]
        async with supervisor:
            yield Pool(host, processes)


@on_virtual_time
async def test_an_answer_says_where_when_and_in_which_company_it_was_made() -> None:
    async with pool() as subject:
        reply = await subject.infer(text(10, rows=2, fill=3))
        assert [tensor.name for tensor in reply.response.outputs] == ["sum", "twice"]
        assert tensor_to_array(reply.response.outputs[0]).tolist() == [[30.0], [30.0]]
        assert (reply.response.id, reply.response.model_version) == ("7", "1")
        assert reply.stages == {"queue": pytest.approx(0.0), "compute": pytest.approx(0.02)}
        assert reply.route is not None
        assert (reply.route.served_by, reply.route.variant, reply.variant, reply.batch_size) == (
            "pool/p", "fp32", "fp32", 2,
        )  # fmt: skip
        assert reply.budget_left_s == pytest.approx(5.0 - 0.02)


@on_virtual_time
async def test_only_the_outputs_that_were_asked_for_come_back() -> None:
    async with pool() as subject:
        reply = await subject.infer(text(10), outputs=("twice",))
        assert [tensor.name for tensor in reply.response.outputs] == ["twice"]


@on_virtual_time
async def test_load_reports_are_numbered_under_one_epoch() -> None:
    async with pool() as subject:
        first = (await subject.infer(text(10))).load
        second = subject.host.load_report()
        assert first is not None
        assert (first.epoch, second.epoch, second.sequence - first.sequence) == (42, 42, 1)
        assert (second.queued, second.in_flight, second.queue_delay_s) == (0, 0, 0.0)


@on_virtual_time
async def test_a_demanded_variant_is_used_by_its_name_or_its_precision_and_is_declared() -> None:
    async with pool() as subject:
        assert (await subject.infer(text(10), variant="half")).variant == "half"
        assert (await subject.infer(text(10), variant="bf16")).variant == "half"
        with pytest.raises(NotSupported, match=r"no variant 'int8' of 'text' \(here: fp32, half\)"):
            await subject.infer(text(10), variant="int8")


@on_virtual_time
async def test_a_requirement_that_only_a_gateway_can_keep_is_refused() -> None:
    async with pool() as subject:
        with pytest.raises(NotSupported, match="pool/p verifies no evidence; ask a gateway"):
            await subject.infer(text(10), attested=True)


@on_virtual_time
async def test_rows_that_are_too_long_for_a_variant_are_refused_with_its_limit() -> None:
    async with pool() as subject:
        with pytest.raises(NotSupported, match="half up to 32"):
            await subject.infer(text(33), variant="half")


@on_virtual_time
async def test_models_and_versions_that_are_not_here_are_named() -> None:
    async with pool() as subject:
        with pytest.raises(ModelNotFound, match=r"no model 'other' on pool/p \(models: text\)"):
            await subject.infer(text(1), model="other")
        with pytest.raises(ModelNotFound, match="no version '9'"):
            await subject.infer(text(1), version="9")
        assert subject.host.manifest("text", "1") is MODEL
        assert list(subject.host.manifests()) == [MODEL]
        assert subject.host.model_ready("text")
        assert not subject.host.model_ready("other")


@on_virtual_time
async def test_a_caller_without_a_deadline_has_the_models_budget() -> None:
    async with pool() as subject:
        heard: list[Accepted] = []
        with pytest.raises(DeadlineExceeded):
            await subject.infer(text(200, rows=100), on_accepted=heard.append)
        await subject.infer(text(200, rows=100), deadline=clock.now() + 99.0, on_accepted=heard.append)
        assert len(heard) == 1


@on_virtual_time
async def test_offers_carry_what_was_measured_here() -> None:
    async with pool() as subject:
        (offer,) = subject.host.offers()
        fp32, half = offer.variants
        assert (offer.name, offer.version, offer.state, offer.digest) == ("text", "1", "ready", "0" * 64)
        assert (fp32.name, fp32.precision, fp32.quality, fp32.max_tokens) == ("fp32", "fp32", 1.0, None)
        assert (half.precision, half.quality, half.max_tokens) == ("bf16", None, 32)
        assert dict(fp32.cost)[64.0] == pytest.approx(0.064)


@on_virtual_time
async def test_statistics_count_answers_and_failures_of_all_variants() -> None:
    async with pool() as subject:
        await subject.infer(text(10))
        await subject.infer(text(10, rows=3), variant="half")
        with pytest.raises(InternalError):
            await subject.infer(text(10, fill=BAD_ID))
        (statistics,) = subject.host.statistics("text")
        assert list(subject.host.statistics()) == [statistics]
        assert (statistics.success.count, statistics.fail.count) == (2, 1)
        assert (statistics.inference_count, statistics.execution_count) == (4, 2)
        assert sorted(statistics.batches) == [1, 3]
        assert statistics.compute_infer.ns == pytest.approx(0.04 * 1e9)


@on_virtual_time
async def test_without_a_worker_it_is_not_ready_and_says_so() -> None:
    async with pool() as subject:
        with capture_logs():
            subject.processes[0].kill()
            await settle(20)
            assert not subject.host.ready()
            assert subject.host.offers()[0].state == "loading"
            await clock.sleep(10.0)
        assert subject.host.ready()


@on_virtual_time
async def test_a_draining_pool_takes_nothing_new() -> None:
    async with pool() as subject:
        subject.host.drain()
        with pytest.raises(Unreachable, match="shutting down"):
            await subject.infer(text(1))
        assert not subject.host.ready()
        assert "PoolHost p ready text" in repr(subject.host)


@on_virtual_time
async def test_an_answer_is_the_same_in_any_company() -> None:
    random = np.random.default_rng(1)
    async with pool(fixed_s=0.02) as subject:
        arrays = [text(int(n), fill=int(n)) for n in random.integers(1, 60, 16)]
        alone = [await subject.infer(one) for one in arrays]
        calls = [subject.infer(one) for one in arrays]
        together = await asyncio.gather(*calls)
        assert [reply.response.outputs for reply in together] == [reply.response.outputs for reply in alone]
        assert max(reply.batch_size for reply in together) > 1


@pytest.mark.parametrize(("coalesce", "rows"), [(True, 1), (False, 2)])
@on_virtual_time
async def test_equal_inputs_are_computed_once_where_the_manifest_says_so(coalesce: bool, rows: int) -> None:
    once = msgspec.structs.replace(MODEL, batching=Batching(pad_axis="sequence", coalesce=coalesce))
    async with pool(once) as subject:
        first = asyncio.create_task(subject.infer(text(10)))
        await settle()
        twins = await asyncio.gather(*[subject.infer(text(10, fill=3)) for _ in range(2)])
        await first
        assert [tensor_to_array(twin.response.outputs[0]).tolist() for twin in twins] == [[[30.0]], [[30.0]]]
        assert [twin.batch_size for twin in twins] == [rows, rows]
