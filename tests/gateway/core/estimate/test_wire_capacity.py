"""The pace of a link, apart from the queue on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import LinkEstimate, WireCapacity

BODY = 150_000
PACE = 8.0 / 5e6  # of 5 Mbit/s, in seconds a byte
CALM_S = 0.030


def crossed(
    gaps_s: list[float], body_bytes: int = BODY, lost: frozenset[int] = frozenset()
) -> tuple[LinkEstimate, float]:
    """A link after bodies sent with these gaps between them, and the instant of the last ack. Args: lost: given up."""
    link, sent, free_at = LinkEstimate(), [], 0.0
    link.record(CALM_S, 0.0)
    at = 1.0
    for number, gap_s in enumerate(gaps_s):
        at += gap_s
        free_at = max(free_at, at) + body_bytes * PACE
        sent.append((number, at, free_at + CALM_S))
    events = sorted([(at, 0, number) for number, at, _ in sent] + [(acked, 1, number) for number, _, acked in sent])
    for instant, is_ack, number in events:
        if not is_ack:
            link.sent(number, instant, body_bytes)
        elif number not in lost:
            link.accepted(number, instant)
    return link, events[-1][0]


def test_a_lone_body_tells_the_pace_of_its_link() -> None:
    link, _ = crossed([0.0])
    assert link.wire.s_per_byte == pytest.approx(PACE)


@pytest.mark.parametrize("gap_s", [0.05, 0.1, 0.2])
def test_bodies_that_wait_for_one_another_tell_the_same_pace_although_each_takes_longer(gap_s: float) -> None:
    link, _ = crossed([gap_s] * 12)
    assert link.wire.s_per_byte == pytest.approx(PACE, rel=0.1)
    assert link.s_per_byte > 1.15 * PACE  # what a body took, its queue included


def test_what_is_ahead_is_what_was_sent_and_is_let_through_at_the_link_s_pace() -> None:
    link, now = crossed([0.0])
    assert link.wire.ahead_bytes(now) == 0.0
    for number in range(100, 104):
        link.sent(number, now, BODY)
    assert link.wire.ahead_bytes(now) == pytest.approx(4 * BODY)
    assert link.wire.ahead_bytes(now + 2 * BODY * PACE) == pytest.approx(2 * BODY)
    assert link.wire.ahead_bytes(now + 60.0) == 0.0
    link.accepted(101, now + 2 * BODY * PACE + CALM_S)
    assert link.wire.ahead_bytes(now + 2 * BODY * PACE + CALM_S) == pytest.approx(2 * BODY)


def test_bodies_that_were_given_up_have_been_on_their_way_all_the_same() -> None:
    link, _ = crossed([0.05] * 12, lost=frozenset({3, 4, 7}))
    assert link.wire.s_per_byte == pytest.approx(PACE, rel=0.1)


def test_small_bodies_tell_no_pace() -> None:
    link, now = crossed([0.5] * 10, body_bytes=2_000)
    assert link.wire.s_per_byte == 0.0
    assert link.wire.ahead_bytes(now) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=60), st.integers(0, 10**6))
def test_nothing_is_ever_ahead_that_was_not_sent_and_a_pace_is_never_negative(
    steps: list[tuple[float, bool]], size: int
) -> None:
    wire, now, ends = WireCapacity(), 0.0, list[tuple[int, float]]()
    total = 0
    for gap_s, is_ack in steps:
        now += gap_s
        if is_ack and ends:
            end, sent_at = ends.pop(0)
            wire.acknowledge(end, size, sent_at, CALM_S, now)
        else:
            ends.append((wire.send(size, now), now))
            total += size
        assert wire.s_per_byte >= 0.0
        assert 0.0 <= wire.ahead_bytes(now) <= total


def test_bodies_that_are_given_up_before_any_is_through_tell_how_slow_the_link_is_at_least() -> None:
    link = LinkEstimate()
    link.record(CALM_S, 0.0)
    for number in range(5):
        link.sent(number, 1.0 + number, BODY)
        link.ended(number, 1.3 + number, heard=False)
    assert link.wire.s_per_byte == pytest.approx((0.3 - CALM_S) / BODY, rel=0.05)
    link.sent(9, 60.0, BODY)
    assert link.wire.through_at() == pytest.approx(60.0 + 0.3 - CALM_S, rel=0.05)
    link.accepted(9, 60.0 + CALM_S + 0.1 * BODY * PACE)  # it is wide again, and that is believed a part at a time
    assert link.wire.s_per_byte < (0.3 - CALM_S) / BODY
