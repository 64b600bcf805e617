"""Placement by value: quality and chance against cost and harm, and a choice that pruning does not change."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.shadow_price import ShadowPrice
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.core.fleet.variant_rank import quality_of
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Choice, Decision, added_work_s
from gateway.core.placement.utility import MOST_BILL, WHETHER, UtilityPlacer, UtilityWeights, queue_position
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, variant
from tests.support.interpreted import interpreted_only
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import BadAnswer, DeadlineExceeded, InvalidRequest, Overloaded, Unreachable


def chosen(decision: Decision) -> tuple[str, str]:
    assert decision.chosen is not None
    return decision.chosen.target.id, decision.reason


def jittering(fleet: Fleet, target_id: str, *rtts_s: float) -> None:
    for index, rtt_s in enumerate(rtts_s):
        fleet.targets[target_id].link.record(rtt_s, NOW - 1.0 + index / 100)


def busy(fleet: Fleet, target_id: str, count: int, *, due_in_s: float, compute_s: float = 0.1) -> None:
    """`count` ordinary requests are under way there, due in `due_in_s`."""
    queue_estimate = fleet.targets[target_id].queue_estimate
    for key in range(count):
        queue_estimate.launch(1000 + key, compute_s, NOW, queue_position(ask(budget_s=due_in_s)))
    queue_estimate.congestion = ShadowPrice()  # that was long ago: the rent has come down


def test_with_time_enough_the_cheapest_is_worth_most() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.050), pool_main=variant(compute_s=0.050))
    decision = UtilityPlacer(fleet).decide(ask(budget_s=2.0), NOW)
    assert chosen(decision) == ("edge/a", "cheapest")
    assert decision.chosen is not None
    assert decision.chosen.claim is not None
    assert decision.chosen.claim.prediction.claimed == pytest.approx(1.0)


def test_a_chance_of_two_thirds_is_not_worth_saving_a_hundredth_of_a_second_of_the_pool() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.010))
    assert chosen(UtilityPlacer(fleet).decide(ask(budget_s=0.125), NOW)) == ("pool/main", "faster")


def test_a_little_less_chance_is_worth_a_great_saving_and_no_cliff_is_in_between() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.090))
    fleet.targets["edge/a"].link.record(0.002, NOW)
    assert chosen(UtilityPlacer(fleet).decide(ask(budget_s=0.150), NOW)) == ("edge/a", "cheapest")
    dear = UtilityPlacer(fleet, UtilityWeights(cost=0.0)).decide(ask(budget_s=0.150), NOW)
    assert chosen(dear)[0] == "pool/main"


def test_the_more_the_bill_weighs_the_less_chance_a_device_needs() -> None:
    went = []
    for cost_weight in (0.0, 3.0, 40.0):
        fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.020))
        prices = UtilityWeights.weighing(cost_weight)
        went.append(chosen(UtilityPlacer(fleet, prices).decide(ask(budget_s=0.133), NOW))[0])
    assert went == ["pool/main", "pool/main", "edge/a"]


def test_the_bill_chooses_where_and_not_whether() -> None:
    fleet = fleet_of(pool_main=variant(compute_s=0.5))
    worths = []
    for cost_weight in (0.5, WHETHER, 40.0):
        (judged,) = UtilityPlacer(fleet, UtilityWeights.weighing(cost_weight)).decide(ask(budget_s=5.0), NOW).judged
        assert judged is not None
        worths.append(judged.worth)
    assert worths[0] > worths[1]
    assert worths[1] == pytest.approx(worths[2])
    assert judged.value == pytest.approx(judged.worth - judged.rent - MOST_BILL), "and never outweighs an answer"


def test_the_bill_of_generations_is_weighed_in_proportion() -> None:
    usual = UtilityWeights()
    assert UtilityWeights.weighing(usual.cost) == usual
    assert UtilityWeights.weighing(2.0 * usual.cost).generation_cost == 2.0 * usual.generation_cost


def test_quality_pays_for_the_dearer_one_where_it_is_weighed() -> None:
    fleet = fleet_of(edge_a=variant("int4", quality=0.5), pool_main=variant("fp32", quality=1.0))
    assert chosen(UtilityPlacer(fleet).decide(ask(), NOW)) == ("pool/main", "better")
    assert chosen(UtilityPlacer(fleet, UtilityWeights(quality=0.0)).decide(ask(), NOW)) == ("edge/a", "cheapest")


def test_a_steady_link_is_surer_than_a_shorter_one_that_jitters() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), pool_main=variant(compute_s=0.010))
    jittering(fleet, "edge/a", *[0.005, 0.005, 0.005, 0.150] * 8)
    jittering(fleet, "pool/main", *[0.030] * 32)
    assert chosen(UtilityPlacer(fleet).decide(ask(budget_s=0.125), NOW)) == ("pool/main", "surer")


def test_a_silent_path_is_left_before_anything_has_timed_out() -> None:
    fleet = fleet_of(edge_a=variant("int8"), pool_main=variant(compute_s=0.02))
    link = fleet.targets["edge/a"].link
    link.sent(1, NOW)
    link.accepted(1, NOW + 0.002)
    link.sent(2, NOW + 0.01)
    placer = UtilityPlacer(fleet)
    assert chosen(placer.decide(ask(at=NOW + 0.02), NOW + 0.02))[0] == "edge/a"
    assert chosen(placer.decide(ask(at=NOW + 0.09), NOW + 0.09))[0] == "pool/main"


def test_an_urgent_request_passes_those_with_time_but_goes_elsewhere_where_that_would_make_them_late() -> None:
    placed = {}
    for due_in_s in (9.0, 0.62):
        fleet = fleet_of(edge_a=variant("int8", compute_s=0.1), pool_main=variant(compute_s=0.150))
        busy(fleet, "edge/a", 5, due_in_s=due_in_s)
        decision = UtilityPlacer(fleet, UtilityWeights(cost=1.0, earliness=0.01)).decide(ask(budget_s=0.5), NOW)
        placed[due_in_s] = decision.chosen and decision.chosen.target.id
    assert placed == {9.0: "edge/a", 0.62: "pool/main"}


def test_a_foreign_servers_order_is_its_own() -> None:
    fleet = Fleet(lambda model, version: "tokens")
    fleet.add(TargetSpec("edge/a", "edge", "127.0.0.1:1", "unary", foreign=True), NOW)
    fleet.fold(LinkUp("edge/a", "edge/a", 0, (offer(variant(compute_s=0.1)),)), NOW)
    busy(fleet, "edge/a", 5, due_in_s=9.0)
    decision = UtilityPlacer(fleet).decide(ask(budget_s=0.4), NOW)
    (judged,) = decision.judged
    assert judged is not None
    assert judged.harm == 0.0
    assert judged.chance < 0.15


def test_a_weightier_request_may_cost_more() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.070))
    placer = UtilityPlacer(fleet, UtilityWeights(cost=2.0))
    tight = ask(budget_s=0.130)
    assert chosen(placer.decide(tight._replace(priority=4), NOW)) == ("edge/a", "cheapest")
    assert chosen(placer.decide(tight._replace(priority=1), NOW)) == ("pool/main", "faster")


def test_twins_that_are_sure_share_the_work() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.011))
    placer, went = UtilityPlacer(fleet), []
    for key in range(6):
        candidate = placer.decide(ask(), NOW).chosen
        assert candidate is not None
        AttemptTelemetry(candidate, key, 16.0, NOW)
        went.append(candidate.target.id)
    assert went == ["edge/a", "edge/b"] * 3


def test_large_bodies_go_where_the_wire_is_short() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.05), pool_main=variant(compute_s=0.05))
    fleet.targets["edge/a"].link.s_per_byte = 1e-6
    placer = UtilityPlacer(fleet)
    assert chosen(placer.decide(ask(budget_s=0.5), NOW))[0] == "edge/a"
    assert chosen(placer.decide(ask(budget_s=0.5)._replace(body_bytes=450_000), NOW)) == ("pool/main", "faster")


@pytest.mark.parametrize(
    ("offered", "says"),
    [(variant("int8", quality=0.97), "has int8 of quality 0.97"), (variant("int8"), "has int8 of unknown quality")],
)
def test_a_floor_of_quality_is_a_condition_and_no_wish(offered: VariantOffer, says: str) -> None:
    placer = UtilityPlacer(fleet_of(edge_a=offered))
    decision = placer.decide(ask()._replace(min_quality=0.98), NOW)
    assert decision.refusal is not None
    assert says in decision.refusal.message
    assert chosen(placer.decide(ask(), NOW)) == ("edge/a", "only")


@pytest.mark.parametrize(
    ("offered", "quality"),
    [(variant("fp32"), 1.0), (variant("int8"), 0.98), (variant("odd"), 1.0), (variant("int8", quality=0.9), 0.9)],
)
def test_quality_is_what_was_measured_else_what_is_usual(offered: VariantOffer, quality: float) -> None:
    assert quality_of(offered) == quality
    assert quality_of(variant(quality=0.0)) > 0.0


# the choice

targets = st.lists(
    st.tuples(
        st.sampled_from(["edge", "pool"]),
        st.floats(0.001, 0.5),
        st.floats(0.5, 1.0),
        st.integers(0, 4),
        st.floats(0.0, 0.2),
    ),
    min_size=1,
    max_size=8,
)


@interpreted_only
@pytest.mark.slow
@given(targets, st.floats(0.01, 1.0), st.integers(0, 4), st.integers(0, 2**16))
def test_pruning_never_changes_the_choice(drawn: list[Any], budget_s: float, priority: int, seed: int) -> None:
    offers: dict[str, Any] = {
        f"{tier}_{index}": variant(compute_s=compute_s, quality=quality)
        for index, (tier, compute_s, quality, _, _) in enumerate(drawn)
    }
    fleet = fleet_of(**offers)
    for index, (tier, compute_s, _, queued, rtt_s) in enumerate(drawn):
        jittering(fleet, f"{tier}/{index}", rtt_s, 2 * rtt_s, 4 * rtt_s)
        busy(fleet, f"{tier}/{index}", queued, due_in_s=budget_s * 1.5, compute_s=compute_s)
        fleet.targets[f"{tier}/{index}"].queue_estimate.congestion.sent(rtt_s, NOW)
    pruning, full, chance = UtilityPlacer(fleet), _Exhaustive(fleet), Random(seed)
    for _ in range(64):
        said = chance.random()
        for placer in (pruning, full):
            placer.calibration.record(said, said, chance.random() < 0.9 * said)
    full.calibration = pruning.calibration
    question = ask(budget_s=budget_s)._replace(priority=priority)

    quick, thorough = pruning.decide(question, NOW), full.decide(question, NOW)

    if quick.chosen is None:
        assert thorough.chosen is None
        return
    values = [one.value for one in thorough.judged if one is not None]
    assert len(values) == len(thorough.candidates)
    mine = quick.judged[[one.offered for one in quick.candidates].index(quick.chosen.offered)]
    assert mine is not None
    assert mine.value == pytest.approx(max(values))


class _Exhaustive(UtilityPlacer):
    """Judges everybody, whatever the bounds say."""

    def choose(self, candidates: Any, asked: Ask, now: float) -> Choice:
        choices = [super(_Exhaustive, self).choose([one], asked, now) for one in candidates]
        qualities = [one.offered.quality for one in candidates]
        place = queue_position(asked)
        rents = [one.offered.target.queue_estimate.congestion.per_second(now) * added_work_s(one) for one in candidates]
        sure = self.calibration.surest * place.weight
        bounds = self._bounds(candidates, qualities, rents, sure, place.weight, asked.deadline - now, asked)
        worths = [place.weight * self._worth(quality, max(qualities)) for quality in qualities]
        judged = [
            self._judge(one, bound, rent, worth, place, now, -inf)
            for one, bound, rent, worth in zip(candidates, bounds, rents, worths, strict=True)
        ]
        best = max(range(len(judged)), key=lambda index: judged[index].value)
        return Choice(choices[best].candidate, "", judged)


def test_those_that_could_not_have_won_are_not_judged() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(compute_s=0.5), pool_main=variant(compute_s=0.5))
    judged = UtilityPlacer(fleet).decide(ask(), NOW).judged
    assert [one is not None for one in judged] == [True, False, False]


def test_what_is_provably_impossible_is_refused_here_as_well() -> None:
    decision = UtilityPlacer(fleet_of(pool_main=variant(compute_s=1.0))).decide(ask(budget_s=0.1), NOW)
    assert isinstance(decision.refusal, DeadlineExceeded)
    assert len(decision.judged) == 1
    late = UtilityPlacer(fleet_of(pool_main=variant(compute_s=None))).decide(ask(budget_s=0.0), NOW)
    assert late.chosen is not None, "no proof, no refusal; and no division by a budget of nothing"


# what it learns


@pytest.mark.parametrize(
    ("end", "outcomes"),
    [
        (lambda one: one.answered({}, None, NOW + 0.1), [1.0]),
        (lambda one: one.answered({}, None, NOW + 3.0), [0.0]),
        (lambda one: one.failed(Unreachable("gone"), NOW, 0.5), [0.0]),
        (lambda one: one.failed(BadAnswer("garbage"), NOW, 0.5), []),  # a breaker's business, not a whole tier's
        (lambda one: one.failed(Overloaded("full"), NOW, 0.5), []),
        (lambda one: one.failed(InvalidRequest("your fault"), NOW, 0.5), []),
        (lambda one: one.cancelled(NOW + 0.1), []),
        (lambda one: one.cancelled(NOW + 2.0), [0.0]),
    ],
)
def test_each_end_settles_what_was_claimed(end: Any, outcomes: list[float]) -> None:
    placer = UtilityPlacer(fleet_of(edge_a=variant()))
    candidate = placer.decide(ask(), NOW).chosen
    assert candidate is not None
    end(AttemptTelemetry(candidate, 1, 16.0, NOW))
    assert [came for _, came, _ in placer.calibration.claimed.bins()] == outcomes
    assert "Calibration claimed" in repr(placer)


def test_one_calibration_serves_all_so_misfortune_does_not_change_the_order() -> None:
    fleet = fleet_of(edge_a=variant("int8"), pool_main=variant(compute_s=0.05))
    placer = UtilityPlacer(fleet)
    assert chosen(placer.decide(ask(), NOW))[0] == "edge/a"
    for _ in range(40):
        placer.calibration.record(1.0, 1.0, came=False)
    decision = placer.decide(ask(), NOW)
    assert chosen(decision)[0] == "edge/a"
    assert decision.chosen is not None
    assert decision.chosen.claim is not None
    assert decision.chosen.claim.prediction.claimed < 0.5, "but nothing is promised for sure"


# what others lose


def test_a_target_that_is_nearly_full_takes_rent_and_long_work_goes_elsewhere() -> None:
    table = VariantOffer("fp32", "fp32", ((1.0, 0.010), (101.0, 0.210)))
    fleet = fleet_of(edge_a=table, pool_main=variant(compute_s=0.050))
    placer = UtilityPlacer(fleet)
    for target in fleet.targets.values():
        target.link.record(0.002, NOW)
    for _ in range(8):
        fleet.targets["edge/a"].queue_estimate.congestion.sent(0.050, NOW)
    long, short = ask(units=91.0), ask(units=2.0)
    assert chosen(placer.decide(long, NOW)) == ("pool/main", "faster")
    assert chosen(placer.decide(short, NOW)) == ("edge/a", "cheapest")
    assert chosen(placer.decide(ask(units=91.0, at=NOW + 5.0), NOW + 5.0)) == ("edge/a", "cheapest"), (
        "rents fall while nothing is sent"
    )


def test_what_the_chosen_one_costs_others_is_kept_with_its_claim() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.1))
    busy(fleet, "edge/a", 5, due_in_s=0.62)
    fleet.targets["edge/a"].queue_estimate.congestion.sent(0.25, NOW)
    decision = UtilityPlacer(fleet).decide(ask(budget_s=0.5), NOW)
    (judged,) = decision.judged
    assert decision.chosen is not None
    assert decision.chosen.claim is not None
    assert judged is not None
    assert judged.harm > 0.1
    assert judged.rent == pytest.approx(1.0 * decision.chosen.compute_s), "half full: a second there costs an answer"
    assert decision.chosen.claim.externality == judged.harm + judged.rent


def test_the_chosen_ones_times_are_those_of_its_place_in_the_queue() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.1))
    busy(fleet, "edge/a", 5, due_in_s=9.0)
    decision = UtilityPlacer(fleet).decide(ask(budget_s=0.5), NOW)
    (at_the_end,), chosen_one = decision.candidates, decision.chosen
    assert chosen_one is not None
    assert at_the_end.wait_s == pytest.approx(0.5)
    assert chosen_one.ahead_s == chosen_one.wait_s == pytest.approx(0.1), "it passes all but the one that is computed"
    assert chosen_one.finish_s == pytest.approx(at_the_end.finish_s - 0.4)
    assert chosen_one.margin_s < at_the_end.margin_s


def test_urgency_does_not_shorten_the_pause_of_a_target_that_has_just_refused() -> None:
    placed = []
    for pause_s in (0.0, 0.5):
        fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), edge_b=variant("int8", compute_s=0.300))
        busy(fleet, "edge/a", 6, due_in_s=9.0)
        fleet.targets["edge/a"].refused(pause_s, NOW)
        decision = UtilityPlacer(fleet).decide(ask(budget_s=0.4)._replace(priority=1), NOW)
        assert decision.chosen is not None
        placed.append(decision.chosen.target.id)
    assert placed == ["edge/a", "edge/b"]


class HeardToll:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def launched(self, now: float) -> None:
        self.told.append("launched")

    def answered(self, queue_s: float, compute_s: float | None, now: float) -> None:
        self.told.append("answered")

    def refused(self, now: float, *, full: bool) -> None:
        self.told.append(f"refused, full: {full}")

    def failed(self, now: float) -> None:
        self.told.append("failed")

    def cancelled(self, now: float) -> None:
        self.told.append("cancelled")


@pytest.mark.parametrize(("hopeless", "told"), [(True, "refused, full: False"), (False, "cancelled")])
def test_who_is_taken_out_of_a_hopeless_queue_is_not_charged_for_it(hopeless: bool, told: str) -> None:
    placer, observer = UtilityPlacer(fleet_of(edge_a=variant())), HeardToll()
    candidate = placer.decide(ask(), NOW).chosen
    assert candidate is not None
    attempt = AttemptTelemetry(candidate._replace(observer=observer), 1, 16.0, NOW)
    attempt.cancelled(NOW + 0.01, hopeless=hopeless)
    assert observer.told == ["launched", told]
    assert candidate.target.queue_estimate.in_flight == 0


def test_where_unsure_answers_are_escalated_a_lesser_variant_is_not_held_to_be_lesser() -> None:
    fleet = fleet_of(
        edge_a=variant("int8", compute_s=0.001, quality=0.9), pool_main=variant(compute_s=0.001, quality=1.0)
    )
    placer = UtilityPlacer(fleet)
    assert chosen(placer.decide(ask(), NOW)) == ("pool/main", "better")
    assert chosen(placer.decide(ask()._replace(escalates=True), NOW)) == ("edge/a", "cheapest")
