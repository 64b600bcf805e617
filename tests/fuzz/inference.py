"""Targets in front of inference: OIP over HTTP and gRPC, and OpenAI's routes, on the real servers in this process."""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer

from gateway.app import Gateway
from tests.fuzz.hostile import TEXTS, as_json, bent, damaged, values
from tests.fuzz.target import Target
from tests.support.gateway.app import BODY, Far, configured, running
from tests.support.gateway.app import target as far_target
from tests.support.serving.host import FakeHost
from tests.support.serving.oip_requests import ENTRIES, GOOD, ONES, PLAIN, framed
from tests.support.serving.oip_servers import MAX_BYTES, Servers, serving
from tidegate.oip.grpc.codec import message_from_request
from tidegate.rpc import oip_pb2

MODELS = ("minilm", "digits", "mirror", "echo", "nobody")
SERVICE = "/inference.GRPCInferenceService/"
CODES = frozenset(
    {
        "invalid_request",
        "model_not_found",
        "too_large",
        "overloaded",
        "deadline_exceeded",
        "nothing_alive",
        "not_supported",
        "forbidden",
    }
)
Headers = dict[str, str]
Sent = tuple[str, bytes, Headers]  # path, body, headers


@dataclass
class Doors:
    """Open connections to servers, and the log of defects that they wrote."""

    http: str
    session: aiohttp.ClientSession
    channel: grpc.aio.Channel
    logs: list[Any]


@asynccontextmanager
async def servers() -> AsyncIterator[Doors]:
    with tempfile.TemporaryDirectory() as folder, capture_logs() as logs:
        words: Any = Tokenizer(WordPiece({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
        words.pre_tokenizer = BertPreTokenizer()
        words.save(f"{folder}/tokenizer.json")
        async with serving(FakeHost(), Path(folder)) as found, _doors(f"http://{found.http}", found, logs) as doors:
            yield doors


@asynccontextmanager
async def _doors(http: str, found: Servers, logs: list[Any]) -> AsyncIterator[Doors]:
    async with aiohttp.ClientSession() as session, grpc.aio.insecure_channel(found.grpc) as channel:
        yield Doors(http, session, channel, logs)


@asynccontextmanager
async def gateway() -> AsyncIterator[Doors]:
    """A whole gateway before one target, so that what a caller says of its request has somewhere to go."""
    far = Far("pool/main")
    with tempfile.TemporaryDirectory() as folder, capture_logs() as logs:
        async with running(far), Gateway(configured(Path(folder), far_target(far))) as found:
            await found.static_targets_tried(30.0)
            http, at = found.addresses["http"], found.addresses["grpc"]
            async with _doors(http, Servers(FakeHost(), http, at), logs) as doors:
                yield doors


async def post(doors: Doors, sent: Sent) -> None:
    path, body, headers = sent
    doors.logs.clear()
    async with doors.session.post(doors.http + path, data=body, headers=headers) as response:
        answer = await response.read()
        words = f"{response.status} {answer[:300]!r} {doors.logs}"
        assert response.status < 500 or response.status in (501, 503, 504), words
        if response.status != 200:
            said = json.loads(answer)["error"]
            code = said["code"] if isinstance(said, dict) else json.loads(answer)["code"]
            assert code in CODES or response.status in (404, 405), words
        elif answer:
            json.loads(answer[: int(response.headers.get("Inference-Header-Content-Length", len(answer)))])
    assert not [one for one in doors.logs if one.get("log_level") in ("error", "critical")], doors.logs


async def good_http(doors: Doors) -> None:
    async with doors.session.post(f"{doors.http}/v2/models/minilm/infer", data=PLAIN) as response:
        assert response.status == 200, await response.text()


async def good_gateway(doors: Doors) -> None:
    async with doors.session.post(f"{doors.http}/v2/models/echo/infer", json=BODY) as response:
        assert response.status == 200, await response.text()


# OIP over HTTP, JSON

_WHOLE: dict[str, Any] = {
    "id": "7",
    "parameters": {
        "timeout": 500000,
        "priority": 2,
        "sequence_id": 4,
        "tidegate-tenant": "acme",
        "binary_data_output": False,
    },
    "inputs": [
        {"name": name, "datatype": "INT64", "shape": [1, 3], "parameters": {}, "data": [[1, 1, 1]]}
        for name in ("input_ids", "attention_mask")
    ],
    "outputs": [{"name": "sentence_embedding", "parameters": {"classification": 2, "binary_data": False}}],
}
_TYPES = ("BOOL", "UINT8", "UINT64", "INT8", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16", "fp32", "")
_MIRROR = {"inputs": [{"name": f"in_{kind}", "datatype": kind, "shape": [2], "data": [1, 0]} for kind in _TYPES[:9]]}
_JSON = [PLAIN, as_json(_WHOLE), as_json(_MIRROR)]


def _paths(verb: str = "infer") -> st.SearchStrategy[str]:
    model = st.sampled_from(MODELS)
    return model.map(lambda name: f"/v2/models/{name}/{verb}") | model.map(
        lambda name: f"/v2/models/{name}/versions/1/{verb}"
    )


def _tensors() -> st.SearchStrategy[dict[str, Any]]:
    shape = st.lists(st.sampled_from((0, 1, 2, 3, -1, 2**31, 2**62, 2**63)), max_size=9)
    entry = st.fixed_dictionaries(
        {
            "name": st.sampled_from(("input_ids", "attention_mask", "image", "in_FP32", "in_BYTES", "in_BOOL")),
            "datatype": st.sampled_from(_TYPES),
            "shape": shape,
            "data": values(depth=4),
        }
    )
    return st.lists(entry, max_size=4).map(lambda inputs: {"inputs": inputs})


def _compressed(body: bytes) -> st.SearchStrategy[tuple[bytes, Headers]]:
    return st.sampled_from(
        [
            (body, {}),
            (gzip.compress(body), {"Content-Encoding": "gzip"}),
            (zlib.compress(body), {"Content-Encoding": "deflate"}),
            (body, {"Content-Encoding": "gzip"}),
            (gzip.compress(body)[:-9], {"Content-Encoding": "gzip"}),
        ]
    )


_bodies = damaged(_JSON) | bent(_WHOLE).map(as_json) | bent(_MIRROR).map(as_json) | _tensors().map(as_json)
_json_sent = st.tuples(_paths(), _bodies.flatmap(_compressed)).map(lambda sent: (sent[0], *sent[1]))
_repository = st.tuples(
    st.sampled_from(("/v2/repository/index", "/v2/repository/models/minilm/load", "/v2/repository/models/x/unload")),
    damaged([b"{}", b'{"ready":true}', b'{"parameters":{"config":"{}"}}']),
    st.just(Headers()),
)

OIP_JSON = Target("oip-http-json", servers, _json_sent | _repository, post, good_http, limit_bytes=MAX_BYTES)


# OIP over HTTP, the binary extension

_ASKED_BINARY = {"inputs": ENTRIES, "parameters": {"binary_data_output": True}}
_FRAMED = framed(_ASKED_BINARY, ONES, ONES)[0]
_TEXT_BYTES = b"\x03\x00\x00\x00abc\x00\x00\x00\x00"
_STRINGS = {
    "inputs": [
        {"name": "in_BYTES", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(_TEXT_BYTES)}}
    ]
}


@st.composite
def _binary(draw: st.DrawFn) -> Sent:
    header, blob = draw(st.sampled_from(((_ASKED_BINARY, ONES + ONES), (_STRINGS, _TEXT_BYTES))))
    text = as_json(draw(bent(header)) if draw(st.booleans()) else header)
    length = draw(st.sampled_from((len(text), 0, -1, len(text) - 1, len(text) + 1, 2**63, 10**30)))
    body = text + (blob if draw(st.booleans()) else draw(damaged([blob])))
    said = draw(st.sampled_from((str(length), str(len(text)), str(len(text)), *TEXTS[7:])).filter(_may_be_sent))
    return draw(_paths()), body, {"Inference-Header-Content-Length": said}


def _may_be_sent(text: str) -> bool:
    """What an HTTP client lets through as a header's value."""
    return (
        text.isprintable()
        and not set(text) & set("\r\n\0")
        and len(text) < 4000
        and not any("\ud800" <= c <= "\udfff" for c in text)
    )


_whole = damaged([_FRAMED]).map(
    lambda body: ("/v2/models/minilm/infer", body, {"Inference-Header-Content-Length": "211"})
)
OIP_BINARY = Target("oip-http-binary", servers, _binary() | _whole, post, good_http, limit_bytes=MAX_BYTES)


# What a caller says of its request, through a whole gateway

_SAID = (
    "tidegate-timeout-ms",
    "tidegate-tenant",
    "tidegate-pin",
    "tidegate-min-quality",
    "tidegate-variant",
    "x-stainless-read-timeout",
    "traceparent",
    "tracestate",
    "endpoint-load-metrics-format",
    "authorization",
    "x-api-key",
    "tidegate-require",
    "tidegate-budget-ms",
)
_GOOD_WORDS = (
    "100",
    "0.5",
    "edge",
    "site",
    "any",
    "fp32",
    "acme",
    "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "json",
    "1e3",
    "Bearer x",
)
_said = st.dictionaries(
    st.sampled_from(_SAID),
    st.sampled_from(_GOOD_WORDS) | st.sampled_from([one for one in TEXTS if _may_be_sent(one)]),
    max_size=4,
)
_parameters = st.dictionaries(
    st.sampled_from(
        (*_SAID, "timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output")
    ),
    values(depth=1),
    max_size=4,
)
_words = st.tuples(_said, _parameters).map(
    lambda said: ("/v2/models/echo/infer", as_json({**BODY, "parameters": said[1]}), said[0])
)
WORDS = Target("gateway-words", gateway, _words, post, good_gateway, limit_bytes=MAX_BYTES, weight=0.6)


# OIP over gRPC

_INFER = message_from_request(GOOD).SerializeToString()
_TYPED = oip_pb2.ModelInferRequest(model_name="minilm", id="1")
for _name in ("input_ids", "attention_mask"):
    _TYPED.inputs.add(name=_name, datatype="INT64", shape=[1, 3]).contents.int64_contents.extend([1, 1, 1])
_TYPED.parameters["timeout"].int64_param = 10**6
_TYPED.outputs.add(name="sentence_embedding").parameters["classification"].int64_param = 3
_ODD = oip_pb2.ModelInferRequest(model_name="mirror")
for _kind in ("BYTES", "FP32", "BOOL"):
    _ODD.inputs.add(name=f"in_{_kind}", datatype=_kind, shape=[1])
    _ODD.raw_input_contents.append(
        b"\x01\x00\x00\x00a" if _kind == "BYTES" else b"\x00\x00\x00\x00"[: 4 if _kind == "FP32" else 1]
    )
_MESSAGES = [_INFER, _TYPED.SerializeToString(), _ODD.SerializeToString()]
_METHODS = (
    "ModelInfer",
    "ModelInfer",
    "ModelInfer",
    "ModelStreamInfer",
    "ModelMetadata",
    "ModelReady",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "ServerMetadata",
    "ServerReady",
    "TraceSetting",
)


@st.composite
def _reshaped(draw: st.DrawFn) -> bytes:
    """A message that is one, with claims that no bytes stand behind."""
    message = oip_pb2.ModelInferRequest.FromString(draw(st.sampled_from(_MESSAGES)))
    tensor = draw(st.sampled_from(list(message.inputs)))
    tensor.shape[:] = draw(st.lists(st.sampled_from((0, 1, 3, -1, 2**31, 2**62, 2**63 - 1)), max_size=10))
    tensor.datatype = draw(st.sampled_from((*_TYPES, "INT64", "x" * 3000)))
    message.model_name = draw(st.sampled_from((message.model_name, *MODELS, "\x00", "a" * 9000)))
    key = draw(st.sampled_from(("timeout", "priority", "sequence_id", "binary_data_output", "tidegate-pin", "x")))
    value = message.parameters[key]
    match draw(st.integers(0, 4)):
        case 0:
            value.int64_param = draw(st.sampled_from((0, -1, 2**63 - 1, -(2**63))))
        case 1:
            value.string_param = draw(st.sampled_from([one for one in TEXTS if "\ud800" not in one]))
        case 2:
            value.double_param = draw(st.sampled_from((float("nan"), float("inf"), -1.0, 1e308)))
        case 3:
            value.uint64_param = 2**64 - 1
    return message.SerializeToString()


_asked = st.tuples(st.sampled_from(_METHODS), damaged(_MESSAGES) | _reshaped() | st.binary(max_size=200))


async def call(doors: Doors, asked: tuple[str, bytes]) -> None:
    method, raw = asked
    doors.logs.clear()
    try:
        if method == "ModelStreamInfer":
            answers = [one async for one in doors.channel.stream_stream(SERVICE + method)(iter([raw, _INFER]))]
            assert len(answers) == 2
            assert not oip_pb2.ModelStreamInferResponse.FromString(answers[1]).error_message
        else:
            await doors.channel.unary_unary(SERVICE + method)(raw, timeout=10)
    except grpc.aio.AioRpcError as error:
        code = dict(error.trailing_metadata() or ()).get("tidegate-code", "")
        assert code in CODES, f"{error.code()} {error.details()} {code!r} {doors.logs}"
    assert not [one for one in doors.logs if one.get("log_level") in ("error", "critical")], doors.logs


async def good_grpc(doors: Doors) -> None:
    await doors.channel.unary_unary(SERVICE + "ModelInfer")(_INFER, timeout=5)


OIP_GRPC = Target("oip-grpc", servers, _asked, call, good_grpc, limit_bytes=MAX_BYTES)


# OpenAI

_EMBED = {"model": "minilm", "input": [[1, 2, 3], [4]], "encoding_format": "base64", "dimensions": 384, "user": "u"}
_EMBEDS = [
    as_json(_EMBED),
    as_json({"model": "minilm", "input": [1, 2, 3]}),
    as_json({"model": "digits", "input": "hi"}),
]
_shapes = st.fixed_dictionaries({"model": st.sampled_from(MODELS), "input": values(depth=4)}).map(as_json)
_embeds = st.tuples(
    st.sampled_from(("/v1/embeddings",) * 6 + ("/v1/models", "/v1/completions", "/v1/x/y")),
    damaged(_EMBEDS) | bent(_EMBED).map(as_json) | _shapes,
    st.sampled_from(({}, {"x-stainless-read-timeout": "nan"}, {"x-stainless-read-timeout": "-3"})),
)
OPENAI = Target("openai-json", servers, _embeds, post, good_http, limit_bytes=4 * MAX_BYTES)

TARGETS = (OIP_JSON, OIP_BINARY, WORDS, OIP_GRPC, OPENAI)
