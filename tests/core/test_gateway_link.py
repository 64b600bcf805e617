"""The link's estimate: round trips as a sample, the weather, bandwidth, and what silence is evidence of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.evidence import Attempt
from gateway.core.link import BROKEN, LARGE_BYTES, SLACK_S, LinkEstimate
from gateway.core.placement import estimate
from gateway.core.regime import Regime
from gateway.core.windowed_min import WindowedMin
from tests.support.fleets import NOW, fleet_of, variant
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.types import Accepted

seconds = st.floats(0.0, 5.0, allow_nan=False)


def link_of(*rtts_s: float, every_s: float = 0.1, prior_rtt_s: float = 0.005) -> LinkEstimate:
    """An estimate that recorded these, the last one at `NOW`."""
    link = LinkEstimate(prior_rtt_s=prior_rtt_s)
    for index, rtt_s in enumerate(rtts_s):
        link.record(rtt_s, NOW - (len(rtts_s) - 1 - index) * every_s)
    return link


# the windowed minimum


@given(st.lists(st.tuples(st.floats(0.0, 3.0), seconds), min_size=1), st.floats(0.1, 5.0))
def test_the_minimum_is_the_least_of_the_window(steps: list[tuple[float, float]], window_s: float) -> None:
    least, now, seen = WindowedMin(window_s, 99.0), 0.0, []
    for after_s, value in steps:
        now += after_s
        seen.append((now, value))
        least.record(value, now)
        assert least.value == min(value for at, value in seen if at > now - window_s)


def test_a_minimum_of_nothing_is_the_default() -> None:
    assert repr(WindowedMin(10.0, 0.25)) == "<WindowedMin 0.25 of 0>"


# the weather


@pytest.mark.parametrize(
    ("ratio", "needed"),
    [(1.5, None), (2.0, 27), (4.0, 6), (8.0, 4), (100.0, 2)],
)
def test_the_worse_the_round_trips_the_fewer_turn_the_weather(ratio: float, needed: int | None) -> None:
    regime = Regime()
    turned_at = [count for count in range(1, 1000) if regime.record(0.100 * ratio, 0.100)]
    assert turned_at == ([] if needed is None else [needed])
    assert regime.foul is (needed is not None)


def test_a_long_storm_is_over_as_soon_as_a_short_one() -> None:
    regime = Regime()
    for _ in range(1000):
        regime.record(1.0, 0.1)
    assert repr(regime) == "<Regime foul 5.0 of 5.0>"
    calm = [regime.record(0.1, 0.1) for _ in range(12)]
    assert calm.index(True) == 9
    assert repr(regime) == "<Regime fair 0.0 of 5.0>"


def test_on_loopback_three_times_a_fraction_of_a_millisecond_is_no_weather() -> None:
    regime = Regime()
    assert not any(regime.record(0.0006, 0.0002) for _ in range(1000))


# the sample


def test_without_round_trips_the_path_is_the_prior_with_room_above() -> None:
    path = LinkEstimate(prior_rtt_s=0.010).path(NOW)
    assert path.values_s == pytest.approx((0.012, 0.040))
    assert path.weights == (0.5, 0.5)
    assert path.median_s == pytest.approx(0.012)


def test_the_newest_six_count_twice_and_two_unseen_points_once() -> None:
    path = link_of(*[0.010] * 26, *[0.020] * 6, every_s=0.01).path(NOW)
    weight_of = dict(zip(path.values_s, path.weights, strict=True))
    assert len(path.values_s) == 34
    assert sum(weight for value, weight in zip(path.values_s, path.weights, strict=True) if value == 0.020) == (
        pytest.approx(12 / 40)
    )
    assert weight_of[0.010] == pytest.approx(1 / 40)
    assert path.values_s[-1] == pytest.approx(0.040)
    assert path.median_s == 0.010


def test_only_the_last_32_round_trips_are_kept() -> None:
    path = link_of(*[9.0] * 40, *[0.010] * 32, every_s=0.01).path(NOW)
    assert 9.0 not in path.values_s


def test_the_path_is_the_same_object_until_something_is_learned() -> None:
    link = link_of(0.010, 0.011)
    before = link.path(NOW)
    assert link.path(NOW + 100.0) is before
    link.record(0.012, NOW + 100.0)
    assert link.path(NOW + 100.0) is not before


def test_in_foul_weather_only_the_last_two_seconds_count() -> None:
    link = link_of(*[0.010] * 20, *[0.200] * 4, every_s=0.1)
    assert link.foul
    assert "foul" in repr(link)
    assert link.path(NOW).values_s.count(0.010) > 10

    assert sorted(set(link.path(NOW + 1.65).values_s)) == pytest.approx([0.012, 0.040, 0.200])
    assert link.path(NOW + 1.65).values_s.count(0.200) == 4
    assert link.path(NOW + 60.0).values_s.count(0.200) == 1, "of nothing at all even a stale word is more"


def test_when_the_weather_turns_the_smoothed_round_trip_follows_at_once() -> None:
    link = link_of(*[0.010] * 20, *[0.200] * 4)
    assert link.rtt_s == 0.200


def test_a_lasting_change_is_the_new_calm_once_the_old_one_is_forgotten() -> None:
    link = link_of(0.010)
    for step in range(200):
        link.record(0.100, NOW + step * 0.1)
    assert link.calm_s == 0.100
    assert not link.foul


@given(st.lists(st.tuples(seconds, st.floats(0.0, 3.0), st.integers(0, 10**7)), max_size=60), st.floats(0.0, 10.0))
def test_a_path_is_always_a_distribution(steps: list[tuple[float, float, int]], later_s: float) -> None:
    link, now = LinkEstimate(), NOW
    for rtt_s, after_s, body_bytes in steps:
        now += after_s
        link.record(rtt_s, now, body_bytes)
    path = link.path(now + later_s)
    assert 2 <= len(path.values_s) <= 34
    assert list(path.values_s) == sorted(path.values_s)
    assert min(path.values_s) >= 0.0
    assert sum(path.weights) == pytest.approx(1.0)
    assert path.below[0] == 0.0
    assert path.below[-1] == pytest.approx(1.0)
    assert len(path.below) == len(path.values_s) + 1
    assert path.median_s in path.values_s


# bandwidth


def test_large_bodies_tell_the_bandwidth_and_are_not_taken_for_jitter() -> None:
    link = link_of(*[0.010] * 10)
    for step in range(20):
        link.record(0.010 + 1e6 / 10e6, NOW + step, body_bytes=1_000_000)
    assert 1 / link.s_per_byte == pytest.approx(10e6)
    assert link.rtt_s == pytest.approx(0.010)
    assert not link.foul


def test_a_bandwidth_that_changes_is_followed() -> None:
    link = link_of(0.010)
    link.record(0.110, NOW, body_bytes=1_000_000)
    for step in range(30):
        link.record(0.510, NOW + step * 0.1, body_bytes=1_000_000)
    assert link.s_per_byte == pytest.approx(0.5e-6, rel=0.05)


def test_small_bodies_say_nothing_of_the_bandwidth() -> None:
    link = link_of(0.010)
    link.record(0.500, NOW, body_bytes=LARGE_BYTES - 1)
    assert link.s_per_byte == 0.0


# silence

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
        assert len(link._unaccepted) <= 6
    for attempt in range(6):
        link.ended(attempt, now, heard=True)
    assert link.trust(now + 60.0) == 1.0
    assert not link._unaccepted


def test_round_trips_of_a_process_that_was_still_starting_are_forgotten_once_one_is_far_shorter() -> None:
    link = link_of(0.116, 0.090, 0.002, every_s=1.0)
    assert link.rtt_s == 0.002
    assert max(value for value in link.path(NOW).values_s) < 0.020


def test_a_link_that_has_been_long_known_forgets_nothing_for_one_short_round_trip() -> None:
    link = link_of(*[0.100] * 8, 0.002)
    assert link.rtt_s > 0.080
    assert max(value for value in link.path(NOW).values_s) >= 0.100


# what attempts tell it


def test_attempts_tell_the_link_of_acks_answers_and_silence() -> None:
    target = (fleet := fleet_of(edge_a=variant())).targets["edge/a"]
    candidate = estimate(fleet.offered("minilm", "1")[0], 16.0, NOW)
    first = Attempt(candidate, 1, 16.0, NOW)
    first.accepted(NOW + 0.008, Accepted(0, 0.010))
    assert target.link.rtt_s == pytest.approx(0.008)
    first.answered({"queue": 0.0, "compute": 0.01}, None, NOW + 0.018)

    for key in (2, 3):
        Attempt(candidate, key, 16.0, NOW + 1.0).cancelled(NOW + 2.0)
    Attempt(candidate, 4, 16.0, NOW + 1.0).failed(DeadlineExceeded("silence"), NOW + 2.0, 0.5)
    assert target.link.trust(NOW + 2.0) < 1e-3
    Attempt(candidate, 5, 16.0, NOW + 2.0).failed(Overloaded("full"), NOW + 2.01, 0.5)
    assert target.link.trust(NOW + 2.01) == 1.0


def test_a_large_answer_teaches_the_bandwidth() -> None:
    target = (fleet := fleet_of(edge_a=variant())).targets["edge/a"]
    candidate = estimate(fleet.offered("minilm", "1")[0], 16.0, NOW)
    attempt = Attempt(candidate, 1, 16.0, NOW, body_bytes=500_000)
    attempt.answered({"queue": 0.0, "compute": 0.01}, None, NOW + 0.112, body_bytes=500_000)
    assert target.link.s_per_byte == pytest.approx(0.1e-6)
