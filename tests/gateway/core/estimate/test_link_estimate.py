"""The link's estimate: round trips as a sample, the weather and bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import LARGE_BYTES, LinkEstimate
from gateway.core.estimate.link_weather import RttRegime
from gateway.core.estimate.windowed_min import WindowedMin
from gateway.core.placement.placer import estimate
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.fleets import NOW, fleet_of, link_of, variant
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.types import Accepted

seconds = st.floats(0.0, 5.0, allow_nan=False)


# the windowed minimum


@pytest.mark.slow
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
    regime = RttRegime()
    turned_at = [count for count in range(1, 1000) if regime.record(0.100 * ratio, 0.100)]
    assert turned_at == ([] if needed is None else [needed])
    assert regime.is_degraded is (needed is not None)


def test_a_long_storm_is_over_as_soon_as_a_short_one() -> None:
    regime = RttRegime()
    for _ in range(1000):
        regime.record(1.0, 0.1)
    assert repr(regime) == "<RttRegime foul 5.0 of 5.0>"
    calm = [regime.record(0.1, 0.1) for _ in range(12)]
    assert calm.index(True) == 9
    assert repr(regime) == "<RttRegime fair 0.0 of 5.0>"


def test_on_loopback_three_times_a_fraction_of_a_millisecond_is_no_weather() -> None:
    regime = RttRegime()
    assert not any(regime.record(0.0006, 0.0002) for _ in range(1000))


# the sample


def test_without_round_trips_the_path_is_the_prior_with_room_above() -> None:
    path = LinkEstimate(prior_rtt_s=0.010).path(NOW)
    assert path.values_s == pytest.approx((0.012, 0.040))
    assert path.weights == (0.5, 0.5)
    assert path.median_s == pytest.approx(0.012)


def test_the_newest_six_count_twice_and_two_unseen_points_once() -> None:
    path = link_of(*[0.010] * 9, *[0.020] * 6, every_s=0.01).path(NOW)
    weight_of = dict(zip(path.values_s, path.weights, strict=True))
    assert len(path.values_s) == 17
    assert sum(weight for value, weight in zip(path.values_s, path.weights, strict=True) if value == 0.020) == (
        pytest.approx(12 / 23)
    )
    assert weight_of[0.010] == pytest.approx(1 / 23)
    assert path.values_s[-1] == pytest.approx(0.040)
    assert path.median_s == 0.020, "nine older ones weigh less than six new ones"


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
    link = link_of(*[0.010] * 11, *[0.200] * 4, every_s=0.1)  # too few to foretell by
    assert link.is_degraded
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
    assert not link.is_degraded


@pytest.mark.slow
@given(st.lists(st.tuples(seconds, st.floats(0.0, 3.0), st.integers(0, 10**7)), max_size=60), st.floats(0.0, 10.0))
def test_a_path_is_always_a_distribution(steps: list[tuple[float, float, int]], later_s: float) -> None:
    link, now = LinkEstimate(), NOW
    for rtt_s, after_s, body_bytes in steps:
        now += after_s
        link.record(rtt_s, now, body_bytes)
    path = link.path(now + later_s)
    assert 2 <= len(path.values_s) <= 42  # of the last 32, or of the kinds of weather
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
    assert not link.is_degraded


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
    first = AttemptTelemetry(candidate, 1, 16.0, NOW)
    first.accepted(NOW + 0.008, Accepted(0, 0.010))
    assert target.link.rtt_s == pytest.approx(0.008)
    first.answered({"queue": 0.0, "compute": 0.01}, None, NOW + 0.018)

    for key in (2, 3):
        AttemptTelemetry(candidate, key, 16.0, NOW + 1.0).cancelled(NOW + 2.0)
    AttemptTelemetry(candidate, 4, 16.0, NOW + 1.0).failed(DeadlineExceeded("silence"), NOW + 2.0, 0.5)
    assert target.link.trust(NOW + 2.0) < 1e-3
    AttemptTelemetry(candidate, 5, 16.0, NOW + 2.0).failed(Overloaded("full"), NOW + 2.01, 0.5)
    assert target.link.trust(NOW + 2.01) == 1.0


def test_a_large_answer_teaches_the_bandwidth() -> None:
    target = (fleet := fleet_of(edge_a=variant())).targets["edge/a"]
    candidate = estimate(fleet.offered("minilm", "1")[0], 16.0, NOW)
    attempt = AttemptTelemetry(candidate, 1, 16.0, NOW, body_bytes=500_000)
    attempt.answered({"queue": 0.0, "compute": 0.01}, None, NOW + 0.112, body_bytes=500_000)
    assert target.link.s_per_byte == pytest.approx(0.1e-6)
