"""Which worker is replaced, when, and above all when not."""

from __future__ import annotations

from math import inf

import pytest

from tidegate.workers.recycling import Recycling, RecyclingCandidate

WELL = RecyclingCandidate("0.1", None, 10, inf)
ILL = RecyclingCandidate("1.1", "memory: too much", 5, inf)
OLD = RecyclingCandidate("2.1", None, 110, 100.0)


def recycling(**more: float) -> Recycling:
    return Recycling(lambda: 0.5, gap_s=300.0, **more)  # type: ignore[arg-type]


def decide(
    subject: Recycling, *candidates: RecyclingCandidate, now: float = 0.0, there: bool = True, over: bool = False
) -> str:
    chosen = subject.decide(candidates, now, all_there=there, overloaded=over)
    return "" if chosen is None else chosen.worker


def test_nobody_is_replaced_without_a_reason() -> None:
    assert decide(recycling(), WELL) == decide(recycling()) == ""


def test_a_complaint_goes_before_prevention() -> None:
    assert decide(recycling(), WELL, OLD, ILL) == "1.1"
    assert (ILL.reason, OLD.reason, WELL.reason) == ("memory: too much", "served: 110 requests", None)


def test_among_equals_the_longest_served_goes_first() -> None:
    assert decide(recycling(), ILL, RecyclingCandidate("3.1", "drift: slow", 50, inf)) == "3.1"


@pytest.mark.parametrize(("there", "over"), [(False, False), (True, True), (False, True)])
def test_never_while_another_is_missing_nor_in_overload(there: bool, over: bool) -> None:
    assert decide(recycling(), ILL, there=there, over=over) == ""


def test_one_at_a_time_and_then_a_gap() -> None:
    subject = recycling()
    assert decide(subject, ILL, now=0.0) == "1.1"
    assert repr(subject) == "<Recycling 1.1>"
    assert decide(subject, OLD, now=5000.0) == "", "the first is under way"
    subject.ended(5000.0)
    assert decide(subject, OLD, now=5329.0) == "", "300 s and half of a fifth"
    assert decide(subject, OLD, now=5330.0) == "2.1"


def test_lives_that_began_together_end_apart() -> None:
    draws = iter([0.0, 0.5, 1.0])
    subject = Recycling(lambda: next(draws), after_requests=1000)
    assert [subject.served_most() for _ in range(3)] == pytest.approx([900.0, 1000.0, 1100.0])


def test_without_a_count_nobody_is_replaced_by_it() -> None:
    assert recycling().served_most() == inf
