"""Unmodified tritonclient in its four flavours: every method it has, against both servers.

Its synchronous flavours run in threads, because the servers run in the test's loop: the HTTP one in a single thread,
since its gevent connections belong to the thread that opened them.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as tritongrpc
import tritonclient.grpc.aio as tritongrpc_aio
import tritonclient.http as tritonhttp
import tritonclient.http.aio as tritonhttp_aio
from tritonclient.utils import InferenceServerException

from tests.support.serving.oip_servers import Servers
from tidegate.types import Datatype

pytestmark = pytest.mark.clients

FLAVOURS = {
    "http": tritonhttp,
    "http.aio": tritonhttp_aio,
    "grpc": tritongrpc,
    "grpc.aio": tritongrpc_aio,
}
SEVERAL = pytest.mark.parametrize("flavour", FLAVOURS)


class Client:
    """One flavour, awaited alike."""

    def __init__(self, flavour: str, servers: Servers) -> None:
        self.module: Any = FLAVOURS[flavour]
        self.is_http = flavour.startswith("http")
        self._threads = ThreadPoolExecutor(1 if flavour == "http" else 32)
        self.wrapped = self.module.InferenceServerClient(servers.http if self.is_http else servers.grpc)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.wrapped, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if inspect.iscoroutinefunction(method):
                return await method(*args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(method, *args, **kwargs))

        return call

    async def aclose(self) -> None:
        await self.close()
        self._threads.shutdown()

    def input(self, name: str, array: np.ndarray[Any, Any], datatype: str, **how: Any) -> Any:
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **how)
        return tensor

    def text(self, rows: int = 1, tokens: int = 4, **how: Any) -> list[Any]:
        ids = np.arange(rows * tokens, dtype=np.int64).reshape(rows, tokens)
        return [
            self.input("input_ids", ids, "INT64", **how),
            self.input("attention_mask", np.ones_like(ids), "INT64", **how),
        ]


@asynccontextmanager
async def client_of(flavour: str, servers: Servers) -> AsyncIterator[Client]:
    client = Client(flavour, servers)
    try:
        yield client
    finally:
        await client.aclose()


def field(answer: Any, *path: str) -> Any:
    """The same field of a JSON dict or of a message."""
    for name in path:
        answer = answer[name] if isinstance(answer, dict) else getattr(answer, name)
    return answer


@SEVERAL
async def test_health_and_metadata(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("minilm")
        assert await client.is_model_ready("minilm", "1")
        assert not await client.is_model_ready("minilm", "2")
        assert not await client.is_model_ready("nobody")
        server = await client.get_server_metadata()
        assert field(server, "name") == "tidegate"
        model = await client.get_model_metadata("mirror")
        assert list(field(model, "versions")) == ["3"]
        assert [list(field(one, "shape")) for one in field(model, "inputs")] == [[-1]] * len(Datatype)
        config = await client.get_model_config("minilm", "1")
        config = config if client.is_http else config.config
        assert field(config, "max_batch_size") == 0
        assert [list(field(one, "dims")) for one in field(config, "output")] == [[-1, 384]]
        servers.host.is_ready = False
        assert not await client.is_server_ready()


@SEVERAL
async def test_statistics_and_repository(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        statistics = await client.get_inference_statistics()
        assert [field(one, "name") for one in field(statistics, "model_stats")] == ["minilm", "digits", "mirror"]
        one = await client.get_inference_statistics("digits", "1")
        assert [int(field(model, "inference_stats", "success", "count")) for model in field(one, "model_stats")] == [0]
        index = await client.get_model_repository_index()
        entries = index if client.is_http else index.models
        assert {(field(entry, "name"), field(entry, "state")) for entry in entries} >= {("minilm", "READY")}
        await client.load_model("minilm")
        with pytest.raises(InferenceServerException, match="nobody"):
            await client.load_model("nobody")
        with pytest.raises(InferenceServerException, match="not supported"):
            await client.load_model("minilm", config="{}")
        with pytest.raises(InferenceServerException, match="not supported"):
            await client.unload_model("minilm")


@SEVERAL
@pytest.mark.parametrize(("method", "args"), [
    ("get_trace_settings", ()),
    ("update_trace_settings", ("minilm", {"trace_rate": "1"})),
    ("get_log_settings", ()),
    ("update_log_settings", ({"log_info": True},)),
    ("get_system_shared_memory_status", ()),
    ("register_system_shared_memory", ("r", "/r", 64)),
    ("unregister_system_shared_memory", ()),
    ("get_cuda_shared_memory_status", ()),
    ("register_cuda_shared_memory", ("r", b"aGFuZGxl", 0, 64)),
    ("unregister_cuda_shared_memory", ("r",)),
])  # fmt: skip
async def test_what_is_not_supported_says_so(
    servers: Servers, flavour: str, method: str, args: tuple[Any, ...]
) -> None:
    async with client_of(flavour, servers) as client:
        with pytest.raises(InferenceServerException, match="not supported") as refused:
            await getattr(client, method)(*args)
        assert refused.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


@SEVERAL
async def test_a_timeout_of_zero_is_none(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        await client.infer("minilm", client.text(1), timeout=0)
    assert servers.host.calls[-1].deadline is None


@SEVERAL
async def test_infer_with_everything_it_can_say(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        result = await client.infer(
            "minilm",
            client.text(2),
            model_version="1",
            outputs=[client.module.InferRequestedOutput("sentence_embedding")],
            request_id="q7",
            sequence_id=5,
            sequence_start=True,
            sequence_end=True,
            priority=2,
            timeout=500_000,
            headers={"tidegate-variant": "fp32"},
            parameters={"mine": "x"},
        )
    array = result.as_numpy("sentence_embedding")
    assert (array.shape, array.dtype) == ((2, 384), np.float32)
    assert array[:, 0].tolist() == [6, 22]
    assert field(result.get_response(), "id") == "q7"
    parameters = field(result.get_response(), "parameters")
    served_by = parameters["tidegate-served-by"]
    assert (served_by if client.is_http else served_by.string_param) == "edge/attic"
    (call,) = servers.host.calls
    assert (call.priority, call.variant, call.request.parameters["mine"]) == (2, "fp32", "x")
    assert call.deadline is not None
    assert call.deadline - call.arrived_at == pytest.approx(0.5)


@SEVERAL
async def test_an_output_in_shared_memory_is_refused(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        output = client.module.InferRequestedOutput("sentence_embedding")
        output.set_shared_memory("region", 4 * 384)
        with pytest.raises(InferenceServerException, match="shared memory is not supported"):
            await client.infer("minilm", client.text(1), outputs=[output])


@SEVERAL
async def test_no_requested_outputs_means_all(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        result = await client.infer("minilm", client.text())
    assert result.as_numpy("sentence_embedding").shape == (1, 384)


@SEVERAL
async def test_classes_come_as_texts(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        result = await client.infer(
            "digits",
            [client.input("image", np.zeros((1, 1, 8, 8), np.float32), "FP32")],
            outputs=[client.module.InferRequestedOutput("probabilities", class_count=2)],
        )
    classes = result.as_numpy("probabilities")
    assert [str(item, "utf-8") if isinstance(item, bytes) else item for item in classes[0]] == [
        "0.900000:9",
        "0.800000:8",
    ]


ARRAYS = [
    (datatype.value, np.array([0, 1, 1], dtype=datatype.numpy_name))
    for datatype in Datatype
    if datatype not in (Datatype.BF16, Datatype.BYTES)
] + [
    ("BYTES", np.array([b"a", b"", "né".encode()], dtype=object)),
    ("BF16", np.array([0, 1, -1.5], dtype=ml_dtypes.bfloat16)),
]


@SEVERAL
@pytest.mark.parametrize(("datatype", "array"), ARRAYS, ids=[name for name, _ in ARRAYS])
@pytest.mark.parametrize("size", [3, 0])
async def test_every_datatype_there_and_back(
    servers: Servers, flavour: str, datatype: str, array: np.ndarray[Any, Any], size: int
) -> None:
    array = array[:size]
    async with client_of(flavour, servers) as client:
        result = await client.infer("mirror", [client.input(f"in_{datatype}", array, datatype)])
    back = result.as_numpy(f"out_{datatype}")
    assert back is not None
    assert back.tolist() == array.tolist()


@pytest.mark.parametrize("flavour", ["http", "http.aio"])
@pytest.mark.parametrize(
    ("datatype", "array"), [pair for pair in ARRAYS if pair[0] not in ("FP16", "BF16")],
    ids=[name for name, _ in ARRAYS if name not in ("FP16", "BF16")],
)  # fmt: skip
async def test_every_datatype_that_json_has_there_and_back(
    servers: Servers, flavour: str, datatype: str, array: np.ndarray[Any, Any]
) -> None:
    async with client_of(flavour, servers) as client:
        output = client.module.InferRequestedOutput(f"out_{datatype}", binary_data=False)
        entry = client.input(f"in_{datatype}", array, datatype, binary_data=False)
        result = await client.infer("mirror", [entry], outputs=[output])
    back = result.as_numpy(f"out_{datatype}").tolist()
    assert [item.encode() if isinstance(item, str) else item for item in back] == array.tolist()


@pytest.mark.parametrize("flavour", ["http", "http.aio"])
@pytest.mark.parametrize("up", [None, "gzip", "deflate"])
@pytest.mark.parametrize("down", [None, "gzip", "deflate"])
async def test_http_compression_both_ways(servers: Servers, flavour: str, up: str | None, down: str | None) -> None:
    async with client_of(flavour, servers) as client:
        result = await client.infer(
            "minilm", client.text(), request_compression_algorithm=up, response_compression_algorithm=down
        )
    assert result.as_numpy("sentence_embedding")[0, 0] == 6


@pytest.mark.parametrize("flavour", ["grpc", "grpc.aio"])
@pytest.mark.parametrize("compression", ["gzip", "deflate"])
async def test_grpc_compression(servers: Servers, flavour: str, compression: str) -> None:
    async with client_of(flavour, servers) as client:
        result = await client.infer("minilm", client.text(), compression_algorithm=compression)
    assert result.as_numpy("sentence_embedding")[0, 0] == 6


@SEVERAL
async def test_an_error_reaches_the_caller_in_words_and_the_next_request_works(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        with pytest.raises(InferenceServerException, match="missing input 'attention_mask'") as refused:
            await client.infer("minilm", client.text()[:1])
        assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
        with pytest.raises(InferenceServerException, match="unknown model") as refused:
            await client.infer("nobody", client.text())
        assert refused.value.status() in ("404", "StatusCode.NOT_FOUND")
        assert (await client.infer("minilm", client.text())).as_numpy("sentence_embedding").shape == (1, 384)


async def test_the_async_methods_of_the_synchronous_flavours(servers: Servers) -> None:
    def by_http() -> Any:
        client = tritonhttp.InferenceServerClient(servers.http, concurrency=4)
        try:
            made = [client.async_infer("minilm", Client("http", servers).text()) for _ in range(4)]
            return [result.get_result().as_numpy("sentence_embedding")[0, 0] for result in made]
        finally:
            client.close()

    def by_grpc() -> Any:
        answers: queue.Queue[Any] = queue.Queue()
        with tritongrpc.InferenceServerClient(servers.grpc) as client:
            for _ in range(4):
                client.async_infer(
                    "minilm",
                    Client("grpc", servers).text(),
                    callback=lambda result, error: answers.put((result, error)),
                )
            return [answers.get(timeout=10)[0].as_numpy("sentence_embedding")[0, 0] for _ in range(4)]

    assert await asyncio.to_thread(by_http) == [6] * 4
    assert await asyncio.to_thread(by_grpc) == [6] * 4


async def test_the_synchronous_stream_goes_on_after_an_error(servers: Servers) -> None:
    def stream() -> list[tuple[str, str]]:
        answers: queue.Queue[Any] = queue.Queue()
        with tritongrpc.InferenceServerClient(servers.grpc) as client:
            client.start_stream(callback=lambda result, error: answers.put((result, error)))
            inputs = Client("grpc", servers).text()
            for id_, sent in (("a", inputs), ("b", inputs[:1]), ("c", inputs)):
                client.async_stream_infer("minilm", sent, request_id=id_, enable_empty_final_response=True)
            found = [answers.get(timeout=10) for _ in range(3)]
            client.stop_stream()
        return [
            (result.get_response().id if result else "", error.message() if error else "") for result, error in found
        ]

    answers = await asyncio.to_thread(stream)
    assert [id_ for id_, _ in answers] == ["a", "", "c"]
    assert "missing input 'attention_mask'" in answers[1][1]


async def test_the_asynchronous_stream_goes_on_after_an_error(servers: Servers) -> None:
    async with client_of("grpc.aio", servers) as client:
        inputs = client.text()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for id_, sent in (("a", inputs), ("b", inputs[:1]), ("c", inputs)):
                yield {"model_name": "minilm", "inputs": sent, "request_id": id_}

        found = []
        async for result, error in client.wrapped.stream_infer(requests()):
            found.append(error.message() if error else result.get_response().id)
            if len(found) == 3:
                break
    assert (found[0], "missing input" in found[1], found[2]) == ("a", True, "c")


@pytest.mark.parametrize("flavour", ["http.aio", "grpc", "grpc.aio"])
async def test_thirty_two_at_a_time(servers: Servers, flavour: str) -> None:
    async with client_of(flavour, servers) as client:
        results = await asyncio.gather(*(client.infer("minilm", client.text()) for _ in range(32)))
    assert [result.as_numpy("sentence_embedding")[0, 0] for result in results] == [6] * 32
