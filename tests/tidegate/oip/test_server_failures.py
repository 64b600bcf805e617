"""Every failure of the host as the same class at the client, and callers that leave before their answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.serving.host import FakeHost
from tests.support.serving.oip_calls import INFER, STREAM, grpc_infer, http_infer, raising
from tests.support.serving.oip_requests import GOOD
from tests.support.serving.oip_servers import MAX_BYTES, Servers
from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.grpc.server import OipService
from tidegate.oip.http.codec import HEADER_LENGTH_KEY
from tidegate.outcome import ERRORS, DeadlineExceeded, NothingAlive, Overloaded, ServeError, error_from_code
from tidegate.types import Reply

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


@pytest.mark.slow
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


HALF = {"name": "out_FP16"}
INPUT = {"name": "in_FP16", "datatype": "FP16", "shape": [1], "parameters": {"binary_data_size": 2}}


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"outputs": [HALF]}, 400),
        ({"outputs": [HALF, {"name": "out_FP32"}], "parameters": {"binary_data_output": False}}, 400),
        ({}, 400),  # all of them
        ({"outputs": [{**HALF, "parameters": {"binary_data": True}}]}, 200),
        ({"outputs": [{**HALF, "parameters": {"classification": 1}}]}, 200),
        ({"parameters": {"binary_data_output": True}}, 200),
    ],
)
async def test_what_could_not_be_answered_in_json_is_refused_before_it_is_computed(
    servers: Servers, asked: dict[str, Any], status: int
) -> None:
    head = json.dumps({"inputs": [INPUT], **asked}).encode()
    url, headers = f"http://{servers.http}/v2/models/mirror/infer", {HEADER_LENGTH_KEY: str(len(head))}
    async with aiohttp.ClientSession() as session, session.post(url, data=head + b"\0<", headers=headers) as response:
        assert response.status == status, await response.text()
    assert len(servers.host.calls) == (status == 200)
    assert [error.code for _, _, error in servers.refused] == ([] if status == 200 else ["invalid_request"])


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
    OipService(host, max_message_bytes=100).add_to(server)
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
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        asking = asyncio.ensure_future(http_infer(session, servers))
        await servers.host.arrived.wait()
        asking.cancel()
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
        async with asyncio.timeout(30):
            await servers.host.arrived.wait()
            call.cancel()
            await servers.host.cancelled.wait()


async def test_a_grpc_deadline_that_passes_cancels_the_host(servers: Servers) -> None:
    servers.host.hold = asyncio.Event()
    for timeout_s in (0.05, 2.0, 20.0):  # on a machine that stands still a short one may pass before it got there
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await grpc_infer(servers, timeout=timeout_s)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if servers.host.calls:
            break
    async with asyncio.timeout(30):
        await servers.host.cancelled.wait()
