"""What silence is evidence of: acks that are missing, answers that are overdue, and callers who left."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import BROKEN, SLACK_S, LinkEstimate
from tests.support.gateway.fleets import NOW, link_of

EVENTS = ("sent", "accepted", "answered", "lost", "heard")


def acknowledging(rtt_s: float = 0.010) -> LinkEstimate:
    link = LinkEstimate()
    for attempt in range(8):
        link.sent(attempt, NOW - 1.0)
        link.accepted(attempt, NOW - 1.0 + rtt_s)
        link.ended(attempt, NOW - 0.9, heard=True)
    return link


def test_an_ack_is_a_round_trip() -> None:
    link = acknowledging(0.017)
    assert link.rtt_s == pytest.approx(0.017)
    assert link.samples == 8
    link.accepted(99, NOW)
    assert link.samples == 8, "an ack of something unknown or known twice teaches nothing"


@pytest.mark.parametrize(
    ("silent_s", "slower"),
    [
        (0.020, None),  # of slack
        (0.029, None),  # no longer than a round trip
        (0.0319, None),  # one round trip in ten is as long
        (0.033, 1 / 16),
        (0.059, 1 / 16),
        (0.0599, 1 / 16),  # the longest that could be thought of, and from here on less and less
        (0.100, 1 / 16 / 2**4),
        (9.020, 1 / 16 / 225**4),
    ],
)
def test_silence_is_weighed_against_the_paths_own_round_trips(silent_s: float, slower: float | None) -> None:
    link = acknowledging()
    link.sent(100, NOW)
    expected = 1.0 if slower is None else slower / (slower + BROKEN)
    assert link.trust(NOW + silent_s) == pytest.approx(expected)
    assert link.answers_after(silent_s, NOW) == pytest.approx(expected)


def test_what_is_silence_on_a_wifi_is_nothing_on_a_wan() -> None:
    wifi, wan = acknowledging(0.003), acknowledging(0.100)
    for link in (wifi, wan):
        link.sent(100, NOW)
    assert wifi.trust(NOW + 0.060) < 0.1
    assert wan.trust(NOW + 0.060) == 1.0


def test_a_round_trip_of_nothing_is_not_the_end_of_trust() -> None:
    link = acknowledging(0.0)
    assert link.path(NOW).slower_than(0.0) > 0.0
    link.sent(100, NOW)
    assert 0.0 < link.trust(NOW + 1.0) < 1e-6


def test_attempts_sent_into_one_silence_are_one_observation() -> None:
    alone, crowded = acknowledging(), acknowledging()
    alone.sent(100, NOW)
    for attempt in range(9):
        crowded.sent(attempt, NOW + 0.005 * attempt)
    assert alone.trust(NOW + 0.060) == crowded.trust(NOW + 0.060) < 1.0


def test_anything_that_arrives_restores_the_trust() -> None:
    link = acknowledging()
    link.sent(100, NOW)
    link.sent(101, NOW)
    assert link.trust(NOW + 0.1) < 0.2
    link.record(0.010, NOW + 0.1)  # a ping
    assert link.trust(NOW + 0.1) == 1.0
    assert link.trust(NOW + 0.2) < 0.2, "but the acks are still missing"
    link.accepted(100, NOW + 0.2)
    link.ended(101, NOW + 0.2, heard=True)
    assert link.trust(NOW + 9.0) == 1.0


@pytest.mark.slow
@given(st.lists(st.floats(0.0, 1.0), max_size=40), st.lists(st.floats(0.0, 5.0), min_size=2, max_size=8))
def test_trust_never_rises_while_it_is_silent(rtts_s: list[float], silences_s: list[float]) -> None:
    link = link_of(*rtts_s)
    silences_s.sort()
    trusts = [link.answers_after(silence_s, NOW) for silence_s in silences_s]  # by the round trips that count now
    assert trusts == sorted(trusts, reverse=True)
    assert all(0.0 < trust <= 1.0 for trust in trusts)


@given(st.lists(st.floats(0.0, 1.0), max_size=40), st.floats(0.01, 1.0), st.floats(0.0, 2.0))
def test_quantiles_and_tails_of_a_path_agree(rtts_s: list[float], share: float, seconds_s: float) -> None:
    path = link_of(*rtts_s).path(NOW)
    value_s = path.quantile_s(share)
    assert value_s in path.values_s
    assert path.below[bisect_right(path.values_s, value_s)] >= share - 1e-6, "so many do not exceed it"
    assert path.below[bisect_left(path.values_s, value_s)] < share + 1e-6, "and not so many are below"
    assert path.quantile_s(0.5) == path.median_s
    assert 0.0 < path.slower_than(seconds_s) <= 1.0
    assert path.slower_than(seconds_s + 0.01) <= path.slower_than(seconds_s)


def test_an_overdue_answer_is_never_evidence() -> None:
    link = acknowledging()
    link.sent(100, NOW)
    link.accepted(100, NOW + 0.010)
    assert link.trust(NOW + 60.0) == 1.0
    link.ended(100, NOW + 60.0, heard=False)
    assert link.trust(NOW + 60.0) == 1.0


def test_giving_an_unacknowledged_attempt_up_does_not_take_the_silence_away() -> None:
    link = acknowledging()
    link.sent(100, NOW)
    link.ended(100, NOW + 0.060, heard=False)
    assert link.trust(NOW + 0.060) < 1.0
    assert link.trust(NOW + 0.120) < link.trust(NOW + 0.060), "nothing has come since"
    link.heard(NOW + 0.2)
    assert link.trust(NOW + 9.0) == 1.0


def test_what_ended_before_silence_was_unusual_leaves_none() -> None:
    link = acknowledging()
    link.sent(100, NOW)
    link.sent(101, NOW + 0.010)
    link.ended(100, NOW + 0.015, heard=False)
    assert link.trust(NOW + 0.060) < 1.0, "the other's ack is still due"
    link = acknowledging()
    link.sent(100, NOW)
    link.ended(100, NOW + 0.015, heard=False)
    assert link.trust(NOW + 9.0) == 1.0, "no ack is due any more"


@pytest.mark.parametrize("leaves_after_s", [0.001, 0.010, 0.025])
def test_callers_who_leave_before_their_acks_are_due_never_silence_a_path_however_many_overlap(
    leaves_after_s: float,
) -> None:
    link = acknowledging()
    for attempt in range(400):
        now = NOW + attempt / 1000
        link.sent(attempt, now)
        if (left := attempt - round(1000 * leaves_after_s)) >= 0:
            link.ended(left, now, heard=False)
        assert link.trust(now) == 1.0
        assert not link.is_mute(now)


def test_who_stays_is_silent_since_he_was_sent_and_not_since_those_who_left() -> None:
    link = acknowledging()
    for attempt in range(5):
        link.sent(attempt, NOW + attempt / 1000)
    for attempt in range(4):
        link.ended(attempt, NOW + 0.012, heard=False)
    assert link.silent_since == NOW + 0.004
    assert link.trust(NOW + 0.2) < 0.5, "nothing came since, and his ack is due"
    assert not link.is_mute(NOW + 9.0), "but he is one, and three are needed"


def test_leavers_do_not_hide_a_path_that_is_silent() -> None:
    link = acknowledging()
    patience_s = link.patience_s(NOW)
    for attempt in range(3):
        link.sent(attempt, NOW)
    for attempt in range(3, 200):
        now = NOW + attempt / 1000
        link.sent(attempt, now)
        link.ended(attempt, now + 0.0005, heard=False)
    assert not link.is_mute(NOW + 3.1 * patience_s)
    assert link.is_mute(NOW + 3.1 * patience_s + 1.01 * SLACK_S)


def test_a_path_is_mute_when_three_acks_are_missing_for_three_times_the_patience() -> None:
    link = acknowledging()
    patience_s = link.patience_s(NOW)
    assert patience_s == pytest.approx(4 * 0.010 + 0.020)
    for attempt in range(3):
        assert not link.is_mute(NOW + 9.0), "two may be bad luck"
        link.sent(attempt, NOW)
    assert not link.is_mute(NOW + 2.9 * patience_s)
    assert not link.is_mute(NOW + 3.1 * patience_s), "it may be that nobody has read what came"
    assert link.is_mute(NOW + 3.1 * patience_s + 1.01 * SLACK_S)
    for attempt in range(3):
        link.ended(attempt, NOW + 3.1 * patience_s, heard=False)
    assert link.is_mute(NOW + 3.1 * patience_s + 1.01 * SLACK_S), "giving them up changes nothing"
    link.heard(NOW + 3.1 * patience_s + 1.01 * SLACK_S)
    assert not link.is_mute(NOW + 9.0)


def test_what_is_sent_into_a_silence_that_no_round_trip_explains_is_lost_by_two_looks() -> None:
    link = acknowledging()
    link.sent(1, NOW)
    assert not link.is_lost(NOW + 0.030), "one round trip in ten may take so long"
    assert not link.is_lost(NOW + 0.5), "it may be that nobody has read what came"
    assert link.is_lost(NOW + 0.5 + 1.01 * SLACK_S)
    link.heard(NOW + 0.53)
    assert not link.is_lost(NOW + 0.54)
    assert not link.is_lost(NOW + 1.5), "what came in between ends the first look's say as well"


def test_acks_that_waited_unread_while_this_process_stood_still_are_no_silence() -> None:
    link = acknowledging()
    for attempt in range(3):
        link.sent(attempt, NOW)
    woken_at = NOW + 1.0
    assert not link.is_mute(woken_at), "the first look, before anything was read"
    link.accepted(0, woken_at + 0.001)
    assert not link.is_mute(woken_at + 1.01 * SLACK_S)
    later = woken_at + 2.0
    assert not link.is_mute(later), "two have no ack yet"
    link.sent(3, later)
    assert not link.is_mute(later + 0.001), "what was found before something was heard is forgotten"
    assert link.is_mute(later + 0.001 + 1.01 * SLACK_S)


def test_a_path_that_never_acknowledges_is_always_trusted() -> None:
    link = link_of(*[0.010] * 8)
    for attempt in range(4):
        link.sent(attempt, NOW)
    assert link.trust(NOW + 60.0) == 1.0
    assert not link.is_mute(NOW + 60.0)
    for attempt in range(4):
        link.ended(attempt, NOW + 60.0, heard=False)
    assert link.trust(NOW + 60.0) == 1.0


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=80))
def test_trust_stays_in_its_bounds_and_nothing_is_kept_of_ended_attempts(events: list[tuple[str, int]]) -> None:
    link, now = acknowledging(), NOW
    for what, attempt in events:
        now += 0.037
        match what:
            case "sent":
                link.sent(attempt, now)
            case "accepted":
                link.accepted(attempt, now)
            case "heard":
                link.heard(now)
                assert link.trust(now) == 1.0
            case _:
                link.ended(attempt, now, heard=what == "answered")
        assert 0.0 < link.trust(now) <= 1.0
        assert link.awaiting_ack <= 6
    for attempt in range(6):
        link.ended(attempt, now, heard=True)
    assert link.trust(now + 60.0) == 1.0
    assert link.awaiting_ack == 0
