"""The event coalescer: floods become counts, and the counts add up to the events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.identity.event_throttle import EventCoalescer


def test_the_first_event_is_written_at_once_and_the_rest_as_a_number() -> None:
    held = EventCoalescer(window_s=10.0)
    assert [held.seen("a", 0.0), held.seen("a", 1.0), held.seen("b", 2.0), held.seen("a", 9.0)] == [1, 0, 1, 0]
    assert held.seen("a", 10.0) == 3
    assert repr(held) == "<EventCoalescer 2 kinds, 0 held>"


def test_what_is_held_back_is_due_when_the_window_is_over() -> None:
    held = EventCoalescer(window_s=10.0)
    for at in (0.0, 1.0, 2.0):
        held.seen("a", at)
    held.seen("quiet", 0.0)
    assert list(held.due(9.0)) == []
    assert list(held.due(10.0)) == [("a", 2)]
    assert held.seen("a", 10.0) == 1


def test_kinds_past_the_bound_share_one() -> None:
    held = EventCoalescer(window_s=10.0, most=2)
    assert [held.seen(kind, 0.0) for kind in ("a", "b", "c", "others")] == [1, 1, 1, 1]
    assert held.seen("d", 1.0) == 1, "there is no room, also not for the rest: written at once"


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.0, 5.0)), max_size=60), st.integers(1, 3))
def test_lines_and_what_is_held_add_up_to_what_was_seen(steps: list[tuple[str, float]], most: int) -> None:
    held, now, written = EventCoalescer(window_s=4.0, most=most), 0.0, 0
    for kind, wait_s in steps:
        now += wait_s
        written += held.seen(kind, now)
        written += sum(count for _, count in held.due(now)) if wait_s > 3.0 else 0
    written += sum(count for _, count in held.due(float("inf")))
    assert written == len(steps)
