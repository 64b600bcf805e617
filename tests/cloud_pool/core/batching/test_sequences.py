"""Sequences decide which steps may begin or go on, and which state is forgotten when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.batching.sequences import MAX_PENDING, Sequences
from tidegate.oip.sequence import SequenceStep, sequence_of
from tidegate.outcome import InvalidRequest, Overloaded

TTL_S = 10.0
STATE = {"h": np.zeros(1)}


def sequences(most: int = 2) -> Sequences:
    return Sequences("rnn", ttl_s=TTL_S, max_sequences=most)


def step(subject: Sequences, id: int | str, now: float, *, start: bool = False, end: bool = False) -> None:
    subject.over(subject.begin(id, start=start, now=now), now, state=STATE, end=end)


def test_a_sequence_lives_from_its_start_to_its_end() -> None:
    subject = sequences()
    step(subject, 7, 0.0, start=True)
    step(subject, 7, 1.0)
    assert (len(subject), repr(subject)) == (1, "<Sequences of rnn: 1 of 2 live>")
    step(subject, 7, 2.0, end=True)
    assert len(subject) == 0
    with pytest.raises(InvalidRequest, match=r"sequence 7 of 'rnn' is not known here: .* begin with sequence_start"):
        subject.begin(7, start=False, now=3.0)


def test_one_request_may_be_a_whole_sequence() -> None:
    subject = sequences()
    step(subject, "a", 0.0, start=True, end=True)
    assert len(subject) == 0


def test_a_live_one_is_not_started_again() -> None:
    subject = sequences()
    step(subject, 7, 0.0, start=True)
    with pytest.raises(InvalidRequest, match="live already; end it first"):
        subject.begin(7, start=True, now=1.0)
    step(subject, 7, 1.0)


def test_over_the_cap_it_says_when_one_should_be_free() -> None:
    subject = sequences()
    step(subject, 1, 0.0, start=True)
    step(subject, 2, 4.0, start=True)
    with pytest.raises(Overloaded, match="2 sequences of 'rnn' are live") as refused:
        subject.begin(3, start=True, now=6.0)
    assert refused.value.retry_after_s == 4.0
    step(subject, 3, 10.0, start=True)  # by now the first was idle for too long
    busy = sequences(1)
    busy.begin(1, start=True, now=0.0)
    with pytest.raises(Overloaded) as refused:
        busy.begin(2, start=True, now=0.0)
    assert refused.value.retry_after_s == TTL_S


def test_the_idle_are_swept_and_the_busy_are_not() -> None:
    subject = sequences()
    step(subject, 1, 0.0, start=True)
    running = subject.begin(2, start=True, now=0.0)
    assert subject.next_sweep_at == TTL_S
    assert subject.sweep(9.9) == 0
    assert subject.sweep(10.0) == 1
    assert (subject.next_sweep_at, len(subject)) == (None, 1)
    subject.over(running, 50.0, state=STATE, end=False)
    assert subject.next_sweep_at == 60.0


def test_a_step_that_came_to_nothing_leaves_the_sequence_as_it_was() -> None:
    subject = sequences()
    step(subject, 1, 0.0, start=True)
    sequence = subject.begin(1, start=False, now=1.0)
    subject.over(sequence, 2.0, state=None, end=True)
    assert sequence.state is STATE
    step(subject, 1, 3.0, end=True)
    assert len(subject) == 0


def test_a_start_that_came_to_nothing_is_forgotten_at_once() -> None:
    subject = sequences()
    first = subject.begin(1, start=True, now=0.0)
    second = subject.begin(1, start=False, now=0.0)
    subject.over(first, 1.0, state=None, end=False)
    assert subject.still(second)
    subject.over(second, 1.0, state=None, end=False)
    assert not subject.still(second)
    assert len(subject) == 0


def test_too_many_steps_of_one_are_refused() -> None:
    subject = sequences()
    for index in range(MAX_PENDING):
        subject.begin(1, start=index == 0, now=0.0)
    with pytest.raises(Overloaded, match="64 steps of sequence 1 wait"):
        subject.begin(1, start=False, now=0.0)


def test_the_end_of_one_does_not_end_its_namesake() -> None:
    subject = sequences()
    step(subject, 1, 0.0, start=True)
    late = subject.begin(1, start=False, now=0.0)
    last = subject.begin(1, start=False, now=0.0)
    subject.over(last, 1.0, state=STATE, end=True)
    step(subject, 1, 2.0, start=True)
    subject.over(late, 3.0, state=STATE, end=True)
    assert len(subject) == 1


events = st.lists(
    st.tuples(st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(), st.floats(0.0, 8.0)), max_size=60
)


@pytest.mark.slow
@given(events)
def test_never_more_than_the_cap_and_nothing_stays_for_ever(steps: list[tuple[int, bool, bool, bool, float]]) -> None:
    subject, now = sequences(), 0.0
    for id, start, end, fails, later in steps:
        now += later
        try:
            sequence = subject.begin(id, start=start, now=now)
        except (InvalidRequest, Overloaded):
            continue
        assert len(subject) <= 2
        subject.over(sequence, now, state=None if fails else STATE, end=end)
    subject.sweep(now + TTL_S)
    assert len(subject) == 0
    assert subject.next_sweep_at is None


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, None),
        ({"sequence_id": 0, "sequence_start": True}, None),
        ({"sequence_id": ""}, None),
        ({"sequence_id": 5, "sequence_start": True, "sequence_end": False}, SequenceStep(5, True, False)),
        ({"sequence_id": "abc", "sequence_end": True}, SequenceStep("abc", False, True)),
    ],
)
def test_which_sequence_a_request_belongs_to(parameters: Any, expected: SequenceStep | None) -> None:
    assert sequence_of(parameters) == expected


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"sequence_id": -1}, "sequence_id"),
        ({"sequence_id": 1 << 64}, "sequence_id"),
        ({"sequence_id": True}, "sequence_id"),
        ({"sequence_id": 1.5}, "sequence_id"),
        ({"sequence_id": "x" * 129}, "129 characters"),
        ({"sequence_id": 1, "sequence_start": 1}, "sequence_start"),
        ({"sequence_id": 1, "sequence_end": "yes"}, "sequence_end"),
    ],
)
def test_what_is_no_sequence_is_refused_by_name(parameters: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        sequence_of(parameters)
