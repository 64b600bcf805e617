"""The estimators under placement: cost, link, precision, and what attempts teach them."""

from __future__ import annotations

import pytest

from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.estimate.service_cost import CostModel, VariantCost, cost_class, unloaded_p95_s
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetView
from gateway.core.fleet.variant_rank import is_lesser
from gateway.core.health.breaker import BreakerState
from gateway.core.placement.placer import Candidate, estimate
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.fleets import NOW, ask, fleet_of, report, variant
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import BadAnswer, DeadlineExceeded
from tidegate.types import Accepted

TABLE = ((1.0, 0.010), (101.0, 0.110))


# cost


def test_a_measured_table_is_the_prediction_and_answers_correct_it() -> None:
    cost = VariantCost(TABLE, "tokens")
    assert cost.predict_s(51.0) == pytest.approx(0.060)

    for _ in range(100):
        cost.record(51.0, 0.120)

    assert cost.predict_s(51.0) == pytest.approx(0.120, rel=0.1)
    assert "measured" in repr(cost)


def test_a_target_without_a_table_is_priced_dearly_but_proves_nothing() -> None:
    prior = VariantCost((), "tokens")

    assert prior.predict_s(23.0) > VariantCost(TABLE, "tokens").predict_s(1.0)
    assert prior.floor_s(1e9) == 0.0
    assert prior.sigma >= 0.5
    assert "prior" in repr(prior)


def test_the_optimistic_floor_does_not_believe_that_a_slow_spell_lasts() -> None:
    cost = VariantCost(TABLE, "tokens")
    for _ in range(200):
        cost.record(1.0, 0.100)

    assert cost.floor_s(1.0) == pytest.approx(0.6 * 0.010)


def test_what_was_learned_survives_a_reconnect_but_not_a_new_table() -> None:
    model = CostModel()
    first = model.of("edge/a", "minilm", "1", VariantOffer("int8", "int8", TABLE), "tokens")

    assert model.of("edge/a", "minilm", "1", VariantOffer("int8", "int8", TABLE), "tokens") is first
    assert model.of("edge/a", "minilm", "1", VariantOffer("int8", "int8", ((1.0, 0.02),)), "tokens") is not first
    prior = model.of("edge/b", "minilm", "1", VariantOffer("int8", "int8"), "items")
    assert model.of("edge/b", "minilm", "1", VariantOffer("int8", "int8"), "tokens") is not prior
    assert repr(model) == "<CostModel 2 variants>"

    model.forget("edge/b")
    assert repr(model) == "<CostModel 1 variants>"


@pytest.mark.parametrize(
    ("edges_p95_s", "expected"), [([], "heavy"), ([3.0], "heavy"), ([1.5], "ambiguous"), ([3.0, 1.0], "cheap")]
)
def test_the_class_of_a_request_is_derived_from_what_edges_would_take(edges_p95_s: list[float], expected: str) -> None:
    assert cost_class(edges_p95_s, budget_s=2.0) == expected


def test_an_unloaded_p95_is_above_the_median_by_the_spread() -> None:
    cost = VariantCost(TABLE, "tokens")
    assert unloaded_p95_s(cost, 1.0, rtt_s=0.005) > 0.005 + cost.predict_s(1.0)


def test_a_target_that_was_slow_once_is_believed_again_after_minutes_without_an_answer() -> None:
    model = CostModel()
    slow = model.of("edge/a", "m", "1", VariantOffer("int8", "int8", TABLE), "tokens")
    other = model.of("edge/b", "m", "1", VariantOffer("int8", "int8", TABLE), "tokens")
    for cost in (slow, other):
        for _ in range(80):
            cost.record(51.0, 0.240)

    for second in range(300):
        model.relax("edge/a", NOW + second)
    model.relax("edge/nobody", NOW)

    assert slow.predict_s(51.0) == pytest.approx(0.060, rel=0.01)
    assert other.predict_s(51.0) == pytest.approx(0.240, rel=0.1)


# link


def test_the_first_sample_replaces_the_prior() -> None:
    link = LinkEstimate(prior_rtt_s=0.5)
    link.record(0.010, NOW)

    assert (link.rtt_s, link.jitter_s, link.samples) == (0.010, 0.005, 1)
    assert repr(link) == "<LinkEstimate 10.00 ms ± 5.00 ms of 1>"


def test_a_busy_link_is_smoothed_and_a_silent_one_believes_the_news() -> None:
    busy, silent = LinkEstimate(), LinkEstimate()
    for link in (busy, silent):
        link.record(0.010, NOW)
    busy.record(0.110, NOW + 0.1)
    silent.record(0.110, NOW + 60.0)

    assert busy.rtt_s < 0.03
    assert silent.rtt_s > 0.10


def test_a_negative_round_trip_is_rounding() -> None:
    link = LinkEstimate()
    link.record(-0.001, NOW)
    assert link.rtt_s == 0.0


# precision


@pytest.mark.parametrize(
    ("one", "than", "lesser"),
    [
        (variant("int8"), variant("fp32"), True),
        (variant("fp32"), variant("int8"), False),
        (variant("int8", quality=0.99), variant("fp32", quality=0.98), False),
        (variant("int8", quality=0.97), variant("bf16"), True),
        (variant("mystery"), variant("fp32"), False),
    ],
)
def test_the_lesser_of_two_variants_needs_a_ground(one: VariantOffer, than: VariantOffer, lesser: bool) -> None:
    assert is_lesser(one, than) is lesser


# evidence


def test_an_answer_teaches_cost_link_health_and_load() -> None:
    target = (fleet := fleet_of(edge_a=variant())).targets["edge/a"]
    candidate = estimate(fleet.offered("minilm", "1")[0], 16.0, NOW)
    attempt = AttemptTelemetry(candidate, 7, 16.0, NOW)
    assert target.queue_estimate.in_flight == 1
    assert "edge/a" in repr(attempt)

    link_s = attempt.answered({"queue": 0.002, "compute": 0.020}, report(0.5), NOW + 0.030)

    assert link_s == pytest.approx(0.008)
    assert target.link.rtt_s == pytest.approx(0.008)
    assert candidate.offered.cost.predict_s(16.0) > 0.010
    assert target.queue_estimate.in_flight == 0
    assert target.queue_estimate.wait_s(NOW + 0.030) == pytest.approx(0.5)


def test_an_answer_without_stage_times_teaches_what_is_left_as_compute() -> None:
    fleet = fleet_of(pool_a=variant())
    candidate = estimate(fleet.offered("minilm", "1")[0], 16.0, NOW)
    for key in range(60):
        link_s = AttemptTelemetry(candidate, key, 16.0, NOW).answered({}, None, NOW + 0.045)

    assert link_s == candidate.link_s
    assert candidate.offered.cost.predict_s(16.0) == pytest.approx(0.040, rel=0.1)


def test_errors_count_only_where_they_are_the_targets_fault() -> None:
    target = (fleet := fleet_of(edge_a=variant())).targets["edge/a"]
    candidate = estimate(fleet.offered("minilm", "1")[0], 16.0, NOW)
    for key in range(20):
        AttemptTelemetry(candidate, key, 16.0, NOW).failed(DeadlineExceeded("too short"), NOW, 0.5)
        AttemptTelemetry(candidate, key, 16.0, NOW).cancelled(NOW)
    assert target.breaker.state is BreakerState.CLOSED

    for key in range(5):
        AttemptTelemetry(candidate, key, 16.0, NOW).failed(BadAnswer("garbage"), NOW, 0.5)
    assert target.breaker.state is BreakerState.OPEN
    assert target.queue_estimate.in_flight == 0


def placed(fleet: Fleet) -> tuple[TargetView, Candidate]:
    target = fleet.targets["edge/a"]
    return target, estimate(fleet.offered("minilm", "1")[0], 16.0, target.plain_from)


def test_an_ack_tells_of_a_queue_that_no_report_spoke_of() -> None:
    target, candidate = placed(fleet_of(edge_a=variant()))
    now = target.plain_from
    attempt = AttemptTelemetry(candidate, 1, 16.0, now)
    attempt.accepted(now + candidate.link_s, Accepted(3, candidate.compute_s + 0.200))
    assert target.wait_s(now + candidate.link_s) == pytest.approx(0.200 + candidate.compute_s, abs=0.004)

    short = AttemptTelemetry(candidate._replace(ahead_s=0.200), 2, 16.0, now)
    short.accepted(now + candidate.link_s, Accepted(0, 0.0))
    assert target.wait_s(now + candidate.link_s) == pytest.approx(2 * candidate.compute_s, abs=0.004)


def test_waits_that_answers_report_are_held_against_what_was_predicted() -> None:
    target, candidate = placed(fleet_of(edge_a=variant()))
    now = target.plain_from
    for key in range(100):
        attempt = AttemptTelemetry(candidate._replace(ahead_s=0.100), key, 16.0, now)
        attempt.answered({"queue": 0.050, "compute": 0.010}, None, now + 0.062)
    assert target.queue_estimate.error.factor == pytest.approx(0.5, abs=0.05)
    assert target.expected_wait_s(0.100, now + 0.062) == pytest.approx(0.050, abs=0.005)


def test_a_wait_predicted_from_our_own_caution_teaches_nothing() -> None:
    target, candidate = placed(fleet_of(edge_a=variant()))
    now = target.plain_from
    target.refused(0.5, now)
    assert target.expected_wait_s(0.5, now) == 0.5
    attempt = AttemptTelemetry(candidate._replace(ahead_s=0.5), 1, 16.0, now)
    attempt.accepted(now + 0.002, Accepted(0, 0.010))
    target.queue_estimate.report(report(0.040), "link", now + 0.002)
    attempt.answered({"queue": 0.001, "compute": 0.010}, None, now + 0.013)
    assert target.queue_estimate.error.factor == 1.0
    assert target.queue_estimate.wait_s(now + 0.013) > 0.02, "nor does it take anything out of the queue"


def test_no_learned_factor_shortens_a_pause_that_the_target_asked_for() -> None:
    target, _ = placed(fleet_of(edge_a=variant()))
    now = target.plain_from
    for _ in range(200):
        target.queue_estimate.error.record(0.1, 0.01)
    target.refused(0.5, now)
    assert target.expected_wait_s(0.5, now) == 0.5
    assert target.expected_wait_s(0.5, now + 0.5) < 0.1


def test_an_attempt_that_was_moved_was_a_claim_that_failed_and_one_given_up_was_none() -> None:
    placer = UtilityPlacer(fleet_of(edge_a=variant()))
    for hopeless in (False, True):
        candidate = placer.decide(ask(), NOW).chosen
        assert candidate is not None
        AttemptTelemetry(candidate, 1, 16.0, NOW).cancelled(NOW + 0.01, hopeless=hopeless)
    assert [came for _, came, weight in placer.calibration.claimed.bins() if weight == 1.0] == [0.0]
