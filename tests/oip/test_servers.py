"""What both servers promise beside refusing rubbish: budgets, answers that declare themselves, cancellation, health."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import aiohttp
import grpc
import msgspec
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace
from yarl import URL

from tests.oip.test_malformed import GOOD, PLAIN, http_body
from tests.support.host import FakeHost
from tests.support.oip_servers import MAX_BYTES, Servers
from tidegate.oip.grpc import message_from_request, response_from_message
from tidegate.oip.grpc_server import STREAM_WINDOW, OipService, add_oip_service, server_options
from tidegate.oip.health import HealthService
from tidegate.oip.http_server import OipRoutes
from tidegate.oip.orca import load_from_text
from tidegate.outcome import (
    ERRORS,
    DeadlineExceeded,
    NothingAlive,
    Overloaded,
    ServeError,
    error_from_code,
)
from tidegate.rpc import oip_pb2
from tidegate.types import Call, LoadReport, Reply

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
ROUTE = "cheapest; variant=int8; attempts=1; hedged=0; fallback=0; degraded=0; provisional=0"
WORDS = {
    "tidegate-served-by": "edge/attic",
    "tidegate-route": ROUTE,
    "tidegate-budget-left-ms": "1874.2",
    "server-timing": "queue;dur=1.000, compute;dur=4.000",
}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def raising(error: Exception) -> Any:
    def answer(call: Call) -> Reply:
        raise error

    return answer


def http_infer(session: aiohttp.ClientSession, servers: Servers, **options: Any) -> Any:
    return session.post(f"http://{servers.http}/v2/models/minilm/infer", **{"data": PLAIN, **options})


async def grpc_infer(servers: Servers, request: Any = GOOD, **options: Any) -> tuple[Any, dict[str, Any]]:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        call = channel.unary_unary(INFER)(message_from_request(request).SerializeToString(), **options)
        answer = oip_pb2.ModelInferResponse.FromString(await call)
        return answer, dict(await call.trailing_metadata())


# An answer declares itself


async def test_an_http_answer_says_where_it_was_made_in_headers_and_parameters(servers: Servers) -> None:
    async with aiohttp.ClientSession() as session, http_infer(session, servers) as response:
        body = await response.json()
    assert {key: response.headers[key] for key in WORDS} == WORDS
    assert body["parameters"] == WORDS
    assert response.headers["Content-Type"] == "application/json"


async def test_a_grpc_answer_says_it_in_trailing_metadata_and_parameters(servers: Servers) -> None:
    answer, trailers = await grpc_infer(servers)
    assert trailers == WORDS
    assert response_from_message(answer).parameters == WORDS


async def test_a_targets_load_and_the_callers_trace_come_back(servers: Servers) -> None:
    load = LoadReport(7, 3, 1, 2, 0.5)
    response = servers.host.computed
    servers.host.answer = lambda call: Reply(response(call).response, load=load)
    _, trailers = await grpc_infer(servers, metadata=(("traceparent", TRACE),))
    assert load_from_text(trailers["endpoint-load-metrics"]) == load
    assert trailers["traceparent"] == TRACE
    async with aiohttp.ClientSession() as session, http_infer(session, servers, headers={"Traceparent": TRACE}) as got:
        assert load_from_text(got.headers["endpoint-load-metrics"]) == load
        assert got.headers["traceparent"] == TRACE


async def test_a_caller_may_have_the_load_as_json(servers: Servers) -> None:
    load = LoadReport(7, 3, 1, 2, 0.5)
    response = servers.host.computed
    servers.host.answer = lambda call: Reply(response(call).response, load=load)
    _, trailers = await grpc_infer(servers, metadata=(("endpoint-load-metrics-format", "json"),))
    assert trailers["endpoint-load-metrics"].startswith('JSON {"named_metrics":{"tidegate_epoch":7,')
    wish = {"Endpoint-Load-Metrics-Format": "JSON"}
    async with aiohttp.ClientSession() as session, http_infer(session, servers, headers=wish) as got:
        assert got.headers["endpoint-load-metrics"] == trailers["endpoint-load-metrics"]
    assert load_from_text(trailers["endpoint-load-metrics"]) == load


# What the caller said reaches the host


async def test_what_an_http_caller_says_reaches_the_host(servers: Servers) -> None:
    headers = {
        "Tidegate-Budget-Ms": "900",
        "Tidegate-Variant": "fp32",
        "Traceparent": TRACE,
        "Authorization": "Bearer key",
        "X-Stainless-Read-Timeout": "600",
        "Cookie": "private",
    }
    body = PLAIN[:-1] + b', "id": "q7", "parameters": {"priority": 2, "timeout": 800000, "mine": "x"}}'
    async with aiohttp.ClientSession() as session, http_infer(session, servers, data=body, headers=headers) as response:
        assert (await response.json())["id"] == "q7"
    (call,) = servers.host.calls
    assert (call.protocol, call.priority, call.variant) == ("oip-http", 2, "fp32")
    assert call.deadline is not None
    assert call.deadline - call.arrived_at == pytest.approx(0.8)
    assert call.request.parameters == {"priority": 2, "timeout": 800000, "mine": "x"}
    assert call.headers == {
        "tidegate-budget-ms": "900",
        "tidegate-variant": "fp32",
        "traceparent": TRACE,
        "x-stainless-read-timeout": "600",
    }


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v2/models/minilm/infer", {}),
        ("/v2/models/minilm/versions/1/infer", {}),
        ("/v2/models/mini%6Cm/infer", {}),
        ("/v2/models/minilm/infer?x=1", {}),
        ("/v2/models/minilm/infer", {"Expect": "100-continue"}),
    ],
)
async def test_however_its_path_is_written_a_request_is_answered_alike(
    servers: Servers, path: str, headers: dict[str, str]
) -> None:
    url = URL(f"http://{servers.http}{path}", encoded=True)
    async with aiohttp.ClientSession() as session, session.post(url, data=PLAIN, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["model_name"] == "minilm"


async def test_the_deadline_of_a_grpc_call_is_a_budget(servers: Servers) -> None:
    await grpc_infer(servers, timeout=60.0)
    await grpc_infer(servers, timeout=60.0, metadata=(("tidegate-budget-ms", "900"), ("tidegate-variant", "int8")))
    await grpc_infer(servers)
    by_timeout, by_header, by_nothing = servers.host.calls
    assert by_timeout.deadline is not None
    assert 30 < by_timeout.deadline - by_timeout.arrived_at < 61  # grpc rounds what it sends
    assert by_header.deadline is not None
    assert by_header.deadline - by_header.arrived_at == pytest.approx(0.9)
    assert (by_header.variant, by_header.protocol) == ("int8", "oip-grpc")
    assert by_nothing.deadline is None


async def test_binary_metadata_is_no_header(servers: Servers) -> None:
    await grpc_infer(servers, metadata=(("tidegate-x-bin", b"\x00\xff"),))
    assert servers.host.calls[0].headers == {}


async def test_raw_tensors_reach_the_host_as_the_bytes_that_came(servers: Servers) -> None:
    await grpc_infer(servers)
    body, length = http_body(GOOD)
    headers = {"Inference-Header-Content-Length": str(length)}
    async with aiohttp.ClientSession() as session, http_infer(session, servers, data=body, headers=headers):
        pass
    for call in servers.host.calls:
        assert [bytes(tensor.raw) for tensor in call.request.inputs] == [t.raw for t in GOOD.inputs]
    assert isinstance(servers.host.calls[1].request.inputs[0].raw, memoryview)


# Every failure of the host


@pytest.mark.parametrize("kind", ERRORS)
async def test_every_error_of_the_host_is_the_same_class_again_at_the_client(
    servers: Servers, kind: type[ServeError]
) -> None:
    servers.host.answer = raising(kind("the reason"))
    async with aiohttp.ClientSession() as session, http_infer(session, servers) as response:
        told = await response.json()
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["tidegate-refused"] == kind.code
    assert (type(error_from_code(told["code"], "")), told["error"]) == (kind, "the reason")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await grpc_infer(servers)
    trailers = dict(refused.value.trailing_metadata() or ())
    assert (trailers["tidegate-code"], refused.value.details()) == (kind.code, "the reason")
    assert servers.refused == []  # the host saw these itself


@pytest.mark.parametrize(("error", "status", "headers", "trailers"), [
    (Overloaded("full", retry_after_s=0.02), 429, {"retry-after-ms": "20", "retry-after": "1"},
     {"retry-after-ms": "20", "grpc-retry-pushback-ms": "20"}),
    (NothingAlive("none"), 503, {}, {"grpc-retry-pushback-ms": "-1"}),
    (DeadlineExceeded("late"), 504, {"x-should-retry": "false"}, {}),
])  # fmt: skip
async def test_a_refusal_says_when_and_whether_to_try_again(
    servers: Servers, error: ServeError, status: int, headers: dict[str, str], trailers: dict[str, str]
) -> None:
    servers.host.answer = raising(error)
    async with aiohttp.ClientSession() as session, http_infer(session, servers) as response:
        assert response.status == status
        assert {key: response.headers.get(key) for key in headers} == headers
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await grpc_infer(servers)
    assert trailers.items() <= dict(refused.value.trailing_metadata() or ()).items()


async def test_a_defect_is_logged_in_full_and_told_in_two_words(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.host.answer = raising(RuntimeError("password=hunter2"))
    async with aiohttp.ClientSession() as session, http_infer(session, servers) as response:
        assert (response.status, await response.json()) == (500, {"error": "internal error", "code": "internal"})
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await grpc_infer(servers)
    assert (refused.value.code().name, refused.value.details()) == ("INTERNAL", "internal error")
    assert "hunter2" in capsys.readouterr().out


async def test_an_answer_over_the_limit_is_refused_by_grpc_with_the_reason(servers: Servers) -> None:
    rows = np.zeros((64, 4), "<i8")
    request = _text(rows)
    big = servers.host.computed
    servers.host.answer = lambda call: _grown(big(call), MAX_BYTES)
    with pytest.raises(grpc.aio.AioRpcError, match="the answer has"):
        await grpc_infer(servers, request)


def _text(rows: np.ndarray[Any, Any]) -> Any:
    tensors = [replace(tensor, shape=rows.shape, raw=rows.tobytes()) for tensor in GOOD.inputs]
    return replace(GOOD, inputs=tuple(tensors))


def _grown(reply: Reply, size: int) -> Reply:
    tensor = replace(reply.response.outputs[0], raw=b"x" * size)
    return replace(reply, response=replace(reply.response, outputs=(tensor,)))


async def test_a_service_bounds_messages_also_on_a_server_made_without_its_options() -> None:
    host = FakeHost()
    server = grpc.aio.server()
    add_oip_service(server, host, max_message_bytes=100)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError, match="at most 100 may come"):
            await grpc_infer(Servers(host, "", address))
    finally:
        await server.stop(0)


# A caller that leaves


async def test_an_http_caller_that_leaves_cancels_the_host(servers: Servers) -> None:
    servers.host.hold = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(TimeoutError):
            async with http_infer(session, servers, timeout=aiohttp.ClientTimeout(total=0.05)):
                pass
    async with asyncio.timeout(5):
        await servers.host.cancelled.wait()


async def test_a_caller_that_leaves_within_its_body_leaves_no_trace(
    servers: Servers, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, port = servers.http.partition(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(name, int(port))
        writer.write(b"POST /v2/models/minilm/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    async with aiohttp.ClientSession() as session, http_infer(session, servers) as response:
        assert response.status == 200
    assert (caplog.records, capsys.readouterr().out) == ([], "")
    assert len(servers.host.calls) == 1


@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_a_grpc_caller_that_leaves_cancels_the_host(servers: Servers, path: str) -> None:
    servers.host.hold = asyncio.Event()
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        raw = message_from_request(GOOD).SerializeToString()
        if path == INFER:
            call: Any = channel.unary_unary(path)(raw)
        else:
            call = channel.stream_stream(path)()
            await call.write(raw)
        async with asyncio.timeout(5):
            await servers.host.arrived.wait()
            call.cancel()
            await servers.host.cancelled.wait()


async def test_a_grpc_deadline_that_passes_cancels_the_host(servers: Servers) -> None:
    servers.host.hold = asyncio.Event()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await grpc_infer(servers, timeout=0.05)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await servers.host.cancelled.wait()


# Compression


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_bodies_are_compressed_both_ways_for_who_asks(servers: Servers, encoding: str, pack: Any) -> None:
    body, length = http_body(GOOD)
    headers = {
        "Content-Encoding": encoding,
        "Accept-Encoding": encoding,
        "Inference-Header-Content-Length": str(length),  # of what comes out
    }
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        http_infer(session, servers, data=pack(body), headers=headers) as response,
    ):
        assert (response.status, response.headers["Content-Encoding"]) == (200, encoding)
        packed = await response.read()
    text = gzip.decompress(packed) if encoding == "gzip" else zlib.decompress(packed)
    assert msgspec.json.decode(text)["model_name"] == "minilm"


@pytest.mark.parametrize("accepted", ["gzip, deflate, br", "br", "zstd", "identity", "*"])
async def test_a_library_that_announces_everything_gets_plain_answers(servers: Servers, accepted: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        http_infer(session, servers, headers={"Accept-Encoding": accepted}) as response,
    ):
        assert "Content-Encoding" not in response.headers
        assert response.status == 200


async def test_a_large_answer_is_compressed_beside_the_loop(servers: Servers) -> None:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [64, 2], "data": [1] * 128}
        for name in ("input_ids", "attention_mask")
    ]
    data = msgspec.json.encode({"inputs": inputs})
    async with (
        aiohttp.ClientSession() as session,
        http_infer(session, servers, data=data, headers={"Accept-Encoding": "gzip"}) as response,
    ):
        body = await response.json()
    assert len(body["outputs"][0]["data"]) == 64 * 384


# Raw bodies, classes


async def test_a_body_of_one_inputs_bytes_is_answered_with_bytes(servers: Servers) -> None:
    image = np.zeros((2, 1, 8, 8), "<f4").tobytes()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{servers.http}/v2/models/digits/versions/1/infer",
            data=image,
            headers={"Inference-Header-Content-Length": "0"},
        ) as response,
    ):
        length = int(response.headers["Inference-Header-Content-Length"])
        body = await response.read()
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert np.frombuffer(body[length:], "<f4").shape == (20,)


async def test_classes_are_worked_out_here_and_the_host_never_hears_of_them(servers: Servers) -> None:
    body = {
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0] * 64}],
        "outputs": [{"name": "probabilities", "parameters": {"classification": 2}}],
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{servers.http}/v2/models/digits/infer", data=msgspec.json.encode(body)) as response,
    ):
        (output,) = (await response.json())["outputs"]
    assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [1, 2], ["0.900000:9", "0.800000:8"])
    assert servers.host.calls[0].request.outputs[0].parameters == {}


# Streams


async def test_a_stream_answers_in_order_and_goes_on_after_an_error(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        call = channel.stream_stream(STREAM)(_stream(["a", "bad", "rubbish", "c"]))
        answers = [oip_pb2.ModelStreamInferResponse.FromString(raw) async for raw in call]
    assert [answer.infer_response.id for answer in answers] == ["a", "bad", "", "c"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, True, False]
    assert answers[1].infer_response.parameters["tidegate-code"].string_param == "model_not_found"
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)
    assert answers[0].infer_response.parameters["tidegate-served-by"].string_param == "edge/attic"


async def test_a_stream_of_a_strict_client_ends_with_the_real_status(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        call = channel.stream_stream(STREAM)(_stream(["bad", "c"]), metadata=(("triton_grpc_error", "true"),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict(refused.value.trailing_metadata() or ())["tidegate-code"] == "model_not_found"


async def test_a_stream_works_on_several_at_a_time_but_on_no_more_than_its_window(servers: Servers) -> None:
    servers.host.hold = asyncio.Event()
    count = STREAM_WINDOW * 2
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        call = channel.stream_stream(STREAM)(_stream([str(index) for index in range(count)]))
        reading = asyncio.ensure_future(_ids(call))
        async with asyncio.timeout(5):
            while len(servers.host.calls) < STREAM_WINDOW:
                await asyncio.wait([reading], timeout=0.01)
        assert len(servers.host.calls) <= STREAM_WINDOW + 2
        servers.host.hold.set()
        assert await reading == [str(index) for index in range(count)]


def _stream(ids: list[str]) -> Any:
    async def messages() -> Any:
        for id_ in ids:
            request = replace(GOOD, id=id_, model_name="nobody" if id_ == "bad" else "minilm")
            yield b"\xff\xff" if id_ == "rubbish" else message_from_request(request).SerializeToString()

    return messages()


async def _ids(call: Any) -> list[str]:
    return [oip_pb2.ModelStreamInferResponse.FromString(raw).infer_response.id async for raw in call]


# Health, reflection, options


async def test_health_is_the_hosts_own_word(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for ready, status in ((True, "SERVING"), (False, "NOT_SERVING")):
            servers.host.is_ready = ready
            for service in ("", "inference.GRPCInferenceService"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_of_health_is_told_at_once(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        for service, status in (("", health_pb2.HealthCheckResponse.SERVING), ("other", 3)):
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
            assert (await watching.read()).status == status
            watching.cancel()


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_http_readiness_has_a_body_that_kserve_can_parse(servers: Servers, ready: bool, status: int) -> None:
    servers.host.is_ready = ready
    async with aiohttp.ClientSession(f"http://{servers.http}") as session:
        async with session.get("/v2/health/live") as response:
            assert (response.status, await response.json()) == (200, {"live": True})
        async with session.get("/v2/health/ready") as response:
            assert (response.status, await response.json()) == (status, {"live": True, "ready": ready})
        async with session.get("/v2/models/minilm/versions/1/ready") as response:
            assert (response.status, await response.json()) == (status, {"name": "minilm", "ready": ready})


async def test_the_index_can_be_of_ready_models_only(servers: Servers) -> None:
    servers.host.is_ready = False
    async with aiohttp.ClientSession(f"http://{servers.http}") as session:
        async with session.post("/v2/repository/index") as response:
            assert {entry["state"] for entry in await response.json()} == {"UNAVAILABLE"}
        async with session.post("/v2/repository/index", data=b'{"ready":true}') as response:
            assert await response.json() == []


async def test_reflection_describes_the_public_service(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            file = descriptor_pb2.FileDescriptorProto()
            file.ParseFromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert file.package == "inference"
    methods = {method.name: method for method in file.service[0].method}
    assert methods["ModelInfer"].input_type == ".inference.ModelInferRequest"
    assert methods["ModelStreamInfer"].server_streaming
    assert "tidegate" not in str(file)


async def test_a_second_server_on_the_same_port_fails(servers: Servers) -> None:
    second = grpc.aio.server(options=server_options(MAX_BYTES))
    with pytest.raises(RuntimeError):
        second.add_insecure_port(servers.grpc)


def test_what_holds_state_says_so_in_a_line() -> None:
    host = FakeHost()
    assert repr(OipService(host, max_message_bytes=1)) == "<OipService tidegate 3 models>"
    assert repr(OipRoutes(host, max_body_bytes=1)) == "<OipRoutes tidegate 3 models>"
    assert repr(HealthService(host, ())) == "<HealthService tidegate serving>"
