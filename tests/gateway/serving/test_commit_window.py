"""Beginnings that are held back until they are judged, on virtual time, through a whole dispatcher."""

from __future__ import annotations

import asyncio
from math import inf, log
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.operate.explanation import explanation_json
from tests.gateway.serving.test_resumption import PROMPT, Reader, newest, output_ids
from tests.support.gateway.talkers import STEP_S, Mishap, Talker, TalkScene, undisturbed
from tests.support.loop import on_virtual_time, settle
from tests.support.models.generative import TALKER
from tidegate import clock
from tidegate.fleet.offers import VariantOffer
from tidegate.generate.request import LOGPROBS_KEY
from tidegate.generate.usage import usage_of
from tidegate.models.generative import CommitWindow
from tidegate.models.manifest import Manifest, Quality
from tidegate.outcome import DeadlineExceeded, Overloaded, Unreachable
from tidegate.token_sink import TokenBatch
from tidegate.types import Reply, Route

K = 4
TABLE = ((1.0, STEP_S), (600.0, 600 * STEP_S))
INT4 = VariantOffer("int4", "int4", TABLE, max_tokens=512, slots=4, quality=0.8)
BF16 = VariantOffer("bf16", "bf16", TABLE, max_tokens=512, slots=4, quality=1.0)
SLOW = replace(BF16, cost=((1.0, 2 * STEP_S), (600.0, 1200 * STEP_S)))
SURE, UNSURE = (log(0.9),), (log(0.3),)
SMALL, LARGE = undisturbed(PROMPT, 40), undisturbed(PROMPT, 40, salt=5)


def judging(**window: Any) -> Manifest:
    (paced,) = TALKER.variants
    variants = (
        replace(paced, name="int4", where=("edge",), quality=Quality("top1", 0.8, 100)),
        replace(paced, name="bf16", where=("pool",), quality=Quality("top1", 1.0, 100)),
    )
    generative = replace(TALKER.generative, commit_window=CommitWindow(**{"threshold": 0.5, "tokens": K, **window}))
    return replace(TALKER, variants=variants, generative=generative)


def scene(edge: Talker, pool: Talker, *, overloaded: bool = False, **window: Any) -> TalkScene:
    offers = {edge.id: INT4, pool.id: BF16}
    return TalkScene(edge, pool, offers=offers, manifest=judging(**window), overloaded=lambda: overloaded)


def edge(*mishaps: Mishap, logprobs: tuple[float, ...] = UNSURE, **more: Any) -> Talker:
    return Talker("edge/a", mishaps, logprobs=logprobs, **more)


def pool(*mishaps: Mishap, **more: Any) -> Talker:
    return Talker("pool/main", mishaps, salt=5, **more)


def route_of(reply: Reply) -> Route:
    assert reply.route is not None
    return reply.route


@on_virtual_time
async def test_a_sure_beginning_is_shown_once_it_is_judged_and_whole() -> None:
    place, reader = scene(edge(logprobs=SURE), large := pool()), Reader()
    started_at = clock.now()

    reply = await reader.answer(place)

    assert reader.ids == output_ids(reply) == SMALL and large.asked == []
    assert [round((at - started_at) / STEP_S) for at in reader.came_at[: K + 2]] == [K, K, K, K, K + 1, K + 2]
    route = route_of(reply)
    assert (route.served_by, route.provisional, route.attempts) == ("edge/a", False, 1)
    assert reply.first_token_s == pytest.approx(K * STEP_S), "as its caller saw it"
    assert newest(place).wasted_tokens == 0
    place.assert_at_rest()


@on_virtual_time
async def test_an_unsure_beginning_is_never_shown_where_the_pool_answers() -> None:
    small, large = edge(), pool()
    place, reader = scene(small, large), Reader()

    reply = await reader.answer(place)

    assert reader.ids == output_ids(reply) == LARGE, "not one token of the edge's"
    route = route_of(reply)
    assert (route.served_by, route.reason, route.variant, route.attempts) == ("pool/main", "escalated", "bf16", 2)
    assert not (route.provisional or route.hedged or route.fallback or route.degraded)
    assert small.cancelled == 1
    assert (small.asked[0].logprobs, large.asked[0].logprobs) == (0, None), "the better one is not judged"
    record = newest(place)
    assert record.wasted_tokens == len(PROMPT) + K + 1, "prompt and beginning, in vain"
    told = [
        (one["what"], one["attempt"], one.get("confidence"))
        for one in explanation_json(record)["events"]
        if one["what"] != "look"
    ]
    assert told == [
        ("launched", 0, None),
        ("held", 0, None),
        ("judged", 0, 0.3),
        ("launched", 1, None),
        ("begun", 1, None),
        ("cancelled", 0, None),
        ("answered", 1, None),
    ]
    place.assert_at_rest()


@on_virtual_time
async def test_the_probabilities_that_judged_it_are_not_shown_unless_they_were_asked_for() -> None:
    async def logprobs(**parameters: Any) -> list[float]:
        place, reader = scene(edge(logprobs=SURE), pool()), Reader()
        call = place.call(reader.stream, max_tokens=6)
        request = replace(call.request, parameters={**call.request.parameters, **parameters})
        task = asyncio.create_task(place.dispatcher.infer(replace(call, request=request)))
        batches: list[TokenBatch] = []
        while sum(one.size for one in batches) < 6:
            batches += await reader.stream.take()
        await task
        return [one for batch in batches for one in batch.logprobs]

    assert await logprobs() == []
    assert await logprobs(**{LOGPROBS_KEY: 0}) == [*SURE * 6]


@on_virtual_time
@pytest.mark.parametrize("error", [Unreachable("gone"), Overloaded("full")])
async def test_the_unsure_beginning_is_shown_and_declared_where_the_pool_fails(error: Exception) -> None:
    place, reader = scene(edge(), pool(Mishap("fails", 0, error))), Reader()  # type: ignore[arg-type]
    reply = await reader.answer(place)
    assert reader.ids == output_ids(reply) == SMALL
    assert (route_of(reply).served_by, route_of(reply).provisional) == ("edge/a", True)
    place.assert_at_rest()


@on_virtual_time
async def test_a_pool_that_dies_after_its_first_token_is_gone_on_with() -> None:
    place, reader = scene(edge(), pool(Mishap("fails", 7))), Reader()
    reply = await reader.answer(place)
    assert reader.ids[:7] == LARGE[:7] and len(reader.ids) == 40
    assert [one.why for one in route_of(reply).resumed] == ["unreachable"]
    place.assert_at_rest()


@on_virtual_time
async def test_a_silent_pool_costs_time_within_the_budget_of_the_first_token_and_no_more() -> None:
    place, reader = scene(edge(), pool(Mishap("stalls", 0))), Reader()
    started_at = clock.now()
    reply = await reader.answer(place, ttft_s=0.12)
    assert reader.ids == output_ids(reply) == SMALL
    assert 0.08 < reader.came_at[0] - started_at <= 0.12, "what could be waited for was"
    assert route_of(reply).provisional
    place.assert_at_rest()


@on_virtual_time
async def test_without_a_budget_of_the_first_token_a_silent_pool_is_not_waited_for_to_the_deadline() -> None:
    place, reader = scene(edge(), pool(Mishap("stalls", 0))), Reader()
    started_at = clock.now()
    await reader.answer(place, budget_s=60.0)
    assert reader.came_at[0] - started_at < 0.5


@on_virtual_time
async def test_a_busy_moment_of_the_pool_is_waited_for_within_the_budget_of_the_first_token() -> None:
    place, reader = scene(edge(), pool(step_s=0.15)), Reader()  # it was expected to begin within 10 ms
    reply = await reader.answer(place, max_tokens=2, budget_s=60.0)
    assert reader.ids == output_ids(reply) == LARGE[:2]
    assert (route_of(reply).reason, route_of(reply).provisional) == ("escalated", False)
    assert route_of(await Reader().answer(place, max_tokens=2, ttft_s=0.1)).provisional, "nor is it longer than that"
    place.assert_at_rest()


@on_virtual_time
async def test_where_the_first_token_is_late_already_nothing_is_held() -> None:
    place, reader = scene(edge(), large := pool()), Reader()
    started_at = clock.now()
    reply = await reader.answer(place, ttft_s=0.005)
    assert reader.came_at[0] - started_at == pytest.approx(STEP_S)
    assert reader.ids == SMALL and large.asked == [] and not route_of(reply).provisional, "it was never judged"


@on_virtual_time
async def test_a_beginning_that_stalls_before_it_can_be_judged_is_shown_and_gone_on_with() -> None:
    place, reader = scene(edge(Mishap("stalls", K - 1), logprobs=SURE), pool()), Reader()
    started_at = clock.now()
    reply = await reader.answer(place)
    assert reader.ids[: K - 1] == SMALL[: K - 1] and len(reader.ids) == 40
    assert reader.came_at[0] - started_at == pytest.approx(0.25 + STEP_S, abs=0.01)
    assert [one.why for one in route_of(reply).resumed] == ["stalled"]
    place.assert_at_rest()


@on_virtual_time
@pytest.mark.parametrize(("logprobs", "by"), [(SURE, "edge/a"), (UNSURE, "pool/main")])
async def test_an_answer_shorter_than_the_window_is_judged_as_it_is(logprobs: tuple[float], by: str) -> None:
    place, reader = scene(edge(logprobs=logprobs), pool()), Reader()
    reply = await reader.answer(place, max_tokens=2)
    assert reader.ids == output_ids(reply) == (SMALL if by == "edge/a" else LARGE)[:2]
    assert (route_of(reply).served_by, route_of(reply).provisional) == (by, False)
    place.assert_at_rest()


@on_virtual_time
async def test_a_short_unsure_answer_is_given_and_declared_where_the_pool_is_silent() -> None:
    place, reader = scene(edge(), pool(Mishap("stalls", 0))), Reader()
    reply = await reader.answer(place, max_tokens=2)
    assert reader.ids == output_ids(reply) == SMALL[:2]
    assert route_of(reply).provisional and usage_of(reply.response).completion_tokens == 2
    place.assert_at_rest()


@on_virtual_time
async def test_an_unsure_answer_that_ends_while_the_pool_is_waited_for_is_still_the_lesser_one() -> None:
    place, reader = scene(edge(), pool(step_s=0.03)), Reader()
    reply = await reader.answer(place, max_tokens=K + 1)
    assert reader.ids == output_ids(reply) == LARGE[: K + 1]
    assert (route_of(reply).reason, route_of(reply).provisional) == ("escalated", False)
    place.assert_at_rest()


async def of_three(middle: Mishap, *, budget_s: float) -> tuple[Reply, Reader, float]:
    """The edge's whole answer is unsure, so is the beginning of the next better one, and the best is silent."""
    manifest = judging()
    int4, bf16 = manifest.variants
    mid = replace(bf16, name="int8", quality=Quality("top1", 0.9, 100))
    pools = Talker("pool/mid", (middle,), salt=7, step_s=0.03, logprobs=UNSURE), pool(Mishap("stalls", 0))
    place = TalkScene(
        edge(),
        *pools,
        offers={"edge/a": INT4, "pool/mid": replace(BF16, name="int8", quality=0.9), "pool/main": SLOW},
        manifest=replace(manifest, variants=(int4, mid, bf16)),
    )
    reader, started_at = Reader(), clock.now()
    reply = await reader.answer(place, max_tokens=K + 1, budget_s=budget_s)
    assert [len(one.asked) for one in place.talkers.values()] == [1, 1, 1]
    await settle()
    place.assert_at_rest()
    return reply, reader, clock.now() - started_at


@on_virtual_time
async def test_an_answer_in_hand_outlives_the_unsure_beginning_of_a_better_one_that_fails() -> None:
    reply, reader, _ = await of_three(Mishap("fails", K), budget_s=1.0)
    assert reader.ids == output_ids(reply) == SMALL[: K + 1]
    assert (route_of(reply).served_by, route_of(reply).provisional) == ("edge/a", True)


@on_virtual_time
async def test_an_answer_in_hand_is_given_when_it_is_due_though_a_better_one_has_begun() -> None:
    reply, reader, took_s = await of_three(Mishap("stalls", K), budget_s=0.35)
    assert reader.ids == output_ids(reply) == SMALL[: K + 1]
    assert (route_of(reply).served_by, route_of(reply).provisional) == ("edge/a", True)
    assert took_s < 0.35


@on_virtual_time
async def test_an_edge_that_dies_with_a_held_beginning_has_said_nothing() -> None:
    place, reader = scene(edge(Mishap("fails", K - 1), logprobs=SURE), pool()), Reader()
    reply = await reader.answer(place)
    assert reader.ids == output_ids(reply) == LARGE
    assert (route_of(reply).fallback, route_of(reply).resumed) == (True, ())
    assert newest(place).wasted_tokens == len(PROMPT) + K - 1
    place.assert_at_rest()


@on_virtual_time
async def test_a_caller_who_leaves_while_a_beginning_is_held_leaves_nothing_behind() -> None:
    small, large = edge(), pool(Mishap("stalls", 0))
    place, reader = scene(small, large), Reader()
    task = asyncio.create_task(place.dispatcher.infer(place.call(reader.stream, ttft_s=1.0)))
    await clock.sleep(0.055)
    assert len(large.asked) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert (small.cancelled, large.cancelled) == (1, 1)
    place.assert_at_rest()


@on_virtual_time
@pytest.mark.parametrize("words", [{"pin": "edge"}, {"variant": "int4"}])
async def test_who_may_not_be_escalated_is_not_kept_waiting(words: dict[str, Any]) -> None:
    small = edge()
    place, reader = scene(small, pool()), Reader()
    started_at = clock.now()
    reply = await reader.answer(place, **words)
    assert reader.ids == SMALL and not route_of(reply).provisional
    assert reader.came_at[0] - started_at == pytest.approx(STEP_S)
    assert small.asked[0].logprobs is None
    place.assert_at_rest()


@on_virtual_time
async def test_in_overload_an_unsure_beginning_is_shown_at_once_and_declared() -> None:
    place, reader = scene(edge(), large := pool(), overloaded=True), Reader()
    reply = await reader.answer(place)
    assert reader.ids == SMALL and large.asked == [] and route_of(reply).provisional


@on_virtual_time
async def test_a_target_that_gives_no_probabilities_is_not_judged() -> None:
    place, reader = scene(edge(logprobs=()), large := pool()), Reader()
    reply = await reader.answer(place)
    assert reader.ids == SMALL and large.asked == [] and not route_of(reply).provisional


@on_virtual_time
@pytest.mark.parametrize("strange", [-inf, float("nan"), inf])
async def test_probabilities_that_are_none_count_as_unsure(strange: float) -> None:
    place, reader = scene(edge(logprobs=(log(0.9), strange)), pool()), Reader()
    await reader.answer(place)
    assert reader.ids == LARGE


@on_virtual_time
async def test_a_reader_with_a_window_shorter_than_the_beginning_is_served() -> None:
    place, reader = scene(edge(logprobs=SURE), pool()), Reader(window=2)
    started_at = clock.now()
    reply = await reader.answer(place)
    assert reader.ids == output_ids(reply) == SMALL
    assert reader.came_at[0] - started_at == pytest.approx(2 * STEP_S), "as much is judged as may come"


@on_virtual_time
async def test_an_answer_in_one_piece_is_judged_by_its_beginning_too() -> None:
    place = scene(edge(), pool())
    reply = await place.dispatcher.infer(place.call(None))
    assert output_ids(reply) == LARGE and route_of(reply).reason == "escalated"
    await settle()
    place.assert_at_rest()


@pytest.mark.slow
@on_virtual_time
async def test_no_more_than_the_models_share_is_escalated() -> None:
    small, large = edge(), pool()
    place = scene(small, large, max_share=0.1)
    provisional = 0
    for _ in range(200):
        reply = await place.dispatcher.infer(place.call(None, max_tokens=6))
        provisional += route_of(reply).provisional
    assert len(large.asked) == 200 - provisional
    assert 40 <= len(large.asked) <= 52, "a burst of thirty, and a tenth"
    place.assert_at_rest()


@on_virtual_time
async def test_an_answer_that_cannot_be_whole_in_time_elsewhere_stays() -> None:
    place, reader = scene(edge(), large := pool()), Reader()
    with pytest.raises(DeadlineExceeded):
        await reader.answer(place, budget_s=0.3)
    assert large.asked == [] and reader.ids == SMALL[: len(reader.ids)] and len(reader.ids) > 20
