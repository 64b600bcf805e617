"""Each position of a known answer is judged behind the known tokens, whatever a model says in between."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.generate.request import GenerateRequest
from tidegate.generate.teacher_forcing import KnownAnswer, TeacherForcing, TokenAgreement, total
from tidegate.token_sink import TopLogprob

PROMPT = (100, 101)
STOP = -1


def answered(known: KnownAnswer, argmax: Sequence[int]) -> tuple[TokenAgreement, int]:
    """By a model whose likeliest token at each position, behind the known ones, is `argmax`; and how many runs.

    Behind a token of its own it says nonsense, for as long as it is let.
    """
    forcing, runs = TeacherForcing(known), 0
    while (request := forcing.next_request()) is not None:
        runs += 1
        at = len(request.prompt) - len(PROMPT)
        assert request == GenerateRequest(PROMPT + known.ids[:at], known.positions - at)
        said: list[int] = []
        stopped = False
        while len(said) < request.max_tokens and not stopped:
            place = at + len(said)
            follows = tuple(said) == known.ids[at:place]
            token = argmax[place] if follows else 999
            stopped = token == STOP
            said += [] if stopped else [token]
        forcing.take(said, stopped=stopped)
    return forcing.agreement, runs


def test_a_difference_costs_one_position_and_one_run_more() -> None:
    known = KnownAnswer(PROMPT, (1, 2, 3, 4, 5, 6, 7))
    found, runs = answered(known, (1, 2, 0, 4, 5, 0, 7))
    assert (found.agreed, found.positions, found.leading, found.equal, runs) == (5, 7, 2, 0, 3)
    assert answered(known, known.ids) == (TokenAgreement(7, 7, 1, 7, 1), 1)


@pytest.mark.parametrize(
    ("stopped", "argmax", "agreed"),
    [
        (True, (1, 2, STOP), 3),
        (True, (1, 2, 3), 2),  # it goes on where the known answer ends
        (True, (STOP, 2, STOP), 2),  # it ends too early
        (False, (1, STOP), 1),
        (False, (STOP, STOP), 0),
    ],
)
def test_a_stop_token_is_a_position(stopped: bool, argmax: tuple[int, ...], agreed: int) -> None:
    known = KnownAnswer(PROMPT, (1, 2), stopped)
    assert answered(known, argmax)[0].agreed == agreed


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=20), st.booleans())
def test_the_count_is_that_of_equal_positions(pairs: list[tuple[int, int]], stopped: bool) -> None:
    known = KnownAnswer(PROMPT, tuple(token for token, _ in pairs), stopped)
    argmax = [said for _, said in pairs] + [STOP] * stopped
    found, runs = answered(known, argmax)
    equal = [token == said for token, said in pairs] + [True] * stopped
    assert (found.agreed, found.positions) == (sum(equal), len(equal))
    assert found.leading == (equal.index(False) if False in equal else len(equal))
    assert runs <= 1 + equal.count(False)


def test_an_engine_that_says_nothing_comes_to_an_end() -> None:
    forcing = TeacherForcing(KnownAnswer(PROMPT, (1, 2, 3)))
    for _ in range(3):
        assert forcing.next_request() is not None
        forcing.take((), stopped=False)
    assert forcing.next_request() is None and forcing.agreement.agreed == 0


def test_perplexity_is_that_of_the_known_tokens() -> None:
    forcing = TeacherForcing(KnownAnswer(PROMPT, (1, 2)), logprobs=2)
    request = forcing.next_request()
    assert request is not None and request.logprobs == 2
    likeliest = [
        (TopLogprob(1, log(0.5)), TopLogprob(3, log(0.25))),
        (TopLogprob(9, log(0.5)), TopLogprob(8, log(0.125))),  # the known one is not among them
    ]
    forcing.take((1, 9), stopped=False, likeliest=likeliest)
    assert forcing.agreement.perplexity == pytest.approx((0.5 * 0.125) ** -0.5)
    assert TokenAgreement().perplexity is None


def test_answers_are_added_up() -> None:
    one, other = TokenAgreement(4, 3, 1, 2, 0), TokenAgreement(6, 6, 1, 6, 1)
    both = total([one, other])
    assert both == TokenAgreement(10, 9, 2, 8, 1) and both.share == 0.9
    assert str(both) == "9 of 10 tokens (0.9000), 1 of 2 answers without a difference"
    assert total([]).share == 1.0
