"""How fast a target generates: by its warm-up, its batch, and what answers have shown; and the wait for a slot."""

from __future__ import annotations

from math import exp, isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.batch_effect import FLOOR_SIGMA, BatchEffect
from gateway.core.estimate.token_pace import TokenPace

POINTS = [(3.4, 0.023), (18.4, 0.158), (39.4, 0.371)]  # prefill 2.9 ms, steps of 9 ms, a weight of 0.3
batches = st.integers(1, 64)
seconds = st.floats(0.0, 100.0)


def learned(exponent: float, *, count: int = 300, base_s: float = 0.01, noise: float = 0.1) -> BatchEffect:
    effect, draw = BatchEffect(), Random(2)
    for _ in range(count):
        batch = draw.choice([1, 2, 4, 8])
        effect.record(base_s, base_s * batch**exponent * exp(noise * draw.gauss(0.0, 1.0)), batch)
    return effect


@pytest.mark.parametrize("exponent", [0.0, 0.2, 0.7, 1.0])
def test_how_a_step_grows_with_its_batch_is_learned(exponent: float) -> None:
    effect = learned(exponent)
    for batch in (1, 4, 8):
        assert effect.times(batch) == pytest.approx(batch**exponent, rel=0.25)
    assert effect.sigma == pytest.approx(0.1, abs=0.05)


def test_before_any_answer_it_lies_between_a_pool_and_a_single_core() -> None:
    effect = BatchEffect()
    assert effect.times(1) == 1.0
    assert 1.0 < effect.times(4) < 4.0
    assert effect.sigma > 0.3


def test_a_target_that_slows_down_is_believed_within_a_few_answers() -> None:
    effect = learned(0.2, noise=0.05)
    for _ in range(40):
        effect.record(0.01, 0.03, 1)
    assert effect.times(1) == pytest.approx(3.0, rel=0.25)


def test_one_odd_answer_hardly_counts() -> None:
    effect = learned(0.2, noise=0.05)
    before = effect.times(4)
    effect.record(0.01, 10.0, 4)
    assert effect.times(4) == pytest.approx(before, rel=0.1)


def test_what_was_learned_fades() -> None:
    effect = learned(0.9)
    effect.fade(1.0)
    assert effect.times(4) == pytest.approx(BatchEffect().times(4))


@given(st.lists(st.tuples(seconds, seconds, batches), max_size=40), batches)
def test_times_stay_finite_and_above_nothing(seen: list[tuple[float, float, int]], batch: int) -> None:
    effect = BatchEffect()
    for base_s, observed_s, at in seen:
        effect.record(base_s, observed_s, at)
    assert 0.0 < effect.times(batch) < 1e4
    assert effect.sigma >= FLOOR_SIGMA
    assert effect.times(batch) <= effect.times(batch + 1)


def test_prompts_and_steps_are_those_of_the_warm_up_at_first() -> None:
    pace = TokenPace(POINTS)
    assert pace.step_s(1) == pytest.approx(0.009)
    assert pace.first_s(39.4, 1) == pytest.approx(0.371)


def test_answers_correct_both_apart() -> None:
    pace = TokenPace(POINTS)
    for _ in range(60):
        pace.record(39.4, 0.742, 0.009, 1)  # prompts take twice as long, steps do not
    assert pace.first_s(39.4, 1) == pytest.approx(0.742, rel=0.1)
    assert pace.step_s(1) == pytest.approx(0.009, rel=0.1)


def test_an_answer_of_one_token_says_nothing_of_steps() -> None:
    pace = TokenPace(POINTS)
    for _ in range(60):
        pace.record(39.4, 0.371, None, 1)
    assert pace.step_s(1) == pytest.approx(0.009)


def test_nobody_waits_while_a_slot_is_free() -> None:
    pace = TokenPace(POINTS)
    for there in range(4):
        assert pace.wait(there, 4, 2.0) == (0.0, 0.0)
    assert pace.wait(100, 0, 2.0) == (0.0, 0.0)  # of slots nothing is known


def test_beyond_the_slots_the_wait_is_for_as_many_ends() -> None:
    pace = TokenPace(POINTS)
    assert pace.wait(4, 4, 2.0) == (pytest.approx(0.5), pytest.approx(0.25))
    assert pace.wait(11, 4, 2.0)[0] == pytest.approx(4.0)
    for _ in range(4):
        pace.launched(8.0)
    assert pace.wait(4, 4, 2.0)[0] == pytest.approx(2.0)  # those that are there hold their slots for longer
    for _ in range(4):
        pace.ended(8.0)
    assert pace.under_way == 0
    assert pace.wait(4, 4, 2.0)[0] == pytest.approx(0.5)


def test_what_was_learned_is_worth_little_after_a_while_without_answers() -> None:
    pace = TokenPace(POINTS)
    for _ in range(60):
        pace.record(39.4, 0.371, 0.045, 1)
    pace.relax(100.0)
    slow_s = pace.step_s(1)
    pace.relax(400.0)
    assert 0.009 <= pace.step_s(1) < 0.5 * slow_s


@given(st.lists(st.tuples(st.floats(0.0, 1e4), seconds, seconds, batches), max_size=30))
def test_predictions_stay_finite(seen: list[tuple[float, float, float, int]]) -> None:
    pace = TokenPace(POINTS)
    for units, first_s, step_s, batch in seen:
        pace.record(units, first_s, step_s, batch)
    assert isfinite(pace.first_s(100.0, 8))
    assert pace.first_s(100.0, 8) > 0.0
    assert 0.0 < pace.step_s(8) < 1e3
