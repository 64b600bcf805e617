"""The chance of being in time: against the exact formula, its monotonicities, and what silence leaves of it."""

from __future__ import annotations

from math import erf, exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import LinkEstimate, RttDistribution
from gateway.core.placement.completion import CompletionTime, chance_after_silence, completion_time
from tests.support.gateway.fleets import NOW, link_of

durations = st.floats(0.0, 2.0)
spreads = st.floats(0.001, 0.5)
chances = st.floats(0.0, 1.0)


def path_of(*values_s: float) -> RttDistribution:
    return RttDistribution(tuple(sorted(values_s)), (1,) * len(values_s))


paths = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=34).map(lambda values: path_of(*values))


def exact(one: CompletionTime, budget_s: float) -> float:
    pairs = zip(one.path.values_s, one.path.weights, strict=True)
    return one.trust * sum(
        weight * 0.5 * (1 + erf((budget_s - value - one.busy_s) / one.spread_s / sqrt(2))) for value, weight in pairs
    )


@pytest.mark.slow
@given(paths, durations, spreads, st.sampled_from([1.0, 0.25, 1 / 64]), durations)
def test_it_is_the_weighted_sum_of_normal_tails(
    path: RttDistribution, busy_s: float, spread_s: float, trust: float, budget_s: float
) -> None:
    one = CompletionTime(path, busy_s, spread_s, trust)
    assert one.by(budget_s) == pytest.approx(exact(one, budget_s), abs=1e-4)
    assert 0.0 <= one.by(budget_s) <= trust


@pytest.mark.slow
@given(paths, durations, spreads, st.sampled_from([1.0, 0.25, 1 / 64]), durations)
def test_the_shortest_round_trip_bounds_it(
    path: RttDistribution, busy_s: float, spread_s: float, trust: float, budget_s: float
) -> None:
    one = CompletionTime(path, busy_s, spread_s, trust)
    assert one.by(budget_s) <= one.at_most(budget_s) <= trust
    assert one.at_most(budget_s) <= exact(one._replace(path=path_of(path.values_s[0])), budget_s) + 1e-4


@pytest.mark.slow
@given(paths, durations, spreads, durations, durations)
def test_more_time_and_less_work_never_make_it_less_likely(
    path: RttDistribution, busy_s: float, spread_s: float, budget_s: float, more_s: float
) -> None:
    one = CompletionTime(path, busy_s, spread_s)
    # Cutting the tails at four spreads costs at most 3.2e-5.
    assert one.by(budget_s + more_s) >= one.by(budget_s) - 1e-4
    assert one._replace(busy_s=busy_s + more_s).by(budget_s) <= one.by(budget_s) + 1e-4


@pytest.mark.parametrize(
    ("budget_s", "chance"), [(0.050, 0.0), (0.110, 0.25), (0.120, 0.5), (0.200, 0.5), (0.320, 0.75), (1.0, 1.0)]
)
def test_a_link_with_two_humps_gives_two_steps(budget_s: float, chance: float) -> None:
    two_humps = CompletionTime(path_of(0.010, 0.220), busy_s=0.100, spread_s=0.001)
    assert two_humps.by(budget_s) == pytest.approx(chance, abs=1e-3)


def test_the_spread_has_the_moments_of_a_lognormal_compute_and_an_uncertain_wait() -> None:
    chance = Random(7)
    drawn = [0.020 * exp(0.4 * chance.gauss(0.0, 1.0)) + chance.gauss(0.050, 0.015) for _ in range(40_000)]
    mean_s = sum(drawn) / len(drawn)
    spread_s = sqrt(sum((one - mean_s) ** 2 for one in drawn) / len(drawn))

    one = completion_time(path_of(0.0), wait_s=0.050, wait_variance=0.015**2, compute_s=0.020, sigma=0.4)

    assert one.busy_s == pytest.approx(mean_s, rel=0.01)
    assert one.spread_s == pytest.approx(spread_s, rel=0.02)


def test_bodies_take_their_time_on_the_wire() -> None:
    near = completion_time(path_of(0.01), 0.0, 1e-6, 0.01, 0.2)
    assert completion_time(path_of(0.01), 0.0, 1e-6, 0.01, 0.2, wire_s=0.5).busy_s == pytest.approx(near.busy_s + 0.5)


def test_a_silent_path_is_believed_only_as_far_as_its_trust() -> None:
    link = LinkEstimate(prior_rtt_s=0.010)
    assert completion_time(link.path(NOW), 0.0, 1e-6, 0.01, 0.2, trust=0.25).by(60.0) == 0.25


# silence


@pytest.mark.parametrize(
    ("by_now", "by_deadline", "claimed", "left"),
    [
        (0.0, 0.9, 0.9, 0.9),  # nothing could have come yet: silence says nothing
        (0.5, 1.0, 0.98, 0.49 / 0.51),
        (0.99999, 1.0, 0.98, 0.0005),  # four spreads late: it is among the two in a hundred that never come
        (0.9, 0.9, 0.9, 0.0),  # at the deadline
        (0.0, 0.0, 0.4, 0.0),  # calibration gives hope, but there is no curve to follow
        (0.2, 0.25, 0.5, 0.375),  # calibrated upwards: the shape is kept, what came earlier is not inflated
        (1.0, 1.0, 1.0, 0.0),
    ],
)
def test_what_silence_leaves(by_now: float, by_deadline: float, claimed: float, left: float) -> None:
    assert chance_after_silence(by_now, by_deadline, claimed) == pytest.approx(left, abs=1e-3)


@given(chances, chances, chances)
def test_silence_leaves_a_chance_that_is_never_above_the_claim(
    by_now: float, by_deadline: float, claimed: float
) -> None:
    by_now = min(by_now, by_deadline)
    assert 0.0 <= chance_after_silence(by_now, by_deadline, claimed) <= claimed + 1e-12


@pytest.mark.slow
@given(paths, spreads, st.floats(0.2, 2.0), st.floats(0.5, 0.99))
def test_the_longer_the_silence_lasts_after_the_usual_time_the_less_is_left(
    path: RttDistribution, spread_s: float, budget_s: float, claimed: float
) -> None:
    one = CompletionTime(path, 0.05, spread_s)
    by_deadline = one.by(budget_s)
    at_first = chance_after_silence(one.by(0.0), by_deadline, claimed)
    at_last = chance_after_silence(one.by(budget_s), by_deadline, claimed)
    assert at_last <= at_first + 1e-9


# silence before the ack


BROKEN = 0.02


@pytest.mark.slow
@given(paths, durations, spreads, durations, durations, st.floats(0.001, 0.5))
def test_no_ack_yet_leaves_a_chance_that_is_none_too_high(
    path: RttDistribution, busy_s: float, spread_s: float, silence_s: float, budget_s: float, broken: float
) -> None:
    left = CompletionTime(path, busy_s, spread_s).unacknowledged(silence_s, budget_s, broken)
    assert 0.0 <= left <= 1.0


@pytest.mark.slow
@given(paths, durations, spreads, durations, durations, durations)
def test_it_falls_with_silence_and_rises_with_the_budget(
    path: RttDistribution, busy_s: float, spread_s: float, silence_s: float, budget_s: float, more_s: float
) -> None:
    one = CompletionTime(path, busy_s, spread_s)
    left = one.unacknowledged(silence_s, budget_s, BROKEN)
    # Cutting the tails at four spreads costs at most 3.2e-5, and a small share that is left makes more of it.
    assert one.unacknowledged(silence_s + more_s, budget_s, BROKEN) <= left + 2e-3
    assert one.unacknowledged(silence_s, budget_s + more_s, BROKEN) >= left - 2e-3


def test_silence_shorter_than_any_round_trip_leaves_all_but_what_is_broken() -> None:
    assert CompletionTime(path_of(0.02, 0.03), 0.01, 0.001).unacknowledged(0.01, 1.0, BROKEN) == pytest.approx(1 / 1.02)


def test_of_two_humps_only_the_longer_is_still_possible() -> None:
    two_humps = CompletionTime(path_of(0.010, 0.220), busy_s=0.100, spread_s=0.001)
    assert two_humps.unacknowledged(0.005, 0.200, BROKEN) == pytest.approx(0.5 / 1.02)
    assert two_humps.unacknowledged(0.011, 0.200, BROKEN) == 0.0, "the long way takes more than there is"
    assert two_humps.unacknowledged(0.011, 0.400, BROKEN) == pytest.approx(0.5 / 0.52)
    assert two_humps.unacknowledged(0.011, 0.320, BROKEN) == pytest.approx(0.25 / 0.52), "half of it just makes it"


def test_a_silence_that_nobody_has_seen_speaks_for_a_broken_path() -> None:
    one = CompletionTime(path_of(*[0.010] * 9, 0.020), busy_s=0.010, spread_s=0.001)
    chances = [one.unacknowledged(silence_s, 60.0, BROKEN) for silence_s in (0.020, 0.040, 0.080)]
    assert chances == [pytest.approx(share / (share + BROKEN)) for share in (0.1, 0.1 / 16, 0.1 / 256)]
    assert one.unacknowledged(0.080, 0.100, BROKEN) == 0.0, "a quarter longer than it is silent, and then the compute"


def test_where_round_trips_take_no_time_silence_still_has_a_chance() -> None:
    assert 0.0 < CompletionTime(path_of(0.0, 0.0), 0.010, 0.001).unacknowledged(0.0, 1.0, BROKEN) < 1.0


@pytest.mark.parametrize(("mean_s", "spread_s"), [(1.0, 1.0), (1.0, 0.7), (4.0, 0.5)])
def test_a_wait_for_a_slot_is_a_gamma_distribution(mean_s: float, spread_s: float) -> None:
    path = link_of(0.010).path(NOW)
    takes = CompletionTime(path, mean_s, spread_s, skewed=True)
    shape, draw = (mean_s / spread_s) ** 2, Random(1)
    drawn = [draw.gammavariate(shape, mean_s / shape) for _ in range(20_000)]
    for times in (0.1, 0.3, 1.0, 2.0):
        came = sum(one <= times * mean_s for one in drawn) / len(drawn)
        assert takes.by(times * mean_s + path.median_s) == pytest.approx(came, abs=0.03)
        assert takes.at_most(times * mean_s) <= takes.by(times * mean_s + path.values_s[-1]) + 1e-6


def test_a_wait_that_is_not_known_well_promises_nothing_for_at_once() -> None:
    path = link_of(0.010).path(NOW)
    unsure = CompletionTime(path, 14.0, 28.0)
    assert unsure.by(0.8) > 0.3, "a normal distribution would have a third of its weight below nothing"
    assert unsure._replace(skewed=True).by(0.8) < 0.07
    assert unsure._replace(skewed=True).unacknowledged(0.1, 0.8, 0.02) < 0.07
    assert unsure._replace(skewed=True).by(0.005) == 0.0
