"""Streams of requests: answered in order, a window at a time, ended as each client expects."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from tests.support.serving.oip_calls import STREAM
from tests.support.serving.oip_requests import GOOD
from tests.support.serving.oip_servers import MAX_BYTES, Servers
from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.grpc.server import STREAM_WINDOW
from tidegate.rpc import oip_pb2
from tidegate.types import Call, Datatype, Reply, Tensor


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


@pytest.mark.slow
async def test_a_stream_that_ends_while_its_first_answer_is_written_tells_its_status(servers: Servers) -> None:
    """Many times, for what counts is whether that answer is on its way just then."""
    async with grpc.aio.insecure_channel(servers.grpc) as channel:

        async def status(_number: int) -> grpc.StatusCode:
            call = channel.stream_stream(STREAM)(_stream(["a", "bad"]), metadata=(("triton_grpc_error", "true"),))
            try:
                async with asyncio.timeout(30):
                    await _ids(call)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        codes = Counter([code for _ in range(25) for code in await asyncio.gather(*map(status, range(8)))])
    assert codes == {grpc.StatusCode.NOT_FOUND: 200}


async def test_a_stream_works_on_several_at_a_time_but_on_no_more_than_its_window(servers: Servers) -> None:
    servers.host.hold = asyncio.Event()
    count = STREAM_WINDOW * 2
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        call = channel.stream_stream(STREAM)(_stream([str(index) for index in range(count)]))
        reading = asyncio.ensure_future(_ids(call))
        async with asyncio.timeout(30):
            while len(servers.host.calls) < STREAM_WINDOW:
                await asyncio.wait([reading], timeout=0.01)
        assert len(servers.host.calls) <= STREAM_WINDOW + 2
        servers.host.hold.set()
        assert await reading == [str(index) for index in range(count)]


async def test_an_answer_that_is_too_long_is_an_error_in_its_place_and_the_others_come(servers: Servers) -> None:
    infer = servers.host.infer

    async def long_one(call: Call) -> Reply:
        reply = await infer(call)
        if call.request.id != "long":
            return reply
        long = Tensor("y", Datatype.UINT8, (MAX_BYTES,), bytes(MAX_BYTES))
        return replace(reply, response=replace(reply.response, outputs=(long,)))

    servers.host.infer = long_one  # type: ignore[method-assign]
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        call = channel.stream_stream(STREAM)(_stream(["a", "long", "c"]))
        answers = [oip_pb2.ModelStreamInferResponse.FromString(raw) async for raw in call]
    assert [(one.infer_response.id, bool(one.error_message)) for one in answers] == [
        ("a", False),
        ("long", True),
        ("c", False),
    ]
    assert answers[1].infer_response.parameters["tidegate-code"].string_param == "too_large"


def _stream(ids: list[str]) -> Any:
    async def messages() -> Any:
        for id_ in ids:
            request = replace(GOOD, id=id_, model_name="nobody" if id_ == "bad" else "minilm")
            yield b"\xff\xff" if id_ == "rubbish" else message_from_request(request).SerializeToString()

    return messages()


async def _ids(call: Any) -> list[str]:
    return [oip_pb2.ModelStreamInferResponse.FromString(raw).infer_response.id async for raw in call]
