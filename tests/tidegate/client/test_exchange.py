"""Calls as bodies, and bodies as answers: what fits comes through exactly, and what does not is named."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from tidegate.arrays import tensor_to_array
from tidegate.client.answers import call_record
from tidegate.client.event_stream import MAX_LINE_BYTES, ChatEvents, LineBuffer
from tidegate.client.exchange import chat_exchange, embed_exchange, infer_exchange
from tidegate.client.options import option_headers
from tidegate.client.refusals import error_from_http
from tidegate.oip.http.codec import BinaryOutputs, decode_request, encode_response, header_length_of
from tidegate.oip.reply import reply_parameters
from tidegate.outcome import BadAnswer, Deferred, Disconnected, InvalidRequest, NothingAlive, Overloaded, Unreachable
from tidegate.types import Datatype, InferResponse, Reply, Route, Tensor

ARRAYS = [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.linspace(0, 1, 4, dtype=np.float32).reshape(2, 2),
    np.array([[True, False]]),
    np.array([1.5], dtype=">f8"),
    np.zeros((0, 4), dtype=np.uint8),
]


@pytest.mark.parametrize("array", ARRAYS)
def test_what_is_sent_is_what_the_servers_own_codec_reads(array: np.ndarray[Any, Any]) -> None:
    exchange = infer_exchange("m", {"x": array, "words": ["low tide", b"\xff\0"]}, ["y"], {"priority": 1})
    length = header_length_of(exchange.headers["Inference-Header-Content-Length"], len(exchange.body))
    decoded = decode_request(exchange.body, header_length=length, model_name="m")
    x, words = decoded.request.inputs
    assert tuple(x.shape) == array.shape
    assert np.array_equal(np.frombuffer(x.raw, x.datatype.numpy_name).reshape(array.shape), array)
    assert words.datatype is Datatype.BYTES
    assert tensor_to_array(words).tolist() == [b"low tide", b"\xff\0"]
    assert decoded.request.parameters["priority"] == 1
    assert "y" in decoded.binary


def test_lists_of_floats_are_single_precision_and_odd_types_are_refused_by_name() -> None:
    exchange = infer_exchange("m", {"x": [0.5, 1.0]}, None, {})
    told = json.loads(exchange.body[: int(exchange.headers["Inference-Header-Content-Length"])])
    assert told["inputs"][0]["datatype"] == "FP32"
    with pytest.raises(InvalidRequest, match="input 'x': arrays of complex128 cannot be sent"):
        infer_exchange("m", {"x": np.array([1j])}, None, {})


def test_outputs_come_as_the_server_encodes_them_binary_or_spelled_out() -> None:
    outputs = (
        Tensor("y", Datatype.FP32, (1, 2), np.array([1, 2], np.float32).tobytes()),
        Tensor("n", Datatype.INT64, (2,), np.array([3, 4], np.int64).tobytes()),
    )
    response = InferResponse("m", "3", outputs)
    read = infer_exchange("m", {}, None, {}).read
    for binary in (BinaryOutputs(default=True), BinaryOutputs(named={"y": True}), BinaryOutputs()):
        encoded = encode_response(response, binary)
        headers = (
            {} if encoded.header_length is None else {"inference-header-content-length": str(encoded.header_length)}
        )
        answer = read(headers, bytes(encoded.body))
        assert answer.model_version == "3"
        assert answer["y"].tolist() == [[1.0, 2.0]]
        assert answer["n"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"outputs": 3}',
        b'{"outputs": [{"name": "y", "datatype": "FP99", "shape": [1], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [9], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [9], "parameters": {"binary_data_size": 4}}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": "4"}}]}',
    ],
)
def test_outputs_that_do_not_fit_are_a_bad_answer(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        infer_exchange("m", {}, None, {}).read({}, body)


def test_vectors_come_as_floats_in_the_order_of_the_texts() -> None:
    rows = np.arange(6, dtype="<f4").reshape(2, 3)
    data = [{"embedding": base64.b64encode(row.tobytes()).decode()} for row in rows]
    body = json.dumps({"data": data, "usage": {"prompt_tokens": 7}}).encode()
    answer = embed_exchange("m", ["a", "b"]).read({}, body)
    assert np.array_equal(answer.vectors, rows)
    assert answer.tokens == 7
    with pytest.raises(BadAnswer):
        embed_exchange("m", ["a"]).read({}, b'{"data": [{"embedding": "not base64!"}]}')
    with pytest.raises(BadAnswer):
        embed_exchange("m", ["a"]).read({}, b'{"data": []}')


def test_what_happened_is_read_from_the_words_that_the_gateway_writes() -> None:
    route = Route("edge/attic", "hedge", "int8", attempts=2, hedged=True, version="2")
    words = reply_parameters(
        Reply(InferResponse("m", "2", ()), {"queue": 0.001, "link": 0.25}, route, budget_left_s=-0.5, request_id="3f-1")
    )
    served = call_record({**words, "tidegate-version": "2", "tidegate-helped-by": "gateway/main; because=unfit"})
    assert served.helped_by == "gateway/main; because=unfit"
    assert (served.by, served.reason, served.variant, served.attempts) == ("edge/attic", "hedge", "int8", 2)
    assert served.hedged
    assert not served.fallback
    assert served.budget_left_s == pytest.approx(-0.5)
    assert served.stages == pytest.approx({"queue": 0.001, "link": 0.25})
    assert (served.request_id, served.version) == ("3f-1", "2")


def test_words_that_cannot_be_read_count_as_not_said() -> None:
    served = call_record({"tidegate-route": ";;=;x", "tidegate-budget-left-ms": "soon", "server-timing": "a;dur=b, ;"})
    assert served.budget_left_s is None
    assert served.attempts == 1
    assert not served.stages


def test_options_become_headers_and_a_misspelled_one_is_refused() -> None:
    found = option_headers({"pin": "edge", "ttft_s": 0.4, "min_quality": 0.98, "headers": {"x-own": "1"}})
    assert found == {
        "x-own": "1",
        "tidegate-pin": "edge",
        "tidegate-ttft-ms": "400",
        "tidegate-min-quality": "0.98",
    }
    with pytest.raises(TypeError, match="no call has the option 'varient'"):
        option_headers({"varient": "fp32"})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "message", "wait_s"),
    [
        (
            429,
            {"tidegate-refused": "overloaded", "retry-after-ms": "120"},
            b'{"error": "full"}',
            Overloaded,
            "full",
            0.12,
        ),
        (503, {"retry-after": "2"}, b'{"error": {"message": "down"}}', NothingAlive, "down", 2.0),
        (502, {}, b"<html>bad gateway</html>", Unreachable, "HTTP status 502: <html>bad gateway</html>", None),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"", NothingAlive, "HTTP status 503", None),
        (299, {}, b"", BadAnswer, "HTTP status 299", None),
        (418, {"tidegate-refused": "from-the-future"}, b"{}", BadAnswer, "HTTP status 418: {}", None),
    ],
)
def test_refusals_become_the_errors_that_the_server_raised(
    status: int, headers: dict[str, str], body: bytes, kind: type[Exception], message: str, wait_s: float | None
) -> None:
    error = error_from_http(status, headers, body)
    assert type(error) is kind
    assert error.message == message
    assert error.retry_after_s == wait_s


def test_a_devices_promise_brings_its_ticket() -> None:
    error = error_from_http(202, {"tidegate-ticket": "t-1"}, b"{}")
    assert isinstance(error, Deferred)
    assert error.ticket == "t-1"


def test_a_stream_is_whole_with_its_end_only() -> None:
    events = ChatEvents({"tidegate-served-by": "edge/attic"})
    lines = LineBuffer()
    sent = (
        ': a comment\n\ndata: {"choices": [{"delta": {"role": "assistant", "content": "Lo"}}]}\r\n\n'
        'data:{"choices": [{"delta": {"content": "w 🌊"}, "finish_reason": "stop"}], '
        '"tidegate": {"tidegate-request-id": "3f-2"}}\n\ndata: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    ).encode()
    texts = [events.read(line) for at in range(len(sent)) for line in lines.add(sent[at : at + 1])]
    assert "".join(texts) == "Low 🌊"
    with pytest.raises(Disconnected):
        events.answer()
    assert events.read("data: [DONE]") == ""
    answer = events.answer()
    assert (answer.text, answer.finish_reason, answer.usage) == ("Low 🌊", "stop", {"completion_tokens": 2})
    assert (answer.served.by, answer.served.request_id) == ("edge/attic", "3f-2")


def test_an_error_in_mid_stream_is_raised_and_damage_is_named() -> None:
    events = ChatEvents({})
    with pytest.raises(Unreachable, match="died"):
        events.read('data: {"error": {"message": "edge/attic died", "code": "unreachable"}}')
    for damaged in ("data: {", "data: [1]", 'data: {"choices": 3}', 'data: {"choices": ["x"]}'):
        with pytest.raises(BadAnswer):
            events.read(damaged)
    with pytest.raises(BadAnswer, match="longer than"):
        LineBuffer().add(b"x" * (MAX_LINE_BYTES + 1))


def test_a_plain_text_is_the_users_message() -> None:
    told = json.loads(chat_exchange("m", "Hello", {"max_tokens": 8}).body)
    assert told == {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
