"""Every malformed request, over HTTP and gRPC alike: refused with its reason, unseen by the host, and life goes on.

A fault is written once, as a change to a good request, and sent by both protocols. What only one of them can get wrong
(its framing, its sizes) follows below.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from tests.support.serving.oip_requests import (
    ENTRIES,
    GOOD,
    ONES,
    PLAIN,
    Got,
    by_grpc_bytes,
    framed,
    got_by_http,
    http_body,
    ids,
    mask,
)
from tests.support.serving.oip_servers import MAX_BYTES, Servers
from tidegate.oip.grpc.codec import message_from_request
from tidegate.rpc import oip_pb2
from tidegate.types import Datatype, InferRequest, Parameter, RequestedOutput, Tensor


@dataclass(frozen=True)
class Sent:
    """A request as it leaves a client, whatever protocol takes it."""

    request: InferRequest
    headers: Mapping[str, str] = field(default_factory=dict)


def asks(*inputs: Tensor, **changes: Any) -> Sent:
    return Sent(replace(GOOD, inputs=inputs or GOOD.inputs, **changes))


def says(parameters: dict[str, Parameter] | None = None, **headers: str) -> Sent:
    return Sent(
        replace(GOOD, parameters=parameters or {}), {key.replace("_", "-"): value for key, value in headers.items()}
    )


BAD: dict[str, tuple[Sent, str]] = {
    "a rank too few": (asks(ids(3), mask(1, 3)), "must have 2 dimensions"),
    "a rank too many": (asks(ids(1, 1, 3), mask(1, 3)), "must have 2 dimensions"),
    "another datatype": (asks(replace(ids(1, 3), datatype=Datatype.FP64), mask(1, 3)), "must be INT64, got FP64"),
    "a duplicate input": (asks(ids(1, 3), mask(1, 3), mask(1, 3)), "came more than once"),
    "a missing input": (asks(ids(1, 3)), "missing input 'attention_mask'"),
    "an extra input": (asks(ids(1, 3), mask(1, 3), replace(ids(1, 3), name="x")), "unknown input 'x'"),
    "no inputs": (Sent(replace(GOOD, inputs=())), "missing input"),
    "fewer bytes than its shape": (asks(replace(ids(1, 3), shape=(1, 4)), mask(1, 4)), "needs 32 bytes, got 24"),
    "more bytes than its shape": (asks(replace(ids(1, 3), shape=(1, 2)), mask(1, 2)), "needs 16 bytes, got 24"),
    "axes that disagree": (asks(ids(1, 3), mask(1, 2)), "must agree"),
    "an id above the range": (asks(ids(1, 3, fill=30522), mask(1, 3)), "30522, allowed is 0 to 30521"),
    "an id below the range": (asks(ids(1, 3, fill=-1), mask(1, 3)), "is -1, allowed"),
    "a mask of twos": (asks(ids(1, 3), mask(1, 3, fill=2)), "is 2, allowed is 0 to 1"),
    "a sequence of nothing": (asks(ids(1, 0), mask(1, 0)), "must be 1 to 256, got 0"),
    "a sequence of 5,000": (asks(ids(1, 5000), mask(1, 5000)), "must be 1 to 256, got 5000"),
    "an unknown output": (asks(outputs=(RequestedOutput("logits"),)), "unknown output 'logits'"),
    "an output twice": (asks(outputs=(RequestedOutput("sentence_embedding"),) * 2), "more than once"),
    "an odd classification": (
        asks(outputs=(RequestedOutput("sentence_embedding", {"classification": -1}),)), "classification"),
    "a negative priority": (says({"priority": -1}), "'priority' must be"),
    "a huge priority": (says({"priority": 2**63 - 1}), "'priority' must be"),
    "a priority in words": (says({"priority": "high"}), "'priority' must be"),
    "half a priority": (says({"priority": 1.5}), "'priority' must be"),
    "a negative timeout": (says({"timeout": -5}), "'timeout' must be"),
    "a timeout in words": (says({"timeout": "soon"}), "'timeout' must be"),
    "a budget of zero": (says(tidegate_budget_ms="0"), "tidegate-budget-ms must be"),
    "a negative budget": (says(tidegate_budget_ms="-5"), "tidegate-budget-ms must be"),
    "a budget of NaN": (says(tidegate_budget_ms="NaN"), "tidegate-budget-ms must be"),
    "an endless budget": (says(tidegate_budget_ms="inf"), "tidegate-budget-ms must be"),
    "a budget in words": (says(tidegate_budget_ms="soon"), "tidegate-budget-ms must be"),
    "an unknown variant": (says(tidegate_variant="fp64"), "no variant 'fp64'"),
    "two variants": (says({"tidegate-variant": "int8"}, tidegate_variant="fp32"), "demands 'fp32'"),
    "a name of a megabyte": (asks(replace(ids(1, 3), name="x" * 700_000), mask(1, 3)), "unknown input 'xxx"),
    "an id of a megabyte": (asks(id="x" * 700_000), "id has 700000 characters"),
}  # fmt: skip
Send = Callable[[Servers, Sent], Awaitable[Got | None]]


async def by_http(servers: Servers, sent: Sent) -> Got | None:
    body, length = http_body(sent.request)
    headers = {**sent.headers, "Inference-Header-Content-Length": str(length)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{servers.http}/v2/models/{sent.request.model_name}/infer", data=body, headers=headers
        ) as response,
    ):
        return await got_by_http(response)


async def by_grpc(servers: Servers, sent: Sent) -> Got | None:
    return await by_grpc_bytes(
        servers, message_from_request(sent.request).SerializeToString(), tuple(sent.headers.items())
    )


STATUS: dict[Send, dict[str, int | str]] = {
    by_http: {"bad": 400, "unknown": 404, "large": 413},
    by_grpc: {"bad": "INVALID_ARGUMENT", "unknown": "NOT_FOUND", "large": "RESOURCE_EXHAUSTED"},
}
both = pytest.mark.parametrize("send", [by_http, by_grpc])


async def assert_next_request_works(servers: Servers) -> None:
    assert await by_http(servers, Sent(GOOD)) is None
    assert await by_grpc(servers, Sent(GOOD)) is None


@both
@pytest.mark.parametrize("fault", BAD)
async def test_a_malformed_request_is_refused_with_its_reason(servers: Servers, send: Send, fault: str) -> None:
    sent, words = BAD[fault]
    got = await send(servers, sent)
    assert got is not None
    assert (got.status, got.code) == (STATUS[send]["bad"], "invalid_request")
    assert words in got.message
    assert len(got.message) <= 1000
    assert servers.host.calls == []
    assert [type(error).__name__ for _, _, error in servers.refused] == ["InvalidRequest"]
    await assert_next_request_works(servers)


@both
@pytest.mark.parametrize("request_", [replace(GOOD, model_name="nobody"), replace(GOOD, model_name="x" * 3000)])
async def test_an_unknown_model_is_not_found(servers: Servers, send: Send, request_: InferRequest) -> None:
    got = await send(servers, Sent(request_))
    assert got is not None
    assert (got.status, got.code) == (STATUS[send]["unknown"], "model_not_found")
    await assert_next_request_works(servers)


async def test_an_unknown_version_is_not_found(servers: Servers) -> None:
    got = await by_grpc(servers, Sent(replace(GOOD, model_version="2")))
    assert got is not None
    assert got.status == "NOT_FOUND"
    async with aiohttp.ClientSession() as session:
        for version in ("2", "latest", "-1", "%00"):
            url = f"http://{servers.http}/v2/models/minilm/versions/{version}/infer"
            async with session.post(url, data=http_body(GOOD)[0]) as response:
                assert response.status == 404
    await assert_next_request_works(servers)


@both
async def test_a_mask_of_nothing_is_no_fault(servers: Servers, send: Send) -> None:
    assert await send(servers, asks(ids(1, 3), mask(1, 3, fill=0))) is None


# HTTP alone


BAD_BODIES: dict[str, tuple[bytes, dict[str, str], str]] = {
    "truncated binary": (*framed({"inputs": ENTRIES}, ONES, ONES[:-1]), "cut short"),
    "surplus binary": (*framed({"inputs": ENTRIES}, ONES, ONES, b"x"), "take 48 bytes of the binary part, but 49"),
    "no binary at all": (*framed({"inputs": ENTRIES}), "cut short"),
    "a header length beyond the body": (PLAIN, {"Inference-Header-Content-Length": "9999"}, "must be a length"),
    "a negative header length": (PLAIN, {"Inference-Header-Content-Length": "-1"}, "must be a length"),
    "a header length in words": (PLAIN, {"Inference-Header-Content-Length": "all"}, "must be a length"),
    "a header length that cuts the JSON": (PLAIN, {"Inference-Header-Content-Length": "20"}, "JSON is wrong"),
    "a raw body for two inputs": (ONES, {"Inference-Header-Content-Length": "0"}, "needs a model of one input"),
    "nothing": (b"", {}, "JSON is wrong"),
    "no JSON": (b"hello", {}, "JSON is wrong"),
    "deep JSON": (b'{"inputs":' + b"[" * 200_000, {}, "nested too deeply"),
    "deep JSON in a field nobody knows": (b'{"inputs":[],"x":' + b'{"a":' * 100_000, {}, "nested too deeply"),
    "deep JSON in the data": (PLAIN.replace(b"[1, 1, 1]", b"[" * 90_000 + b"]" * 90_000), {}, "nested too deeply"),
    "a text among the numbers": (PLAIN.replace(b"[1, 1, 1]", b'[1, "1", 1]'), {}, "no flat or nested"),
    "half a token": (PLAIN.replace(b"[1, 1, 1]", b"[1, 1.5, 1]"), {}, "no flat or nested"),
    "a parameter of 65 bits": (PLAIN[:-1] + b', "parameters": {"x": 18446744073709551616}}', {}, "at most 64 bits"),
    "a parameter far below zero": (PLAIN[:-1] + b', "parameters": {"x": -9223372036854775809}}', {}, "at most 64 bits"),
    "NaN for a budget in JSON": (PLAIN[:-1] + b', "parameters": {"timeout": NaN}}', {}, "JSON is wrong"),
    "a body that says gzip and is none": (PLAIN, {"Content-Encoding": "gzip"}, "no valid gzip"),
    "a body that says deflate and is none": (PLAIN, {"Content-Encoding": "deflate"}, "no valid deflate"),
    "an encoding that is not offered": (PLAIN, {"Content-Encoding": "br"}, "use gzip or deflate"),
    "a gzip that ends early": (gzip.compress(PLAIN)[:40], {"Content-Encoding": "gzip"}, "no valid gzip"),
    "a gzip without its trailer": (gzip.compress(PLAIN)[:-8], {"Content-Encoding": "gzip"}, "no valid gzip"),
    "a gzip with half a trailer": (gzip.compress(PLAIN)[:-3], {"Content-Encoding": "gzip"}, "no valid gzip"),
    "a gzip and something after it": (gzip.compress(PLAIN) + b"more", {"Content-Encoding": "gzip"}, "no valid gzip"),
    "a deflate without its trailer": (zlib.compress(PLAIN)[:-4], {"Content-Encoding": "deflate"}, "no valid deflate"),
    "a deflate and something after it": (
        zlib.compress(PLAIN) + b"m",
        {"Content-Encoding": "deflate"},
        "no valid deflate",
    ),
}


@pytest.mark.parametrize("fault", BAD_BODIES)
async def test_a_malformed_body_is_refused_with_its_reason(
    servers: Servers, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, headers, words = BAD_BODIES[fault]
    url = f"http://{servers.http}/v2/models/minilm/infer"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, data=body, headers=headers) as response:
            got = await got_by_http(response)
        assert got is not None
        assert (got.status, got.code) == (400, "invalid_request")
        assert words in got.message
        async with session.post(url, data=PLAIN) as response:  # the same client goes on
            assert response.status == 200
    assert len(servers.host.calls) == 1
    assert caplog.records == []
    await assert_next_request_works(servers)


BOMB = gzip.compress(b" " * (20 * MAX_BYTES))


@pytest.mark.parametrize(
    ("body", "headers"),
    [(b"x" * (MAX_BYTES + 1), {}), (BOMB, {"Content-Encoding": "gzip"})],
    ids=["a large body", "a small bomb"],
)
async def test_a_body_over_the_limit_is_413(servers: Servers, body: bytes, headers: dict[str, str]) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/v2/models/minilm/infer", "/v2/repository/index"):
            data = io.BytesIO(body)  # aiohttp's client warns of large bytes
            async with session.post(f"http://{servers.http}{path}", data=data, headers=headers) as response:
                got = await got_by_http(response)
            assert got is not None
            assert (got.status, got.code) == (413, "too_large")
            assert str(MAX_BYTES) in got.message
    await assert_next_request_works(servers)


async def test_a_body_of_chunks_over_the_limit_is_413(servers: Servers) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * (MAX_BYTES // 8)

    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{servers.http}/v2/models/minilm/infer", data=chunks()) as response,
    ):
        assert response.status == 413
    await assert_next_request_works(servers)


@pytest.mark.parametrize(("verb", "path", "status"), [
    ("GET", "/v2/models/minilm/infer", 405),
    ("DELETE", "/v2/models/minilm", 405),
    ("POST", "/v2/health/live", 405),
    ("GET", "/v2/nothing", 404),
    ("GET", "/", 404),
    ("GET", "/v2/models/nobody", 404),
    ("GET", "/v2/models/nobody/config", 404),
    ("GET", "/v2/models/nobody/ready", 404),
    ("GET", "/v2/models/nobody/stats", 404),
    ("POST", "/v2/repository/models/nobody/load", 404),
    ("POST", "/v2/repository/models/nobody/unload", 404),
    ("POST", "/v2/repository/models/minilm/unload", 501),
    ("GET", "/v2/trace/setting", 501),
    ("POST", "/v2/logging", 501),
    ("GET", "/v2/systemsharedmemory/status", 501),
    ("POST", "/v2/cudasharedmemory/region/r/register", 501),
    ("POST", "/v2/models/minilm/generate_stream", 501),
])  # fmt: skip
async def test_a_wrong_route_or_verb_is_refused_in_words(servers: Servers, verb: str, path: str, status: int) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.request(verb, f"http://{servers.http}{path}") as response,
    ):
        got = await got_by_http(response)
        assert got is not None
        assert (got.status, bool(got.message)) == (status, True)
        assert ("Allow" in response.headers) is (status == 405)


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"x":' + b"[" * 100_000])
async def test_a_repository_call_with_a_bad_body_is_refused(servers: Servers, body: bytes) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/v2/repository/index", "/v2/repository/models/minilm/load"):
            async with session.post(f"http://{servers.http}{path}", data=body) as response:
                assert response.status == 400


# gRPC alone


async def test_bytes_that_are_no_message_are_the_callers_fault(servers: Servers) -> None:
    got = await by_grpc_bytes(servers, b"\xff\xff\xff\xff")
    assert got == Got("INVALID_ARGUMENT", "the bytes that came are no ModelInferRequest", "invalid_request")
    await assert_next_request_works(servers)


@pytest.mark.slow
async def test_a_message_over_the_limit_is_resource_exhausted(servers: Servers) -> None:
    got = await by_grpc_bytes(servers, b"x" * (MAX_BYTES + 1))
    assert got is not None
    assert got.status == "RESOURCE_EXHAUSTED"
    await assert_next_request_works(servers)


async def test_raw_and_typed_contents_are_never_mixed(servers: Servers) -> None:
    message = message_from_request(GOOD)
    message.inputs[0].contents.int64_contents.extend([1, 1, 1])
    got = await by_grpc_bytes(servers, message.SerializeToString())
    assert got is not None
    assert (got.status, "use one of them" in got.message) == ("INVALID_ARGUMENT", True)
    await assert_next_request_works(servers)


async def test_a_count_of_raw_contents_that_fits_no_inputs_is_refused(servers: Servers) -> None:
    message = message_from_request(GOOD)
    message.raw_input_contents.append(b"12345678")
    got = await by_grpc_bytes(servers, message.SerializeToString())
    assert got is not None
    assert (got.status, "there must be one for each" in got.message) == ("INVALID_ARGUMENT", True)
    await assert_next_request_works(servers)


async def test_typed_contents_of_another_count_are_refused(servers: Servers) -> None:
    message = oip_pb2.ModelInferRequest(model_name="minilm")
    for name in ("input_ids", "attention_mask"):
        message.inputs.add(name=name, datatype="INT64", shape=[1, 3]).contents.int64_contents.extend([1, 1])
    got = await by_grpc_bytes(servers, message.SerializeToString())
    assert got is not None
    assert (got.status, "needs 24 bytes, got 16" in got.message) == ("INVALID_ARGUMENT", True)
