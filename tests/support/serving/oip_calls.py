"""Calls of a good request to both servers, and the words with which they answer it."""

from __future__ import annotations

from typing import Any

import aiohttp
import grpc

from tests.support.serving.oip_requests import GOOD, PLAIN
from tests.support.serving.oip_servers import Servers
from tidegate.oip.grpc.codec import message_from_request
from tidegate.rpc import oip_pb2
from tidegate.types import Call, Reply

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
