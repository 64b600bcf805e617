"""Answer times: what answers of a size have taken, and what that says of sizes that were never asked."""

from __future__ import annotations

import pytest

from gateway.core.estimate.answer_times import FEWEST, MEMORY_S, MOST, AnswerTimes, UsualTime

NOW = 1000.0


def times_of(*took_s: float, units: float = 16.0, at: float = NOW) -> AnswerTimes:
    times = AnswerTimes()
    for one in took_s:
        times.record(units, one, at)
    return times


def test_nothing_is_said_before_a_few_answers_are_known() -> None:
    assert AnswerTimes().p99_s(16.0) is None
    assert times_of(*[0.1] * (FEWEST - 1)).p99_s(16.0) is None
    assert times_of(*[0.1] * FEWEST).p99_s(16.0) == 0.1


def test_of_few_answers_the_longest_counts_and_of_a_hundred_the_second_longest() -> None:
    assert times_of(0.1, 0.1, 0.1, 0.1, 0.9).p99_s(16.0) == 0.9
    assert times_of(*[0.1] * (MOST - 2), 0.5, 0.9).p99_s(16.0) == 0.5


def test_only_the_latest_answers_of_the_last_minute_count_and_a_few_however_old() -> None:
    times = times_of(*[0.9] * MOST)
    for _ in range(MOST):
        times.record(16.0, 0.1, NOW)
    assert times.p99_s(16.0) == 0.1
    times = times_of(*[0.9] * FEWEST)
    for place in range(1, FEWEST + 1):
        assert times.p99_s(16.0) == 0.9
        times.record(16.0, 0.1, NOW + 2.0 * MEMORY_S + place)
    assert times.p99_s(16.0) == 0.1


def test_a_size_without_answers_is_bounded_by_a_larger_one_or_by_a_smaller_one_in_proportion() -> None:
    times = times_of(*[0.2] * FEWEST, units=64.0)
    assert times.p99_s(8.0) == 0.2
    assert times.p99_s(256.0) == 0.8
    assert repr(times) == "<AnswerTimes of 5 answers in 1 sizes>"


def test_silence_within_the_usual_time_says_nothing_and_beyond_it_the_more_the_longer_it_lasts() -> None:
    usual = times_of(*[0.1] * MOST).usual(16.0)
    assert usual == UsualTime(0.1, MOST)
    assert usual.comes_after(0.0) == usual.comes_after(0.1) == 1.0
    chances = [usual.comes_after(silence_s) for silence_s in (0.13, 0.2, 0.3, 0.6, 10.0)]
    assert chances == sorted(chances, reverse=True)
    assert 0.2 < chances[0] < 0.5, "one in a hundred takes longer, and two in a hundred never come"
    assert chances[2] < 0.1


def test_of_few_answers_the_longest_is_often_exceeded() -> None:
    few, many = times_of(*[0.1] * FEWEST).usual(16.0), times_of(*[0.1] * MOST).usual(16.0)
    assert few is not None
    assert many is not None
    assert few.exceeded == 1 / 6
    assert many.exceeded == pytest.approx(0.01)
    assert few.comes_after(0.13) > 0.8 > many.comes_after(0.13)
