"""Token comparison: which generations are compared, on what, and that stopping early accuses nobody."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.agreement.token_comparison import (
    MOST_DIFFERENCES,
    MOST_POSITIONS,
    MOST_PROMPT,
    GreedyPrompt,
    TokenComparison,
    greedy_prompt,
    known_answer,
)
from tests.support.models.generative import GENERATIVE, talker
from tidegate.generate.request import OUTPUT_IDS, GenerateRequest, Sampling, ids_tensor, infer_request
from tidegate.generate.teacher_forcing import KnownAnswer
from tidegate.generate.usage import FinishReason, Usage, usage_parameters
from tidegate.types import Datatype, InferRequest, InferResponse, Tensor

PROMPT = (100, 101, 102)
GREEDY = GreedyPrompt(GenerateRequest(PROMPT, MOST_POSITIONS), is_own=True)


def response(ids: tuple[int, ...], reason: FinishReason = "length") -> InferResponse:
    usage = usage_parameters(Usage(reason, len(PROMPT), len(ids)))
    return InferResponse("talker", "1", (ids_tensor(OUTPUT_IDS, ids),), parameters=usage)


def compared(known: KnownAnswer, differs: tuple[bool, ...]) -> tuple[float, int]:
    """The score where the follower differs at these positions, and in how many runs."""
    comparison, runs = TokenComparison(known), 0
    while (request := comparison.next_request()) is not None:
        runs += 1
        at = len(request.prompt) - len(known.prompt)
        assert request.prompt[len(PROMPT) :] == known.ids[:at]
        assert comparison.expected == known.ids[at:]
        place = next((one for one in range(at, len(differs)) if differs[one]), None)
        if place is None:
            comparison.take(known.ids[at:], stopped=known.stopped)
        else:
            comparison.take((*known.ids[at:place], 999), stopped=False)
    return comparison.score, runs


@pytest.mark.parametrize(
    ("differs", "score", "runs"),
    [
        ("........", 0.0, 1),
        ("...x....", 1 / 8, 2),
        ("x......x", 2 / 8, 2),
        ("x.x..x..", 2 / 5, 3),  # left at the third difference
        (".....xxx", 2 / 7, 3),
        ("xxx.....", 1.0, 3),
        ("x", 1.0, 1),
    ],
)
def test_the_score_is_the_share_of_positions_that_differ_unless_it_was_left_early(
    differs: str, score: float, runs: int
) -> None:
    known = KnownAnswer(PROMPT, tuple(range(len(differs))))
    assert compared(known, tuple(one == "x" for one in differs)) == (pytest.approx(score), runs)


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.5])
def test_stopping_early_does_not_move_the_mean(chance: float) -> None:
    """Over all patterns of 8 positions, by their chance: the mean score is the share that differs."""
    known, mean = KnownAnswer(PROMPT, tuple(range(8))), 0.0
    for differs in product((False, True), repeat=8):
        mean += chance ** sum(differs) * (1.0 - chance) ** (8 - sum(differs)) * compared(known, differs)[0]
    assert mean == pytest.approx(chance)


def test_more_tokens_than_were_asked_for_change_nothing() -> None:
    comparison = TokenComparison(KnownAnswer(PROMPT, (1, 2)))
    comparison.take((1, 2, 3, 4, 5), stopped=False)
    assert comparison.next_request() is None and comparison.score == 0.0


def test_one_word_again_and_again_is_found_by_its_first_positions() -> None:
    known = KnownAnswer(PROMPT, (7,) * MOST_POSITIONS)
    differs = tuple(at < MOST_DIFFERENCES for at in range(MOST_POSITIONS))
    assert compared(known, differs)[0] == 1.0


def test_a_stop_token_is_a_position_of_its_own() -> None:
    known = KnownAnswer(PROMPT, (1, 2), stopped=True)
    assert compared(known, (False, False, False)) == (0.0, 1)
    assert compared(known, (False, False, True)) == (pytest.approx(1 / 3), 1)
    assert repr(TokenComparison(known)) == "<TokenComparison <TeacherForcing 0 of 0 agree, 3 to go>>"


@pytest.mark.parametrize(
    ("changes", "is_own"),
    [
        ({}, True),
        ({"logprobs": 3}, True),
        ({"sampling": Sampling(0.7, seed=1)}, False),
        ({"schema": "{}"}, False),
        ({"stop_tokens": (5,)}, False),
        ({"ignore_stop": True}, False),
        ({"answered": 2}, False),
    ],
    ids=str,
)
def test_an_answer_is_compared_if_a_plain_greedy_one_begins_so_and_else_its_prompt(
    changes: dict[str, Any], is_own: bool
) -> None:
    asked = infer_request("talker", replace(GenerateRequest(PROMPT, 200), **changes))
    assert greedy_prompt(asked, GENERATIVE) == GreedyPrompt(GenerateRequest(PROMPT, MOST_POSITIONS), is_own=is_own)


def test_a_prompt_that_is_not_known_too_long_or_leaves_no_room_is_not_compared() -> None:
    def of(count: int, context: int = 10_000) -> GreedyPrompt | None:
        model = replace(GENERATIVE, context=context)
        return greedy_prompt(infer_request("talker", GenerateRequest((1,) * count, 5)), model)

    assert greedy_prompt(InferRequest("talker", ()), GENERATIVE) is None
    strange = InferRequest("talker", (Tensor("input_ids", Datatype.INT64, (1,), bytes(8)),))
    assert greedy_prompt(strange, GENERATIVE) is None
    assert of(MOST_PROMPT) is not None and of(MOST_PROMPT + 1) is None
    assert of(10, context=10) is None
    near = of(10, context=13)
    assert near is not None and near.request.max_tokens == 3
    textual = talker(vocabulary="").generative
    assert textual is not None and greedy_prompt(infer_request("talker", GREEDY.request), textual) is None


def test_a_known_answer_is_the_beginning_of_the_response() -> None:
    long = tuple(range(MOST_POSITIONS + 5))
    assert known_answer(GREEDY, response(long, "stop"), GENERATIVE) == KnownAnswer(PROMPT, long[:MOST_POSITIONS])
    whole = long[:MOST_POSITIONS]
    assert known_answer(GREEDY, response(whole, "stop"), GENERATIVE) == KnownAnswer(PROMPT, whole)
    assert known_answer(GREEDY, response((1, 2), "stop"), GENERATIVE) == KnownAnswer(PROMPT, (1, 2), stopped=True)
    assert known_answer(GREEDY, response((1, 2)), GENERATIVE) == KnownAnswer(PROMPT, (1, 2))
    assert known_answer(GREEDY, response((), "stop"), GENERATIVE) == KnownAnswer(PROMPT, (), stopped=True)


def test_an_id_that_is_none_of_the_vocabulary_ends_it_and_is_followed_by_nobody() -> None:
    assert known_answer(GREEDY, response((1, 5000, 2)), GENERATIVE) == KnownAnswer(PROMPT, (1, 5000))
    assert known_answer(GREEDY, response((-3, 2)), GENERATIVE) == KnownAnswer(PROMPT, (-3,))


def test_a_response_without_tokens_cannot_be_compared() -> None:
    assert known_answer(GREEDY, response(()), GENERATIVE) is None
    assert known_answer(GREEDY, InferResponse("talker", "1", ()), GENERATIVE) is None
    said = response((1,)).parameters
    words = InferResponse("talker", "1", (Tensor(OUTPUT_IDS, Datatype.INT64, (1,), bytes(8)),), parameters=said)
    assert known_answer(GREEDY, words, GENERATIVE) is None
