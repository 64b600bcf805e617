"""Both servers on valid requests: answers carry their headers, and all parameters of the caller reach the host."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from yarl import URL

from tests.support.serving.oip_calls import TRACE, WORDS, grpc_infer, http_infer
from tests.support.serving.oip_requests import GOOD, PLAIN, http_body
from tests.support.serving.oip_servers import Servers
from tidegate.oip.grpc.codec import response_from_message
from tidegate.oip.orca import load_from_text
from tidegate.types import LoadReport, Reply

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


# Compression


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_bodies_are_compressed_both_ways_on_request(servers: Servers, encoding: str, pack: Any) -> None:
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
