"""Answers that are gone on with by another target, on virtual time, through a whole dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.history.recorder import RequestRecord
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.resumption import MOST, Resumption
from gateway.serving import execution
from gateway.serving.attempt_tokens import AttemptTokens
from tests.support.gateway.talkers import PACED, STEP_S, Mishap, Talker, TalkScene, undisturbed
from tests.support.loop import on_virtual_time, run, settle
from tidegate import clock
from tidegate.generate.request import INPUT_IDS, ids_of, ids_tensor
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import usage_of
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Disconnected,
    InternalError,
    InvalidRequest,
    Overloaded,
    ServeError,
    Unreachable,
)
from tidegate.types import Reply, Route

PROMPT = (1, 2, 3)
WHOLE = undisturbed(PROMPT, 40)


class Reader:
    """Reads a stream to its end, with pauses, and checks that no index is missing or comes twice."""

    def __init__(self, window: int = 256, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        self.stream = TokenStream(window)
        self.ids: list[int] = []
        self.came_at: list[float] = []
        self._pause_s = pause_s

    async def read(self) -> None:
        while batches := await self.stream.take():
            # Each target that goes on may give one token without credit.
            assert sum(len(batch.ids) for batch in batches) <= self.stream.window + MOST
            for batch in batches:
                assert batch.first == len(self.ids), f"token {batch.first} after {len(self.ids)}"
                self.ids += batch.ids
                self.came_at.append(clock.now())
            await clock.sleep(self._pause_s())

    async def answer(self, scene: TalkScene, **words: Any) -> Reply:
        reading = asyncio.create_task(self.read())
        try:
            return await scene.dispatcher.infer(scene.call(self.stream, **words))
        finally:
            self.stream.end()
            await reading


def output_ids(reply: Reply) -> list[int]:
    return list(ids_of(reply.response.outputs[0]))


def newest(scene: TalkScene) -> RequestRecord:
    return next(reversed(scene.dispatcher.recorder))


def pair(*mishaps: Mishap) -> TalkScene:
    return TalkScene(Talker("edge/a", mishaps), Talker("edge/b"))


@on_virtual_time
async def test_an_answer_goes_on_elsewhere_from_the_token_at_which_its_target_died() -> None:
    scene, reader = pair(Mishap("fails", 17)), Reader()

    reply = await reader.answer(scene)

    assert reader.ids == output_ids(reply) == WHOLE and len(WHOLE) == 40
    (asked,) = scene.talkers["edge/b"].asked
    assert asked.prompt == (*PROMPT, *WHOLE[:17])
    assert (asked.max_tokens, asked.answered) == (23, 17)
    usage = usage_of(reply.response)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.finish_reason) == (3, 40, "length")
    assert reply.route is not None
    (resumed,) = reply.route.resumed
    assert (resumed.lost, resumed.by, resumed.at, resumed.grade, resumed.why) == (
        "edge/a",
        "edge/b",
        17,
        "exact",
        "unreachable",
    )
    assert resumed.gap_s == pytest.approx(STEP_S, abs=1e-6)
    assert (reply.route.served_by, reply.route.reason, reply.route.attempts, reply.route.fallback) == (
        "edge/b",
        "resumed",
        2,
        False,
    )
    assert reply.first_token_s == pytest.approx(STEP_S, abs=1e-6)
    record = newest(scene)
    assert record.outcome == "ok" and record.answer is not None and record.wasted_tokens == 20
    assert record.answer.usage == usage and record.answer.route.resumed == (resumed,)
    scene.assert_at_rest()


@on_virtual_time
async def test_a_target_that_stalls_is_left_and_what_it_says_later_is_not_heard() -> None:
    scene, reader = pair(Mishap("stalls", 30, late=3)), Reader()

    reply = await reader.answer(scene)

    assert reader.ids == output_ids(reply) == WHOLE
    assert reply.route is not None
    (resumed,) = reply.route.resumed
    assert (resumed.why, resumed.at) == ("stalled", 30)
    assert resumed.gap_s == pytest.approx(0.25 + STEP_S, abs=0.005)
    assert scene.talkers["edge/a"].cancelled == 1
    await settle()
    scene.assert_at_rest()


@on_virtual_time
async def test_before_its_usual_gaps_are_known_a_target_is_waited_for_longer() -> None:
    scene, reader = pair(Mishap("stalls", 5)), Reader()
    reply = await reader.answer(scene)
    assert reader.ids == WHOLE and reply.route is not None
    assert reply.route.resumed[0].gap_s == pytest.approx(1.0 + STEP_S, abs=0.005)


@on_virtual_time
async def test_a_stalled_answer_without_another_place_waits_and_is_not_cut() -> None:
    scene, reader = TalkScene(Talker("edge/a", [Mishap("stalls", 30)])), Reader()
    with pytest.raises(DeadlineExceeded):
        await reader.answer(scene, budget_s=5.0)
    assert reader.ids == WHOLE[:30] and reader.came_at[-1] < 1001.0
    assert scene.talkers["edge/a"].cancelled == 1
    scene.assert_at_rest()


@on_virtual_time
async def test_a_reader_that_is_slow_is_no_stall() -> None:
    scene, reader = pair(), Reader(window=4, pause_s=lambda: 3.0)
    reply = await reader.answer(scene, budget_s=1000.0)
    assert reader.ids == output_ids(reply) == WHOLE
    assert reply.route is not None and reply.route.resumed == () and scene.talkers["edge/b"].asked == []


@on_virtual_time
async def test_the_credit_of_a_slow_reader_is_the_next_targets() -> None:
    pauses = iter([0.0, 2.0, 0.0, 5.0])
    scene = pair(Mishap("fails", 12))
    reader = Reader(window=12, pause_s=lambda: next(pauses, 0.0))
    reply = await reader.answer(scene, budget_s=1000.0)
    assert reader.ids == output_ids(reply) == WHOLE


@on_virtual_time
async def test_a_target_that_leaves_hands_its_answer_over() -> None:
    scene, reader = pair(Mishap("leaves", 20)), Reader()
    reply = await reader.answer(scene, max_tokens=150)
    assert reader.ids == undisturbed(PROMPT, 150)
    assert reply.route is not None
    (resumed,) = reply.route.resumed
    assert (resumed.why, resumed.lost, resumed.by) == ("drain", "edge/a", "edge/b")
    assert resumed.gap_s < 3 * STEP_S and 20 < resumed.at <= 70
    scene.assert_at_rest()


@on_virtual_time
async def test_a_target_that_leaves_ends_its_answer_itself_where_there_is_no_other() -> None:
    scene, reader = TalkScene(Talker("edge/a", [Mishap("leaves", 3)])), Reader()
    reply = await reader.answer(scene, max_tokens=150)
    assert reader.ids == undisturbed(PROMPT, 150) and reply.route is not None and reply.route.resumed == ()


@on_virtual_time
async def test_a_connection_that_was_lost_may_be_gone_on_with_at_the_same_target() -> None:
    scene, reader = TalkScene(Talker("edge/a", [Mishap("fails", 9, Disconnected("cut"))])), Reader()
    reply = await reader.answer(scene)
    assert reader.ids == output_ids(reply) == WHOLE and reply.route is not None
    assert (reply.route.resumed[0].lost, reply.route.resumed[0].by) == ("edge/a", "edge/a")


@on_virtual_time
async def test_where_no_other_is_left_a_target_that_was_left_before_goes_on() -> None:
    scene = TalkScene(Talker("edge/a", [Mishap("stalls", 30)]), Talker("edge/b", [Mishap("fails", 0)]))
    reader = Reader()
    reply = await reader.answer(scene)
    assert reader.ids == output_ids(reply) == WHOLE and reply.route is not None
    (resumed,) = reply.route.resumed
    assert (resumed.lost, resumed.by, resumed.at, reply.route.attempts) == ("edge/a", "edge/a", 30, 3)
    scene.assert_at_rest()


@on_virtual_time
async def test_a_target_that_is_lost_after_the_last_token_loses_nothing() -> None:
    for mishap in (Mishap("fails", 40), Mishap("stalls", 40)):
        talker = Talker("edge/a", [mishap])
        scene, reader = TalkScene(talker, Talker("edge/b")), Reader()
        reply = await reader.answer(scene)
        assert reader.ids == output_ids(reply) == WHOLE
        usage = usage_of(reply.response)
        assert (usage.prompt_tokens, usage.completion_tokens, usage.finish_reason) == (3, 40, "length")
        assert scene.talkers["edge/b"].asked == []
        await settle()
        scene.assert_at_rest()


@on_virtual_time
async def test_an_answer_in_one_piece_is_gone_on_with_as_well() -> None:
    scene = pair(Mishap("fails", 17))
    reply = await scene.dispatcher.infer(scene.call(None))
    assert output_ids(reply) == WHOLE and reply.first_token_s is None
    assert usage_of(reply.response).completion_tokens == 40
    assert scene.talkers["edge/b"].asked[0].answered == 17
    scene.assert_at_rest()


@on_virtual_time
async def test_the_front_is_told_of_each_target_that_goes_on_before_its_first_token() -> None:
    routes: list[tuple[Route, int]] = []
    scene, reader = pair(Mishap("fails", 5)), Reader()
    await reader.answer(scene, on_begun=lambda route: routes.append((route, reader.stream.received)))
    assert [(route.served_by, len(route.resumed), received) for route, received in routes] == [
        ("edge/a", 0, 0),
        ("edge/b", 1, 5),
    ]


@on_virtual_time
async def test_an_error_that_is_the_callers_or_the_clocks_ends_the_answer() -> None:
    for error in (InvalidRequest("no such token"), DeadlineExceeded("it was not read for 60 s")):
        scene, reader = pair(Mishap("fails", 5, error)), Reader()
        with pytest.raises(type(error), match="after 5 tokens it could not be gone on with: another target would"):
            await reader.answer(scene)
        assert reader.ids == WHOLE[:5]
        scene.assert_at_rest()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"resumes": False}, "tidegate-resume: never"),
        ({"variant": "paced", "only": "edge/a"}, "has other"),
        ({"pin": "edge"}, "outside of the pin"),
    ],
)
def test_an_answer_that_may_not_go_on_ends_with_the_reason(words: dict[str, Any], why: str) -> None:
    @on_virtual_time
    async def lives() -> None:
        other = replace(PACED, name="other", precision="other")
        offers = {"pool/b": other} if words.pop("only", "") else {}
        scene = TalkScene(Talker("edge/a", [Mishap("fails", 5)]), Talker("pool/b"), offers=offers)
        reader = Reader()
        with pytest.raises(Unreachable, match=f"killed; after 5 tokens it could not be gone on with: .*{why}"):
            await reader.answer(scene, **words)
        assert reader.ids == WHOLE[:5] and scene.talkers["pool/b"].asked == []
        assert newest(scene).outcome == "unreachable"
        scene.assert_at_rest()

    lives()


@on_virtual_time
async def test_a_schema_is_not_gone_on_with() -> None:
    offers = {id: replace(PACED, schemas=True) for id in ("edge/a", "edge/b")}
    scene = TalkScene(Talker("edge/a", [Mishap("fails", 5)]), Talker("edge/b"), offers=offers)
    reader = Reader()
    call = scene.call(reader.stream)
    request = replace(call.request, parameters={**call.request.parameters, "json_schema": "{}"})
    with pytest.raises(Unreachable, match="JSON schema"):
        await scene.dispatcher.infer(replace(call, request=request))
    assert scene.talkers["edge/b"].asked == []


@on_virtual_time
async def test_a_target_that_does_not_work_on_ids_is_passed_over() -> None:
    offers = {"edge/b": replace(PACED, grade="text")}
    scene = TalkScene(Talker("edge/a", [Mishap("fails", 5)]), Talker("edge/b"), Talker("pool/c"), offers=offers)
    reader = Reader()
    reply = await reader.answer(scene)
    assert reader.ids == WHOLE and reply.route is not None and reply.route.served_by == "pool/c"


@on_virtual_time
async def test_another_variant_goes_on_and_says_so() -> None:
    other = replace(PACED, name="other", precision="other")
    scene = TalkScene(Talker("edge/a", [Mishap("fails", 5)]), Talker("pool/b"), offers={"pool/b": other})
    reader = Reader()
    reply = await reader.answer(scene)
    assert reader.ids == WHOLE and reply.route is not None
    (resumed,) = reply.route.resumed
    assert (resumed.grade, resumed.because) == ("continued", "other goes on for paced")


@on_virtual_time
async def test_where_not_all_can_be_in_time_the_rest_is_begun_all_the_same() -> None:
    scene, reader = pair(Mishap("fails", 17)), Reader()
    with pytest.raises(DeadlineExceeded):
        await reader.answer(scene, budget_s=0.3, max_tokens=40)
    assert reader.ids == WHOLE[: len(reader.ids)] and len(reader.ids) > 17


ERRORS: tuple[ServeError, ...] = (
    Unreachable("killed"),
    Disconnected("cut"),
    InternalError("the engine failed"),
    BadAnswer("a gap"),
    Overloaded("out of memory"),
)


def mishap_of(chance: Random) -> Mishap:
    what = chance.choice(["fails", "fails", "fails", "stalls", "leaves"])
    return Mishap(what, chance.choice([0, 0, 1, 2, 5, 11, 40]), chance.choice(ERRORS), chance.choice([0, 0, 1, 3]))


async def live(seed: int) -> tuple[int, str]:
    """One answer's life among three targets: the mishaps that befell it, and how it ended."""
    chance = Random(seed)
    mishaps = {id: [mishap_of(chance) for _ in range(chance.choice([0, 1, 2, 3]))] for id in ("edge/a", "edge/b")}
    planned = sum(map(len, mishaps.values()))
    scene = TalkScene(*[Talker(id, made) for id, made in mishaps.items()], Talker("pool/c"))
    prompt = tuple(chance.randrange(200) for _ in range(chance.choice([1, 3, 9])))
    expected = undisturbed(prompt, 40)
    slow = chance.random() < 0.2
    reader = Reader(chance.choice([3, 16, 256]), lambda: chance.choice([0.0, 0.02, 1.5]) if slow else 0.0)
    whole = chance.random() < 0.1
    call = scene.call(None if whole else reader.stream)
    call = replace(call, request=_with_prompt(call.request, prompt))
    reading = asyncio.create_task(reader.read())
    ended = "answered"
    try:
        reply = await scene.dispatcher.infer(call)
        assert output_ids(reply) == expected
        usage = usage_of(reply.response)
        stopped = len(expected) < 40
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected) + stopped)
        assert usage.finish_reason == ("stop" if stopped else "length")
        assert reply.route is not None and len(reply.route.resumed) <= MOST
        if not whole:
            assert reader.stream.received == len(expected)
    except ServeError as error:
        ended = error.code
    reader.stream.end()
    await reading
    assert reader.ids == expected[: len(reader.ids)]
    assert ended == "answered" or len(reader.ids) < 40, "all that it asked for was there"
    await clock.sleep(1.0)  # what is late comes now
    assert reader.stream.received == len(reader.ids)
    scene.assert_at_rest()
    assert len(scene.dispatcher.recorder) == 1
    return planned - sum(len(one.mishaps) for one in scene.talkers.values()), ended


def _with_prompt(request: Any, prompt: tuple[int, ...]) -> Any:
    return replace(request, inputs=(ids_tensor(INPUT_IDS, prompt),))


async def lives(seeds: range) -> tuple[int, dict[str, int]]:
    befell, ends = 0, dict[str, int]()
    for seed in seeds:
        try:
            mishaps, ended = await live(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        befell += mishaps
        ends[ended] = ends.get(ended, 0) + 1
    return befell, ends


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute of a core, of which a busy machine gives a fifth
def test_ten_thousand_mishaps_lose_and_double_no_token() -> None:
    befell, ends = run(lives(range(8000)))
    assert befell >= 10_000
    assert ends["answered"] > 0.9 * sum(ends.values()), ends


def _keeps_talking(self: AttemptTokens) -> None:
    self._answer.falls_silent()


def _forgets_a_token(request: Any, answer: AnswerSoFar, terms: Any) -> Any:
    answer.ids = answer.ids[:-1]
    return execution_continued(request, answer, terms)


def _asks_for_too_many(self: Resumption) -> bool:
    return False


execution_continued = execution.continued_request


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (AttemptTokens, "leave", _keeps_talking),
        (execution, "continued_request", _forgets_a_token),
        (execution, "joined_response", lambda last, answer, before, terms: last),
        (Resumption, "is_complete", property(_asks_for_too_many)),
        (AnswerSoFar, "window", property(lambda self: 256)),
    ],
)
def test_a_defect_does_not_pass(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, defect: Any) -> None:
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises(Exception):  # noqa: B017 - each shows in its own way
        run(lives(range(300)))
