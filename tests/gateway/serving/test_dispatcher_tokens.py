"""Answers that come in parts, on virtual time: one attempt speaks to the caller, and nothing of the others is seen."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.support.gateway.conductor import FP32, INT8, FakeTarget, Scene, target
from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import SPENT, STOPPED, Usage, usage_of
from tidegate.oip.reply import reply_parameters
from tidegate.outcome import DeadlineExceeded, Unreachable
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.types import Route

EDGE, POOL = 100 * len("edge/a"), 100 * len("pool/main")


def scene(edge: FakeTarget, pool: FakeTarget) -> Scene:
    return Scene({"edge_a": (edge, INT8), "pool_main": (pool, FP32)})


async def ids_of(stream: TokenStream) -> list[int]:
    stream.end()
    ids: list[int] = []
    while batches := await stream.take():
        ids += [id for batch in batches for id in batch.ids]
    return ids


@on_virtual_time
async def test_tokens_reach_the_caller_as_they_come() -> None:
    edge, stream = target("edge_a", takes_s=0.01), TokenStream(window=4)
    edge.says_at_s = (0.02, 0.04, 0.06)
    one = scene(edge, target("pool_main"))
    answering = asyncio.create_task(one.dispatcher.infer(one.call(tokens=stream)))  # type: ignore[arg-type]

    await clock.sleep(0.03)
    assert [batch.ids for batch in await stream.take()] == [(EDGE,)]
    assert (stream.prompt_tokens, stream.cached_tokens, edge.credits) == (31, 24, [1])
    reply = await answering

    assert reply.route is not None
    assert reply.route.served_by == "edge/a"
    assert await ids_of(stream) == [EDGE + 1, EDGE + 2]
    one.assert_at_rest()


@on_virtual_time
async def test_two_attempts_race_to_the_first_token_and_the_loser_is_cancelled() -> None:
    edge, pool, stream = target("edge_a", takes_s=9.0), target("pool_main", takes_s=0.002), TokenStream()
    pool.says_at_s = (0.002, 0.004)
    one = scene(edge, pool)

    reply = await one.dispatcher.infer(one.call(tokens=stream))

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.hedged, edge.cancelled) == ("pool/main", True, 1)
    assert await ids_of(stream) == [POOL, POOL + 1]
    await settle()
    one.assert_at_rest()


@on_virtual_time
async def test_a_stream_that_has_begun_gets_no_hedge_however_slow_it_is() -> None:
    edge, pool, stream = target("edge_a", takes_s=0.5), target("pool_main"), TokenStream()
    edge.says_at_s = (0.01,)
    one = scene(edge, pool)

    reply = await one.dispatcher.infer(one.call(tokens=stream))

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.hedged, pool.seen) == ("edge/a", False, [])
    one.assert_at_rest()


@on_virtual_time
async def test_a_target_that_fails_before_its_first_token_is_replaced_and_leaves_no_trace() -> None:
    edge, pool, stream = target("edge_a", takes_s=0.01, error=Unreachable("gone")), target("pool_main"), TokenStream()
    pool.says_at_s = (0.01, 0.02)
    one = scene(edge, pool)

    await one.dispatcher.infer(one.call(tokens=stream))

    assert await ids_of(stream) == [POOL, POOL + 1]
    one.assert_at_rest()


@on_virtual_time
async def test_a_stream_that_breaks_off_ends_with_the_reason_and_is_not_begun_again() -> None:
    edge, pool, stream = target("edge_a", takes_s=0.0, error=Unreachable("killed")), target("pool_main"), TokenStream()
    edge.says_at_s = (0.01, 0.02)
    one = scene(edge, pool)

    with pytest.raises(Unreachable, match="killed"):
        await one.dispatcher.infer(one.call(tokens=stream))

    assert await ids_of(stream) == [EDGE, EDGE + 1]
    assert pool.seen == []
    one.assert_at_rest()


@on_virtual_time
async def test_a_front_that_has_all_it_wants_ends_the_answer_as_an_answer() -> None:
    edge, stream = target("edge_a", takes_s=9.0), TokenStream()
    edge.says_at_s = (0.01, 0.02, 0.03)
    one = scene(edge, target("pool_main"))
    answering = asyncio.create_task(one.dispatcher.infer(one.call(tokens=stream)))  # type: ignore[arg-type]
    await clock.sleep(0.025)

    await cancel_and_wait(answering, why=STOPPED)

    reply = answering.result()
    assert usage_of(reply.response) == Usage("stop", 31, 2, 24)
    assert reply.route is not None and reply.first_token_s is not None
    assert (reply.route.served_by, reply.first_token_s) == ("edge/a", pytest.approx(0.01, abs=0.005))
    assert edge.cancelled == 1
    newest = next(reversed(one.dispatcher.recorder))
    assert newest.outcome == "ok" and newest.answer is not None
    assert newest.answer.usage == Usage("stop", 31, 2, 24)
    one.assert_at_rest()


@on_virtual_time
async def test_what_was_stopped_before_its_first_token_was_cancelled() -> None:
    edge = target("edge_a", takes_s=9.0)
    one = scene(edge, target("pool_main", takes_s=9.0))
    answering = asyncio.create_task(one.dispatcher.infer(one.call(tokens=TokenStream())))  # type: ignore[arg-type]
    await clock.sleep(0.025)
    await cancel_and_wait(answering, why=STOPPED)
    assert answering.cancelled()
    assert next(reversed(one.dispatcher.recorder)).outcome == "cancelled"
    one.assert_at_rest()


@on_virtual_time
async def test_the_deadline_ends_a_stream() -> None:
    edge, stream = target("edge_a", takes_s=9.0), TokenStream()
    edge.says_at_s = (0.01, 0.02)
    one = scene(edge, target("pool_main"))

    with pytest.raises(DeadlineExceeded):
        await one.dispatcher.infer(one.call(budget_s=0.5, tokens=stream))

    assert await ids_of(stream) == [EDGE, EDGE + 1]
    await settle(5)
    one.assert_at_rest()


@on_virtual_time
async def test_a_caller_that_leaves_cancels_the_attempt_that_speaks() -> None:
    edge, stream = target("edge_a", takes_s=9.0), TokenStream()
    edge.says_at_s = (0.01,)
    one = scene(edge, target("pool_main"))
    answering = asyncio.create_task(one.dispatcher.infer(one.call(tokens=stream)))  # type: ignore[arg-type]
    await clock.sleep(0.05)

    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)

    assert edge.cancelled == 1
    one.assert_at_rest()


@on_virtual_time
async def test_the_route_is_told_before_the_first_token() -> None:
    edge, stream, routes = target("edge_a", takes_s=0.01), TokenStream(), list[tuple[Route, str]]()
    edge.says_at_s = (0.01, 0.02)
    one = scene(edge, target("pool_main"))
    call = replace(one.call(tokens=stream), on_begun=lambda route: routes.append((route, repr(stream))))

    reply = await one.dispatcher.infer(call)

    assert reply.route is not None
    assert (routes[0][0].served_by, routes[0][0].variant) == ("edge/a", reply.route.variant)
    assert len(routes) == 1 and "0 of" in routes[0][1]


@on_virtual_time
async def test_an_answer_that_nobody_pays_for_any_more_ends_with_what_it_has_and_says_why() -> None:
    edge, stream = target("edge_a", takes_s=9.0), TokenStream()
    edge.says_at_s = (0.01, 0.02, 0.03)
    one = scene(edge, target("pool_main"))
    answering = asyncio.create_task(one.dispatcher.infer(one.call(tokens=stream)))  # type: ignore[arg-type]
    await clock.sleep(0.025)

    await cancel_and_wait(answering, why=SPENT)

    reply = answering.result()
    assert usage_of(reply.response) == Usage("length", 31, 2, 24)
    assert reply_parameters(reply)["tidegate-cut"] == "its tenant's tokens are used up"
    assert edge.cancelled == 1
    one.assert_at_rest()
