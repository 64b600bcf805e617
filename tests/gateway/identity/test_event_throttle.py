"""The event coalescer: floods become counts, and the counts add up to the events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.identity.audit import Audit
from gateway.identity.event_throttle import MOST_KINDS, EventCoalescer
from tidegate import clock
from tidegate.oip.guard import PresentedCredentials


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


def test_kinds_past_the_bound_share_one_place_beyond_it() -> None:
    held = EventCoalescer(window_s=10.0, most=2)
    assert [held.seen(kind, 0.0) for kind in ("a", "b", "c", "d", "e", "a")] == [1, 1, 1, 0, 0, 0]
    assert repr(held) == "<EventCoalescer 3 kinds, 3 held>"
    assert list(held.due(10.0)) == [("a", 1), ("others", 2)]


def test_the_others_take_no_kind_its_place() -> None:
    held = EventCoalescer(window_s=10.0, most=1)
    assert [held.seen("a", 0.0), held.seen("b", 5.0), *held.due(10.0)] == [1, 1]
    assert [held.seen("c", 10.0), held.seen("c", 11.0)] == [1, 0], "while the others' window lasts until 15 s"
    assert list(held.due(20.0)) == [("c", 1)]


def test_a_line_of_a_kind_past_the_bound_counts_no_events_of_other_kinds() -> None:
    held = EventCoalescer(window_s=10.0, most=1)
    assert [held.seen(kind, 0.0) for kind in ("a", "b", "c")] == [1, 1, 0]
    held.seen("a", 10.0)
    assert held.seen("d", 10.0) == 0, "the caller would write what is held of b and c as events of d"
    assert list(held.due(10.0)) == [("others", 2)]


def test_after_a_flood_of_new_kinds_a_real_one_is_counted_under_its_own_name() -> None:
    held = EventCoalescer(window_s=10.0, most=2)
    assert sum(held.seen(f"key:{number}", number / 1000) > 0 for number in range(9000)) == 3
    assert list(held.due(11.0)) == [("others", 8997)]
    assert [held.seen("real", at) for at in (11.0, 12.0, 13.0)] == [1, 0, 0]
    assert list(held.due(21.0)) == [("real", 2)]


def test_a_scanner_that_invents_a_key_for_each_request_does_not_fill_the_audit_log() -> None:
    lines: list[dict[str, Any]] = []
    audit, at = Audit(lambda _, **line: lines.append(line)), {"s": 100.0}
    presented = PresentedCredentials("", "tg_invented", lambda: None, "http", "10.0.0.1")
    with clock.reading(lambda: at["s"]):
        for number in range(2 * MOST_KINDS):
            audit.refused("wrong", f"key:{number}", presented)
            at["s"] += 1e-3
        assert len(lines) == MOST_KINDS + 1
        audit.close()
    assert sum(line["count"] for line in lines) == 2 * MOST_KINDS
    assert (lines[-1]["reason"], lines[-1]["count"]) == ("others", MOST_KINDS - 1)


STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([0.0, 0.5, 2.0, 4.0]), st.booleans()), max_size=60
)


@pytest.mark.slow
@given(STEPS, st.integers(1, 3))
def test_no_sequence_of_kinds_gives_more_lines_a_window_than_the_bound_allows(
    steps: list[tuple[str, float, bool]], most: int
) -> None:
    window_s = 4.0
    held, now, lines = EventCoalescer(window_s, most), 0.0, list[tuple[float, Hashable, int]]()
    for kind, wait_s, sweep in steps:
        now += wait_s
        lines += [(now, kind, count) for count in [held.seen(kind, now)] if count]
        lines += [(now, over, count) for over, count in held.due(now)] if sweep else []
    lines += [(now + window_s, over, count) for over, count in held.due(now + window_s)]

    # Each place, and that of the others, may say one line when its window begins and one when it is over.
    for begin, _, _ in lines:
        assert sum(begin <= at < begin + window_s for at, _, _ in lines) <= 2 * (most + 1)
    events, written = Counter(kind for kind, _, _ in steps), Counter[Hashable]()
    for _, kind, count in lines:
        written[kind] += count
    assert written.total() == len(steps)
    assert all(written[kind] <= events[kind] for kind in events), "no line counts events of another kind"


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
