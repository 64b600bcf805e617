"""What one request may hold: each limit at its number and one past it, and what is counted before it is parsed."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import struct
import tracemalloc
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.serving.host import FakeHost
from tests.support.serving.oip_requests import PLAIN, by_grpc_bytes, got_by_http
from tests.support.serving.oip_servers import MAX_BYTES, Servers, serving
from tidegate import clock
from tidegate.oip.body_budget import BodyLimits, BodyMemory
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.grpc.codec import request_from_bytes, response_from_bytes
from tidegate.oip.grpc.message_bounds import MAX_FIELDS, SMALL_BYTES, NoMessage, check_envelope
from tidegate.oip.http.codec import decode_request
from tidegate.oip.http.json_bounds import _outside_strings, check_json
from tidegate.outcome import BadAnswer, InvalidRequest, Overloaded, ServeError, TooLarge
from tidegate.rpc import oip_pb2
from tidegate.types import InferRequest


def entry(shape: list[int], data: list[Any], datatype: str = "INT64", **parameters: str) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data, "parameters": parameters}


def by_json(limits: ContentLimits, **body: Any) -> InferRequest:
    return decode_request(json.dumps(body).encode(), header_length=None, model_name="m", limits=limits).request


def by_message(limits: ContentLimits, **body: Any) -> InferRequest:
    """The same request as a message; what has a JSON form only is not used with it."""
    message = oip_pb2.ModelInferRequest(model_name="m", outputs=body.get("outputs", ()))
    for name, value in body.get("parameters", {}).items():
        message.parameters[name].string_param = value
    for one in body["inputs"]:
        tensor = message.inputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        for name, value in one["parameters"].items():
            tensor.parameters[name].string_param = value
        if one["datatype"] == "BYTES":
            tensor.contents.bytes_contents.extend([item.encode() for item in one["data"]])
        else:
            tensor.contents.int64_contents.extend(one["data"])
    return request_from_bytes(message.SerializeToString(), limits)


ONE = entry([1], [1])
# What is just allowed, what is one past it, and the key that the refusal names.
EDGES: dict[str, tuple[ContentLimits, dict[str, Any], dict[str, Any]]] = {
    "max_tensors": (ContentLimits(max_tensors=2), {"inputs": [ONE] * 2}, {"inputs": [ONE] * 3}),
    "max_tensors of outputs": (
        ContentLimits(max_tensors=2),
        {"inputs": [ONE], "outputs": [{"name": "y"}] * 2},
        {"inputs": [ONE], "outputs": [{"name": "y"}] * 3},
    ),
    "max_rank": (
        ContentLimits(max_rank=3),
        {"inputs": [entry([1, 1, 1], [1])]},
        {"inputs": [entry([1, 1, 1, 1], [1])]},
    ),
    "max_elements": (
        ContentLimits(max_elements=4),
        {"inputs": [entry([2, 2], [1, 2, 3, 4])]},
        {"inputs": [entry([5], [1, 2, 3, 4, 5])]},
    ),
    "max_strings": (
        ContentLimits(max_strings=3),
        {"inputs": [entry([2], ["a", "b"], "BYTES"), entry([1], ["c"], "BYTES")]},
        {"inputs": [entry([2], ["a", "b"], "BYTES"), entry([2], ["c", "d"], "BYTES")]},
    ),
    "max_string_bytes": (
        ContentLimits(max_string_bytes=4),
        {"inputs": [entry([1], ["abcd"], "BYTES")]},
        {"inputs": [entry([1], ["abcde"], "BYTES")]},
    ),
    "max_string_bytes of a parameter": (
        ContentLimits(max_string_bytes=4),
        {"inputs": [ONE], "parameters": {"a": "abcd"}},
        {"inputs": [ONE], "parameters": {"a": "abcde"}},
    ),
    "max_parameters": (
        ContentLimits(max_parameters=2),
        {"inputs": [entry([1], [1], a="", b="")]},
        {"inputs": [entry([1], [1], a="", b="", c="")]},
    ),
}


@pytest.mark.parametrize("read", [by_json, by_message])
@pytest.mark.parametrize("edge", EDGES)
def test_a_limit_lets_in_what_is_at_it_and_names_itself_past_it(read: Any, edge: str) -> None:
    limits, allowed, too_much = EDGES[edge]

    read(limits, **allowed)

    with pytest.raises(ServeError, match=edge.split()[0]):
        read(limits, **too_much)


# JSON, counted before it is parsed


def nested(levels: int) -> bytes:
    return b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_json_may_be_as_deep_as_the_limit_and_no_deeper() -> None:
    limits = ContentLimits(max_json_depth=5)
    check_json(nested(5), limits)
    with pytest.raises(InvalidRequest, match="nested too deeply: at most 5 levels"):
        check_json(nested(6), limits)


def test_brackets_in_strings_and_side_by_side_are_not_depth() -> None:
    limits = ContentLimits(max_json_depth=2)
    check_json(json.dumps({"a": '[[[["[[[[\\', "b": [], "c": {}, "d": []}).encode(), limits)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\[]{},'), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@pytest.mark.slow
@given(JSON)
def test_the_depth_that_is_counted_is_that_of_the_value(value: Any) -> None:
    text, depth = json.dumps(value).encode(), depth_of(value)
    check_json(text, ContentLimits(max_json_depth=depth))
    if depth:
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            check_json(text, ContentLimits(max_json_depth=depth - 1))


ESCAPED = re.compile(rb"\\.", re.DOTALL)  # what an escape is, in as few words as can be


@given(JSON)
def test_what_is_outside_strings_is_told_by_escapes_from_left_to_right(value: Any) -> None:
    text = json.dumps(value).encode()
    assert _outside_strings(text) == b"".join(ESCAPED.sub(b"", text).split(b'"')[::2])


@given(st.text(alphabet='a"\\[,').map(str.encode))
def test_of_what_is_no_json_only_escapes_outside_strings_are_told_otherwise(text: bytes) -> None:
    assert ESCAPED.sub(b"", _outside_strings(text)) == b"".join(ESCAPED.sub(b"", text).split(b'"')[::2])


@pytest.mark.slow
def test_a_body_of_escapes_is_counted_about_as_fast_as_it_is_parsed() -> None:
    text = b'["' + b'\\"[' * 4_000_000 + b'"]'
    at = clock.now()
    json.loads(text)
    parsed_s = clock.now() - at
    at = clock.now()
    check_json(text, ContentLimits())
    assert clock.now() - at < 4 * parsed_s  # by a pattern it took ten times as long


def test_json_may_have_as_many_bytes_and_values_as_the_limits() -> None:
    text = b'{"a": [1, 2, ",,,,,,,,"]}'
    check_json(text, ContentLimits(max_json_bytes=len(text), max_json_elements=3))
    with pytest.raises(TooLarge, match="max_json_bytes"):
        check_json(text, ContentLimits(max_json_bytes=len(text) - 1))
    with pytest.raises(TooLarge, match="max_json_elements"):
        check_json(text, ContentLimits(max_json_elements=2))


# messages, counted before they are parsed


def varint(number: int) -> bytes:
    encoded = b""
    while number > 127:
        encoded, number = encoded + bytes((number & 127 | 128,)), number >> 7
    return encoded + bytes((number,))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


MANY = 5_000_000
AMPLIFYING = {
    "inputs of nothing": field(5, b"") * MANY,
    "outputs of nothing": field(6, b"") * MANY,
    "raw contents of nothing": field(7, b"") * MANY,
    "parameters of nothing": field(4, b"") * MANY,
    "parameters of an input": field(5, field(4, b"") * MANY),
    "strings of nothing": field(5, field(5, field(8, b"") * MANY)),
    "numbers of a byte": field(5, field(5, field(3, b"\x01" * MANY))),
    "numbers one by one": field(5, field(5, b"\x18\x01" * MANY)),
    "a shape of ones": field(5, field(3, b"\x01" * MANY)),
    "something behind a group": b"\xfb\x01\xfc\x01" + field(5, b"") * MANY,
}


@pytest.mark.parametrize("kind", AMPLIFYING)
def test_a_message_that_would_become_many_times_its_size_is_refused_unparsed(kind: str) -> None:
    raw = AMPLIFYING[kind]
    tracemalloc.start()
    try:
        with pytest.raises(ServeError):
            request_from_bytes(raw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * MANY


def test_what_an_edge_answers_is_counted_as_well() -> None:
    with pytest.raises(BadAnswer, match="parts"):
        response_from_bytes(field(5, b"") * MANY)
    with pytest.raises(BadAnswer, match="no message"):
        response_from_bytes(b"\xff" * (SMALL_BYTES + 1))


def typed(count: int) -> bytes:
    message = oip_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[count]).contents.fp32_contents.extend([0.5] * count)
    return message.SerializeToString()


def test_typed_contents_may_have_as_many_elements_as_the_limit() -> None:
    many = SMALL_BYTES
    limits = ContentLimits(max_json_elements=many)
    assert request_from_bytes(typed(many), limits).inputs[0].elements == many
    with pytest.raises(TooLarge, match="max_json_elements"):
        request_from_bytes(typed(many + 1), limits)


def test_raw_contents_are_not_what_the_limit_on_json_counts() -> None:
    message = oip_pb2.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4 * SMALL_BYTES)])
    message.inputs.add(name="x", datatype="FP32", shape=[SMALL_BYTES])
    assert request_from_bytes(message.SerializeToString(), ContentLimits(max_json_bytes=1024)).inputs[0].raw

    with pytest.raises(TooLarge, match="max_json_bytes"):
        request_from_bytes(typed(SMALL_BYTES), ContentLimits(max_json_bytes=SMALL_BYTES))


@given(st.binary(max_size=64))
def test_any_bytes_are_walked_through_or_refused(tail: bytes) -> None:
    with contextlib.suppress(ServeError):
        request_from_bytes(field(7, bytes(SMALL_BYTES)) + tail)


@pytest.mark.slow
def test_an_envelope_of_frames_is_counted() -> None:
    assert check_envelope(field(1, b"") * SMALL_BYTES, SMALL_BYTES)
    assert not check_envelope(field(1, b"") * (SMALL_BYTES + 1), SMALL_BYTES)
    assert not check_envelope(b"\xff" * (SMALL_BYTES + 1), 10)
    assert DEFAULT.max_tensors < MAX_FIELDS
    assert issubclass(NoMessage, InvalidRequest)


# bodies, over real sockets


async def post(servers: Servers, body: bytes, **headers: str) -> tuple[int, str]:
    url = f"http://{servers.http}/v2/models/minilm/infer"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=io.BytesIO(body), headers=headers) as response,
    ):
        got = await got_by_http(response)
    return (200, "") if got is None else (int(got.status), got.message)


def padded(size_bytes: int) -> bytes:
    return PLAIN + b" " * (size_bytes - len(PLAIN))


async def test_a_body_may_be_as_large_as_the_limit_and_no_larger(servers: Servers) -> None:
    assert await post(servers, padded(MAX_BYTES)) == (200, "")
    status, words = await post(servers, padded(MAX_BYTES + 1))
    assert (status, str(MAX_BYTES) in words) == (413, True)


@pytest.mark.parametrize(("ratio", "status"), [(10_000.0, 200), (100.0, 413)])
async def test_a_body_that_grows_out_of_proportion_is_refused_below_the_limit(ratio: float, status: int) -> None:
    bomb = gzip.compress(padded(MAX_BYTES))  # a thousand to one
    async with serving(FakeHost(), body_limits=BodyLimits(max_ratio=ratio, ratio_from_bytes=2**16)) as servers:
        got, words = await post(servers, bomb, **{"Content-Encoding": "gzip"})
    assert (got, "max_decompression_ratio" in words) == (status, status == 413)


async def test_a_body_whose_large_part_finds_no_room_is_refused_with_a_wait() -> None:
    async with serving(FakeHost(), body_limits=BodyLimits(max_held_bytes=200_000)) as servers:
        assert await post(servers, padded(200_000)) == (200, "")
        assert await post(servers, padded(200_000)) == (200, "")  # the first has given its part back
        status, words = await post(servers, padded(200_001))
        assert (status, "max_held_bytes" in words) == (429, True)
        assert await post(servers, padded(1000)) == (200, "")


async def test_a_message_that_finds_no_room_is_told_to_come_back() -> None:
    message = oip_pb2.ModelInferRequest(model_name="minilm", raw_input_contents=[bytes(200_000)])
    async with serving(FakeHost(), body_limits=BodyLimits(max_held_bytes=200_000)) as servers:
        got = await by_grpc_bytes(servers, message.SerializeToString())
    assert got is not None
    assert (got.status, got.code) == ("RESOURCE_EXHAUSTED", "overloaded")


def test_what_is_held_is_given_back_whatever_happens() -> None:
    held = BodyMemory(300_000)
    with pytest.raises(Overloaded, match="max_held_bytes"), held.share() as one, held.share() as other:
        one.grow(100_000)
        one.grow(200_000)
        other.grow(60_000)  # small: not counted
        assert held.bytes == 200_000
        other.grow(100_001)
    assert held.bytes == 0
    assert repr(held) == "<BodyMemory 0 of 300000 bytes>"


@pytest.mark.slow
async def test_a_body_that_drips_is_given_up_after_its_time() -> None:
    limits = BodyLimits(idle_s=5.0, grace_s=0.2, min_bytes_per_s=1e6)
    async with serving(FakeHost(), body_limits=limits) as servers, aiohttp.ClientSession() as session:

        async def drops() -> Any:
            while True:
                yield b" "
                await clock.sleep(0.02)

        url = f"http://{servers.http}/v2/models/minilm/infer"
        async with session.post(url, data=drops()) as response:
            got = await got_by_http(response)
    assert got is not None
    assert (got.status, "came too slowly" in got.message) == (400, True)


def test_bytes_claimed_by_a_string_are_not_believed() -> None:
    raw = struct.pack("<I", 2**31) + b"abc"
    message = oip_pb2.ModelInferRequest(model_name="m", raw_input_contents=[raw])
    message.inputs.add(name="x", datatype="BYTES", shape=[1])
    with pytest.raises(InvalidRequest, match="runs past the end"):
        request_from_bytes(message.SerializeToString())


def test_the_ones_of_a_large_tensor_pass() -> None:
    message = oip_pb2.ModelInferRequest(model_name="m", raw_input_contents=[np.ones(2**16, "<i8").tobytes()])
    message.inputs.add(name="x", datatype="INT64", shape=[2**16])
    assert request_from_bytes(message.SerializeToString()).inputs[0].elements == 2**16
