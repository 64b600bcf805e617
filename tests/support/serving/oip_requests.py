"""A good request for the fake host in every form that a client sends it, and what comes back by either protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import numpy as np
from msgspec.structs import replace

from tests.support.serving.oip_servers import Servers
from tidegate.types import Datatype, InferRequest, Tensor


def ids(*shape: int, fill: int = 7) -> Tensor:
    return Tensor("input_ids", Datatype.INT64, shape, np.full(shape, fill, "<i8").tobytes())


def mask(*shape: int, fill: int = 1) -> Tensor:
    return replace(ids(*shape, fill=fill), name="attention_mask")


@dataclass(frozen=True)
class Got:
    """What came back, by either protocol's own status."""

    status: int | str
    message: str
    code: str


GOOD = InferRequest("minilm", (ids(1, 3), mask(1, 3)))


async def got_by_http(response: aiohttp.ClientResponse) -> Got | None:
    if response.status == 200:
        return None
    assert response.headers["Content-Type"] == "application/json"  # exactly: kserve reads no other
    told = await response.json()
    return Got(response.status, told["error"], told["code"])


def http_body(request: InferRequest) -> tuple[bytes, int]:
    header = json.dumps({
        "id": request.id,
        "parameters": dict(request.parameters),
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(tensor.raw)},
            }
            for tensor in request.inputs
        ],
        "outputs": [{"name": o.name, "parameters": dict(o.parameters)} for o in request.outputs],
    }).encode()  # fmt: skip
    return b"".join((header, *(bytes(tensor.raw) for tensor in request.inputs))), len(header)


async def by_grpc_bytes(servers: Servers, raw: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> Got | None:
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            await infer(raw, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            return Got(error.code().name, error.details() or "", str(trailers.get("tidegate-code", "")))
    return None


def framed(header: dict[str, Any] | bytes, *blobs: bytes, **headers: str) -> tuple[bytes, dict[str, str]]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"".join((text, *blobs)), {"Inference-Header-Content-Length": str(len(text)), **headers}


ENTRIES = [
    {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "parameters": {"binary_data_size": 24}},
    {"name": "attention_mask", "datatype": "INT64", "shape": [1, 3], "parameters": {"binary_data_size": 24}},
]
ONES = np.ones(3, "<i8").tobytes()
PLAIN = json.dumps({
    "inputs": [
        {"name": name, "datatype": "INT64", "shape": [1, 3], "data": [1, 1, 1]}
        for name in ("input_ids", "attention_mask")
    ]
}).encode()  # fmt: skip
