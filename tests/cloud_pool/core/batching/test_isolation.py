"""Isolation decides the groups in which members of a failed batch are tried again."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.batching.isolation import MAX_DEATHS, final_error, retry_groups
from tidegate.outcome import InternalError, Overloaded, Poisonous, ServeError
from tidegate.workers.process import WorkerDied


def test_after_an_error_the_members_are_halved() -> None:
    assert retry_groups("abcde", worker_died=False) == ["abc", "de"]


def test_one_that_raised_by_itself_is_not_tried_again() -> None:
    assert retry_groups("a", worker_died=False) == []


def test_after_a_death_each_is_by_itself_also_one_that_was() -> None:
    assert retry_groups("abc", worker_died=True) == [["a"], ["b"], ["c"]]
    assert retry_groups("a", worker_died=True) == [["a"]]


@given(st.integers(1, 200), st.data())
def test_a_bad_one_is_alone_after_at_most_two_calls_a_level(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    pending, calls, answered = [range(size)], 0, list[int]()
    while pending:
        batch = pending.pop()
        calls += 1
        if bad in batch:
            pending += retry_groups(batch, worker_died=False)
        else:
            answered += batch
    assert sorted(answered) == [n for n in range(size) if n != bad]
    assert calls <= 1 + 2 * ceil(log2(size))


@pytest.mark.parametrize(
    ("error", "deaths", "is_poison"),
    [
        (InternalError("raised"), [0], True),
        (InternalError("raised"), [0, 0], False),
        (WorkerDied("killed"), [MAX_DEATHS], True),
        (WorkerDied("killed, and no time is left"), [1], False),
        (WorkerDied("killed"), [MAX_DEATHS, 1], False),
        (Overloaded("full"), [0], False),
    ],
)
def test_only_who_failed_by_itself_is_called_poison(error: ServeError, deaths: list[int], is_poison: bool) -> None:
    told = final_error(error, deaths)
    assert isinstance(told, Poisonous) == is_poison
    assert told.message == error.message
    assert is_poison or told is error
