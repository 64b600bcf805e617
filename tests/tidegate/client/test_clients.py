"""Both clients before a real gateway, and before a server that refuses, stalls, breaks and lies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.gateway.app import Far, configured, gateway_for, running, target
from tests.support.gateway.text_gateway import text_gateway
from tidegate import AsyncTidegate, RetryPolicy, Tidegate, clock
from tidegate.client import settings
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Disconnected,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServeError,
    Unreachable,
)

pytestmark = pytest.mark.slow
SOON = RetryPolicy(first_wait_s=0.01)
Handler = Callable[[web.Request, int], Any]


class Script:
    """A server whose answer is the handler's, by the number of the request."""

    def __init__(self, handler: Handler) -> None:
        self.budgets_ms: list[float] = []
        self.left = asyncio.Event()
        self._handler = handler

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.budgets_ms.append(float(request.headers.get("tidegate-budget-ms", "nan")))
        await request.read()
        try:
            answer: web.StreamResponse = await self._handler(request, len(self.budgets_ms))
        except asyncio.CancelledError:
            self.left.set()
            raise
        return answer


@asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[tuple[str, Script]]:
    script = Script(handler)
    app = web.Application()
    app.router.add_post("/{any:.*}", script.answer)
    # A caller who leaves cancels its handler, as at the gateway.
    async with TestServer(app, handler_cancellation=True) as server:
        yield str(server.make_url("")), script


def outputs(n: int = 1) -> web.Response:
    body = {"model_name": "m", "outputs": [{"name": "y", "datatype": "INT64", "shape": [1], "data": [n]}]}
    return web.json_response(body, headers={"tidegate-served-by": "edge/attic"})


async def test_arrays_go_through_a_real_gateway_and_the_answer_says_where(tmp_path: Path) -> None:
    edge = Far("edge/attic", variant="int8")
    async with running(edge), gateway_for(configured(tmp_path, target(edge))) as (gateway, _):
        url, x = gateway.addresses["http"], np.array([1, 2, 3], np.uint8)
        async with AsyncTidegate(url, budget_s=5.0) as client:
            answer = await client.infer("echo", {"x": x}, pin="edge")
            with pytest.raises(ModelNotFound):
                await client.infer("nothing", {"x": x})
            with pytest.raises(InvalidRequest, match="tidegate-pin"):
                await client.infer("echo", {"x": x}, pin="moon")  # type: ignore[arg-type]

        def blocking() -> Any:
            with Tidegate(url, budget_s=5.0) as client:
                return client.infer("echo", {"x": x}, outputs=["y"])

        again = await asyncio.to_thread(blocking)
    for one in (answer, again):
        assert one.served.by == "edge/attic"
        assert one.served.variant in ("int8", "fp32")
        assert one.served.budget_left_s > 0
        assert one.served.request_id
        assert "link" in one.served.stages
        assert next(iter(one.outputs.values())).shape == x.shape


async def test_text_is_written_whole_and_in_parts(tmp_path: Path) -> None:
    async with text_gateway(tmp_path) as (gateway, _):
        url, wanted = gateway.addresses["http"], {"max_tokens": 8, "temperature": 0}
        async with AsyncTidegate(url) as client:
            whole = await client.chat("talker", "Tide?", wanted=wanted)
            async with client.stream_chat("talker", "Tide?", wanted=wanted) as stream:
                parts = [part async for part in stream]

        def blocking() -> tuple[list[str], Any]:
            with Tidegate(url) as client, client.stream_chat("talker", "Tide?", wanted=wanted) as stream:
                return list(stream), stream.answer()

        others, answer = await asyncio.to_thread(blocking)
    assert whole.text == "".join(parts) == "".join(others) == answer.text == stream.answer().text
    assert len(parts) > 1
    for one in (whole, answer, stream.answer()):
        assert one.served.by == "edge/till"
        assert one.served.request_id
        assert one.usage["completion_tokens"] > 1
        assert one.finish_reason


async def test_a_refusal_that_names_a_time_is_tried_again_then_within_the_budget() -> None:
    async def full_twice(_: web.Request, turn: int) -> web.Response:
        headers = {"tidegate-refused": "overloaded", "retry-after-ms": "20"}
        return web.json_response({"error": "full"}, status=429, headers=headers) if turn < 3 else outputs(turn)

    async with scripted(full_twice) as (url, script), AsyncTidegate(url, budget_s=5.0) as client:
        assert (await client.infer("m", {"x": [1]}))["y"] == [3]
        first, second, third = script.budgets_ms
        assert 5000 >= first > second + 19 > third + 38
        script.budgets_ms.clear()
        with pytest.raises(Overloaded, match="full"):
            await client.infer("m", {"x": [1]}, budget_s=0.02)
        assert len(script.budgets_ms) == 1


async def test_a_broken_connection_is_tried_again_but_not_for_a_step_of_a_sequence() -> None:
    async def breaks_once(request: web.Request, turn: int) -> web.Response:
        if turn == 1:
            assert request.transport is not None
            request.transport.abort()
        return outputs(turn)

    async with scripted(breaks_once) as (url, script), AsyncTidegate(url, retry=SOON) as client:
        assert (await client.infer("m", {"x": [1]}))["y"] == [2]
        script.budgets_ms.clear()
        with pytest.raises(Disconnected):
            await client.infer("m", {"x": [1]}, parameters={"sequence_id": 7})
        assert len(script.budgets_ms) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(502, ""), (503, ""), (502, "unreachable"), (429, "overloaded"), (503, "nothing_alive")]
)
@pytest.mark.parametrize("asked", [{"parameters": {"sequence_id": 7}}, {"headers": {"tidegate-defer": "1"}}, {}])
async def test_what_a_proxy_or_a_gateway_may_have_passed_on_is_not_repeated_if_it_has_effects(
    status: int, code: str, asked: dict[str, Any]
) -> None:
    async def lost_once(_: web.Request, turn: int) -> web.Response:
        headers = {"tidegate-refused": code} if code else {}
        return web.Response(status=status, headers=headers) if turn == 1 else outputs(turn)

    surely_not_done = code in ("overloaded", "nothing_alive")
    async with scripted(lost_once) as (url, script), AsyncTidegate(url, retry=SOON) as client:
        if surely_not_done or not asked:
            assert (await client.infer("m", {"x": [1]}, **asked))["y"] == [2]
        else:
            with pytest.raises(ServeError):
                await client.infer("m", {"x": [1]}, **asked)
    assert len(script.budgets_ms) == (2 if surely_not_done or not asked else 1)


async def test_a_server_that_hangs_is_given_up_and_one_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidegate.client.budget.GRACE_S", 0.05)

    async def hangs(_: web.Request, turn: int) -> web.Response:
        await asyncio.Event().wait()
        return outputs(turn)

    async with scripted(hangs) as (url, script):
        began_at = clock.now()
        async with AsyncTidegate(url, budget_s=0.1) as client:
            with pytest.raises(DeadlineExceeded, match="within the budget"):
                await client.infer("m", {"x": [1]})
            assert clock.now() - began_at < 10.0
            script.left.clear()
            task = asyncio.create_task(client.infer("m", {"x": [1]}, budget_s=60.0))
            while len(script.budgets_ms) < 2:
                await clock.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(10.0):
                await script.left.wait()  # the server noticed
    async with AsyncTidegate(url, retry=RetryPolicy(tries=1)) as client:
        with pytest.raises(Unreachable, match="no connection to"):
            await client.infer("m", {"x": [1]})


async def test_an_answer_without_end_and_a_stream_that_is_cut_are_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_ANSWER_BYTES", 10_000)

    async def endless(request: web.Request, _: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 1000)

    async def cut(request: web.Request, _: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps({"choices": [{"delta": {"content": "Lo"}}]}).encode() + b"\n\n")
        return response

    async with scripted(endless) as (url, _), AsyncTidegate(url) as client:
        with pytest.raises(BadAnswer, match="longer than"):
            await client.infer("m", {"x": [1]})
    async with scripted(cut) as (url, _), AsyncTidegate(url) as client, client.stream_chat("m", "Hello") as stream:
        assert [part async for part in stream] == ["Lo"]
        with pytest.raises(Disconnected, match="cut before its end"):
            stream.answer()


def test_settings_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="has to begin with http"):
        Tidegate("127.0.0.1:8000")
    with pytest.raises(ValueError, match="budget_s has to be a positive number"):
        Tidegate(budget_s=0)
    with Tidegate() as client, pytest.raises(TypeError, match="no call has the option"):
        client.embed("m", "x", varient="fp32")  # type: ignore[call-arg]
