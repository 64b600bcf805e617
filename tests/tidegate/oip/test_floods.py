"""Many requests at once, and many bad ones: each is answered in words, and none stays in memory."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import grpc
import pytest
from msgspec.structs import replace

from tests.support.serving.host import FakeHost
from tests.support.serving.oip_requests import GOOD, ids, mask
from tests.support.serving.oip_servers import Servers, serving
from tidegate.oip.body_budget import BodyLimits
from tidegate.oip.grpc.codec import message_from_request
from tidegate.types import InferRequest, RequestedOutput

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
BAD = replace(GOOD, inputs=(ids(1, 3), mask(1, 4)), outputs=(RequestedOutput("sentence_embedding"),), id="bad")


async def ended(call: grpc.aio.UnaryUnaryCall[bytes, bytes]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.slow
async def test_a_burst_of_calls_is_answered_and_not_cancelled_at_random(servers: Servers) -> None:
    message = message_from_request(GOOD).SerializeToString()
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        infer = channel.unary_unary(INFER, None, None)

        codes = Counter(await asyncio.gather(*(ended(infer(message)) for _ in range(4000))))

    assert codes == {"OK": 4000}


@pytest.mark.slow
async def test_a_refused_call_leaves_nothing_of_its_request_behind(servers: Servers) -> None:
    message = message_from_request(BAD).SerializeToString()
    gc.collect()
    gc.disable()  # what is left now is left until the collector comes by: with bodies of 60 MiB that is too late
    try:
        async with grpc.aio.insecure_channel(servers.grpc) as channel:
            assert await ended(channel.unary_unary(INFER, None, None)(message)) == "INVALID_ARGUMENT"
            strict = channel.stream_stream(STREAM, None, None)(None, metadata=(("triton_grpc_error", "true"),))
            await strict.write(message)
            assert await strict.code() is grpc.StatusCode.INVALID_ARGUMENT
        servers.refused.clear()

        assert not [
            # `type`, not isinstance: that asks each object for its class, and some of torch's warn when asked.
            one
            for one in gc.get_objects()
            if type(one) is InferRequest and one.id == "bad" and one is not BAD
        ]
    finally:
        gc.enable()


async def test_a_caller_that_stops_in_the_middle_of_its_body_is_not_waited_for() -> None:
    async with serving(FakeHost(), body_limits=BodyLimits(idle_s=0.05)) as servers:
        await _stops_in_the_middle(servers)


async def _stops_in_the_middle(servers: Servers) -> None:
    host, _, port = servers.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v2/models/minilm/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"inputs"')
    async with asyncio.timeout(30.0):
        answer = await reader.readuntil(b"}")
    writer.close()
    await writer.wait_closed()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"nothing more of the body came for 0.05 s" in answer
    assert not servers.host.calls
