"""Answers that a better place goes on with while the first target speaks, on virtual time, through a whole dispatcher.

The rule is a script here: what is held to account is that whatever it says no token is lost or comes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.handover import HandoverPlan
from gateway.core.request.resumption import MOST, Resumption
from gateway.serving.attempt_tokens import AttemptTokens
from tests.gateway.serving.test_resumption import PROMPT, WHOLE, Reader, mishap_of, newest, output_ids
from tests.support.gateway.talkers import STEP_S, Mishap, Talker, TalkScene, undisturbed
from tests.support.loop import on_virtual_time, run, settle
from tidegate import clock
from tidegate.generate.request import INPUT_IDS, ids_tensor
from tidegate.generate.usage import usage_of
from tidegate.outcome import ServeError
from tidegate.types import Reply, Route

SLOW_S = 6 * STEP_S


class Script:
    """A `HandoverPolicy`: hands an answer over once it has so many tokens."""

    def __init__(self, at: int, keeps_s: float | None = None, gives_up_s: float = 3.0, begins: str = "") -> None:
        self.at, self.keeps_s, self.gives_up_s, self.begun_at = at, keeps_s, gives_up_s, begins
        self.shares: list[float] = []

    def begins(self, ask: Ask, decision: Decision, now: float) -> Candidate | None:
        return next((one for one in decision.candidates if one.target.id == self.begun_at), None)

    def plan(
        self, ask: Ask, speaks: Candidate, resumption: Resumption, decision: Decision, now: float
    ) -> HandoverPlan | float:
        if decision.chosen is None or len(resumption.answer) < self.at:
            return now + 2 * STEP_S
        return HandoverPlan(0.3, None if self.keeps_s is None else now + self.keeps_s, now + self.gives_up_s)

    def may_hand_over(self, share: float) -> bool:
        self.shares.append(share)
        return True


def pair(script: Script, first: Talker | None = None, second: Talker | None = None) -> TalkScene:
    first = first or Talker("edge/a", step_s=SLOW_S)
    return TalkScene(first, second or Talker("pool/b"), handovers=script)


@on_virtual_time
async def test_what_gives_the_same_text_faster_goes_on_without_a_pause() -> None:
    scene, reader = pair(Script(at=4, begins="edge/a")), Reader()
    reply = await reader.answer(scene)

    assert reader.ids == output_ids(reply) == WHOLE
    (asked,) = scene.talkers["pool/b"].asked
    assert asked.prompt == (*PROMPT, *WHOLE[:4]) and (asked.max_tokens, asked.answered) == (36, 4)
    assert reply.route is not None
    (resumed,) = reply.route.resumed
    assert (resumed.lost, resumed.by, resumed.why, resumed.grade) == ("edge/a", "pool/b", "planned", "exact")
    assert resumed.at >= 4 and resumed.gap_s <= SLOW_S
    gaps = [later - sooner for sooner, later in zip(reader.came_at, reader.came_at[1:], strict=False)]
    assert max(gaps) <= SLOW_S + 1e-6, "the first goes on until the second has come to where it is"
    assert (reply.route.served_by, reply.route.reason, reply.route.attempts) == ("pool/b", "planned", 2)
    assert newest(scene).reasons == ("handover", "planned")
    usage = usage_of(reply.response)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.finish_reason) == (3, 40, "length")
    # The prompt and four tokens once more, and what the second repeated of the first's.
    assert newest(scene).wasted_tokens == 3 + 4 + (resumed.at - 4)
    assert scene.talkers["edge/a"].cancelled == 1
    await settle()
    scene.assert_at_rest()


@on_virtual_time
async def test_what_gives_another_text_goes_on_from_what_the_caller_has_and_what_was_kept_is_dropped() -> None:
    routes: list[Route] = []
    scene = pair(Script(at=4, keeps_s=1.0), second=Talker("pool/b", step_s=2.5 * SLOW_S, salt=77))
    reader = Reader()
    reply = await reader.answer(scene, on_begun=routes.append)

    has = WHOLE[:4]
    assert reader.ids == output_ids(reply) == has + undisturbed((*PROMPT, *has), 36, salt=77)
    assert reply.route is not None and reply.route.resumed[0].at == 4
    assert reply.route.resumed[0].gap_s == pytest.approx(2.5 * SLOW_S, abs=SLOW_S)
    assert [route.served_by for route in routes] == ["edge/a", "pool/b"]
    assert newest(scene).wasted_tokens >= 3 + 4 + 2, "the prompt once more, and two tokens that were kept"
    scene.assert_at_rest()


@on_virtual_time
async def test_what_was_kept_is_given_once_the_second_is_late_and_one_that_differs_then_is_left() -> None:
    scene = pair(Script(at=4, keeps_s=2 * SLOW_S), second=Talker("pool/b", step_s=5 * SLOW_S, salt=77))
    reader = Reader()
    reply = await reader.answer(scene)
    assert reader.ids == output_ids(reply) == WHOLE and reply.route is not None
    assert reply.route.resumed == () and reply.route.served_by == "edge/a" and reply.route.attempts == 2
    assert scene.talkers["pool/b"].cancelled == 1
    assert "differed" in [note.what for note in newest(scene).notes]
    scene.assert_at_rest()


@pytest.mark.parametrize("keeps_s", [None, 0.5])
@pytest.mark.parametrize("what", ["fails", "stalls"])
def test_a_second_target_that_fails_or_is_silent_costs_the_answer_nothing(what: Any, keeps_s: float | None) -> None:
    @on_virtual_time
    async def lives() -> None:
        scene = pair(Script(at=4, keeps_s=keeps_s, gives_up_s=0.7), second=Talker("pool/b", [Mishap(what, 0, late=2)]))
        reader = Reader()
        reply = await reader.answer(scene)
        assert reader.ids == output_ids(reply) == WHOLE
        assert reply.route is not None and reply.route.resumed == () and len(scene.talkers["pool/b"].asked) == 1
        scene.assert_at_rest()

    lives()


@pytest.mark.parametrize("keeps_s", [None, 0.5])
def test_a_first_target_that_dies_in_the_middle_of_it_is_gone_on_with_as_ever(keeps_s: float | None) -> None:
    @on_virtual_time
    async def lives() -> None:
        first = Talker("edge/a", [Mishap("fails", 6)], step_s=SLOW_S)
        scene = pair(Script(at=4, keeps_s=keeps_s), first, Talker("pool/b", step_s=4 * SLOW_S))
        reader = Reader()
        reply = await reader.answer(scene)
        assert reader.ids == output_ids(reply) == WHOLE and reply.route is not None
        assert [(one.why, one.at) for one in reply.route.resumed] == [("unreachable", 6)]
        scene.assert_at_rest()

    lives()


@on_virtual_time
async def test_an_answer_that_may_not_go_on_elsewhere_is_not_handed_over() -> None:
    for words in ({"resumes": False}, {"pin": "edge"}):
        scene, reader = pair(Script(at=4)), Reader()
        reply = await reader.answer(scene, **words)
        assert reader.ids == output_ids(reply) == WHOLE and reply.route is not None and reply.route.attempts == 1


@on_virtual_time
async def test_a_caller_that_leaves_in_the_middle_of_it_leaves_nothing() -> None:
    scene, reader = pair(Script(at=4, keeps_s=9.0), second=Talker("pool/b", [Mishap("stalls", 0)])), Reader()
    asking = asyncio.create_task(scene.dispatcher.infer(scene.call(reader.stream)))
    await clock.sleep(6 * SLOW_S)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await settle()
    assert [talker.cancelled for talker in scene.talkers.values()] == [1, 1]
    scene.assert_at_rest()


async def live(seed: int) -> tuple[int, str]:
    """One answer's life among three targets: how often it was handed over, and how it ended."""
    chance = Random(seed)
    script = Script(
        chance.choice([1, 2, 5, 20]),
        chance.choice([None, 0.0, 0.03, 0.2, 1.0]),
        chance.choice([0.02, 0.3, 3.0]),
        chance.choice(["", "edge/a", "edge/b"]),
    )
    other = 77 if chance.random() < 0.3 else 0  # the text of edge/b
    steps = {id: STEP_S * chance.choice([0.3, 1, 1, 4]) for id in ("edge/a", "edge/b", "pool/c")}
    talkers = [
        Talker(
            id,
            [mishap_of(chance) for _ in range(chance.choice([0, 0, 1, 2]))],
            step_s=step_s,
            salt=other if id == "edge/b" else 0,
        )
        for id, step_s in steps.items()
    ]
    scene = TalkScene(*talkers, handovers=script)
    prompt = tuple(chance.randrange(200) for _ in range(chance.choice([1, 3, 9])))
    slow = chance.random() < 0.2
    reader = Reader(chance.choice([3, 16, 256]), lambda: chance.choice([0.0, 0.02, 0.5]) if slow else 0.0)
    whole = chance.random() < 0.1
    call = scene.call(None if whole else reader.stream)
    call = replace(call, request=replace(call.request, inputs=(ids_tensor(INPUT_IDS, prompt),)))
    reading = asyncio.create_task(reader.read())
    ended, reply = "answered", None
    try:
        reply = await scene.dispatcher.infer(call)
    except ServeError as error:
        ended = error.code
    reader.stream.end()
    await reading
    if reply is not None:
        assert whole or output_ids(reply) == reader.ids
        hold_to_truth(prompt, output_ids(reply), reply, other)
    elif not other:
        assert reader.ids == undisturbed(prompt, 40)[: len(reader.ids)]
    await clock.sleep(1.0)  # what is late comes now
    assert reader.stream.received == len(reader.ids)
    scene.assert_at_rest()
    resumed = () if reply is None or reply.route is None else reply.route.resumed
    return sum(one.why == "planned" for one in resumed), ended


def hold_to_truth(prompt: tuple[int, ...], ids: list[int], reply: Reply, other: int) -> None:
    """Each part of the answer is what its target makes of all that is before it."""
    assert reply.route is not None and len(reply.route.resumed) <= MOST
    first = reply.route.resumed[0].lost if reply.route.resumed else reply.route.served_by
    parts = [(0, first), *[(one.at, one.by) for one in reply.route.resumed]]
    for (at, by), (until, _) in zip(parts, [*parts[1:], (len(ids), "")], strict=True):
        salt = other if by == "edge/b" else 0
        assert ids[at:until] == undisturbed((*prompt, *ids[:at]), until - at, salt)
    usage = usage_of(reply.response)
    stopped = usage.finish_reason == "stop"
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(ids) + stopped)
    assert stopped or len(ids) == 40


async def lives(seeds: range) -> tuple[int, dict[str, int]]:
    handed, ends = 0, dict[str, int]()
    for seed in seeds:
        try:
            times, ended = await live(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        handed += times
        ends[ended] = ends.get(ended, 0) + 1
    return handed, ends


@pytest.mark.slow
def test_hundreds_of_handovers_lose_and_double_no_token() -> None:
    handed, ends = run(lives(range(400)))
    assert handed > 100 and ends["answered"] > 0.9 * sum(ends.values()), (handed, ends)


def _gives_all(self: AttemptTokens, batch: Any) -> int:
    return 0


def _drops_what_was_kept(self: AttemptTokens) -> None:
    self._kept = None


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (AttemptTokens, "_repeats", _gives_all),
        (AttemptTokens, "release", _drops_what_was_kept),
        (AnswerSoFar, "has", lambda self, place, ids: True),
    ],
)
def test_a_defect_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, defect: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises(Exception):  # noqa: B017 - each shows in its own way
        run(lives(range(400)))
