"""Unmodified tritonclient straight against a pool, with nothing in between: a pool alone is an inference server.

What each method answers on the wire is told by `tests/oip`; here it is asked of a real pool with a real worker, so
that what it says of itself is what it does. perf_analyzer's own sequence of calls is played as well, since it stops at
the first number that does not add up.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from tests.cloud_pool.workers_support import text, text_repository
from tidegate.config import load
from tidegate.oip.orca import load_from_text

pytestmark = [pytest.mark.slow, pytest.mark.clients]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_repository(tmp_path_factory.mktemp("pool") / "models")


@pytest.fixture
async def app(repository: Path) -> AsyncIterator[PoolApp]:
    config = load(PoolConfig, grpc_port=0, model_repository=repository, warmup_budget_s=0.2)
    async with PoolApp(config, draw=lambda: 0.1) as running:
        yield running


def words(length: int, *, rows: int = 1, fill: int = 1) -> list[Any]:
    return [
        triton.InferInput(name, array.shape, "INT64").set_data_from_numpy(array)
        for name, array in text(length, rows=rows, fill=fill).items()
    ]


@asynccontextmanager
async def client_of(app: PoolApp) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(app.address) as client:
        yield client


async def test_the_synchronous_client_infers_and_asks_about_everything(app: PoolApp) -> None:
    def ask() -> tuple[Any, ...]:
        with triton.InferenceServerClient(app.address) as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("text", "1")
            answer = client.infer("text", words(4, rows=3, fill=2), request_id="q1", client_timeout=30.0)
            metadata = client.get_model_metadata("text", as_json=True)
            index = client.get_model_repository_index(as_json=True)
            server = client.get_server_metadata(as_json=True)
            return answer, metadata, index, server

    answer, metadata, index, server = await asyncio.to_thread(ask)
    assert answer.as_numpy("sum").tolist() == [[8.0]] * 3
    assert answer.get_response().id == "q1"
    assert [one["name"] for one in metadata["inputs"]] == ["ids", "mask"]
    assert metadata["platform"] == "tidegate_onnx"
    assert index["models"] == [{"name": "text", "version": "1", "state": "READY"}]
    assert server["name"] == "pool/pool"


async def test_statistics_are_those_of_what_was_computed(app: PoolApp) -> None:
    async with client_of(app) as client:
        await asyncio.gather(*[client.infer("text", words(4, rows=2)) for _ in range(6)])
        with pytest.raises(InferenceServerException):
            await client.infer("text", words(1, fill=5000))
        (model,) = (await client.get_inference_statistics("text", as_json=True))["model_stats"]
        stats = model["inference_stats"]
        assert (int(stats["success"]["count"]), int(stats["fail"]["count"])) == (6, 1)
        assert int(model["inference_count"]) == 12
        by_size = {int(one["batch_size"]): int(one["compute_infer"]["count"]) for one in model["batch_stats"]}
        assert sum(by_size.values()) == int(model["execution_count"])
        assert sum(rows * count for rows, count in by_size.items()) == 12


async def test_perf_analyzers_sequence_of_calls(app: PoolApp) -> None:
    """Metadata, configuration, statistics, load in windows, statistics again: the sums must add up between them."""
    async with client_of(app) as client:
        metadata = await client.get_model_metadata("text", as_json=True)
        config = (await client.get_model_config("text", as_json=True))["config"]
        assert config.get("max_batch_size", 0) == 0  # so it sends shapes as they are given to it
        assert {one["name"] for one in config["input"]} == {one["name"] for one in metadata["inputs"]}
        assert "sequence_batching" not in config and "ensemble_scheduling" not in config
        before = await counts(client)
        for concurrency in (1, 8):
            for _ in range(4):
                await asyncio.gather(*[client.infer("text", words(24, fill=0)) for _ in range(concurrency)])
        after = await counts(client)
    done = {name: after[name] - before[name] for name in after}
    assert done["success"] == done["inference_count"] == 36
    # It divides by these and stops when they differ.
    assert done["compute_input"] == done["compute_infer"] == done["compute_output"] == done["queue"] == 36
    assert 8 <= done["execution_count"] <= 36


async def counts(client: Any) -> dict[str, int]:
    (model,) = (await client.get_inference_statistics("text", as_json=True))["model_stats"]
    told = {name: int(tally.get("count", 0)) for name, tally in model["inference_stats"].items()}
    return told | {name: int(model.get(name, 0)) for name in ("inference_count", "execution_count")}


async def test_a_stream_is_answered_in_order_and_goes_on_after_an_error(app: PoolApp) -> None:
    def stream() -> list[str]:
        answers: queue.Queue[Any] = queue.Queue()
        with triton.InferenceServerClient(app.address) as client:
            client.start_stream(callback=lambda result, error: answers.put((result, error)))
            for id_, sent in (("a", words(200)), ("b", words(3)[:1]), ("c", words(1))):
                client.async_stream_infer("text", sent, request_id=id_)
            found = [answers.get(timeout=30) for _ in range(3)]
            client.stop_stream()
        return [error.message() if error else result.get_response().id for result, error in found]

    first, error, last = await asyncio.to_thread(stream)
    assert (first, last) == ("a", "c")
    assert "missing input 'mask'" in error


async def test_a_stream_of_the_asynchronous_client(app: PoolApp) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for n in range(1, 5):
            yield {"model_name": "text", "inputs": words(n), "request_id": str(n)}

    async with client_of(app) as client:
        sums = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            sums.append(float(result.as_numpy("sum")[0, 0]))
            if len(sums) == 4:
                break
    assert sums == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("method", "args"), [
    ("get_system_shared_memory_status", ()),
    ("register_system_shared_memory", ("r", "/r", 64)),
    ("get_cuda_shared_memory_status", ()),
    ("register_cuda_shared_memory", ("r", b"aGFuZGxl", 0, 64)),
    ("get_trace_settings", ()),
    ("update_log_settings", ({"log_info": True},)),
    ("unload_model", ("text",)),
])  # fmt: skip
async def test_what_it_does_not_do_it_says(app: PoolApp, method: str, args: tuple[Any, ...]) -> None:
    async with client_of(app) as client:
        with pytest.raises(InferenceServerException, match="not supported") as refused:
            await getattr(client, method)(*args)
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


async def test_an_input_in_shared_memory_is_refused_in_words(app: PoolApp) -> None:
    tensors = [triton.InferInput(name, (1, 4), "INT64") for name in ("ids", "mask")]
    for tensor in tensors:
        tensor.set_shared_memory("region", 32)
    async with client_of(app) as client:
        with pytest.raises(InferenceServerException, match="shared memory") as refused:
            await client.infer("text", tensors)
    assert refused.value.status() in ("StatusCode.UNIMPLEMENTED", "StatusCode.INVALID_ARGUMENT")


async def test_health_is_grpcs_own_too(app: PoolApp) -> None:
    async with grpc.aio.insecure_channel(app.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        app.host.drain()
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_every_answer_carries_the_load_that_a_link_would_tell(app: PoolApp) -> None:
    told = []
    async with grpc.aio.insecure_channel(app.address) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda message: message.SerializeToString(),
        )
        for form in ("text", "json"):
            call = ask(_message(), metadata=(("endpoint-load-metrics-format", form),))
            await call
            trailers = dict(await call.trailing_metadata())
            assert trailers["endpoint-load-metrics"].startswith(form.upper())
            told.append(load_from_text(trailers["endpoint-load-metrics"]))
    first, second = told
    assert first is not None and second is not None
    assert first.epoch == second.epoch == app.host.epoch
    assert first.sequence < second.sequence < app.host.load_report().sequence
    assert (first.queued, first.in_flight) == (0, 0)


def _message() -> Any:
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name="text")
    for name, array in text(3).items():
        message.inputs.add(name=name, datatype="INT64", shape=list(array.shape))
        message.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
    return message
