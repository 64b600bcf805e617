"""Unsure answers: kept, taken further while there is time and room, and declared where nobody better answered."""

from __future__ import annotations

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate, Placer
from gateway.core.placement.probing import ProbePlacer
from gateway.core.request.escalation import Escalations, provisional_due_at
from gateway.core.request.hedging import DeadlineHedging
from gateway.core.request.machine import Answer, Launch, RequestMachine, WakeAt
from tests.gateway.core.request.test_machine import answer, cancelled, launched, woken_at
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, variant
from tests.support.interpreted import interpreted_only
from tidegate.outcome import InvalidRequest, Overloaded, ServeError, Unreachable

INT8 = variant("int8", compute_s=0.010, quality=0.97)
FP32 = variant("fp32", compute_s=0.050, quality=0.99)
DUE_AT = NOW + 2.0 - 0.02


def edge_and_pool() -> Fleet:
    return fleet_of(edge_a=INT8, edge_b=INT8, pool_main=FP32)


def machine(
    fleet: Fleet | None = None, *, escalations: Escalations | None = None, budget_s: float = 2.0, demanded: str = ""
) -> RequestMachine:
    return RequestMachine(
        ask(budget_s=budget_s, variant=demanded),
        Placer(fleet or edge_and_pool()),
        escalations=escalations or Escalations(0.5),
    )


def at_the_edge(one: RequestMachine) -> RequestMachine:
    assert launched(one.arrived(NOW))[0][1].startswith("edge/")
    return one


@pytest.mark.parametrize("confidence", [0.5, 0.51, 1.0, None])
def test_a_sure_answer_ends_the_request(confidence: float | None) -> None:
    end = answer(at_the_edge(machine()).answered(0, NOW + 0.01, confidence))
    assert (end.route.reason, end.route.attempts, end.route.provisional) == ("cheapest", 1, False)


def test_an_unsure_answer_is_taken_to_the_better_variant_and_not_to_the_other_edge() -> None:
    one = at_the_edge(machine())
    actions = one.answered(0, NOW + 0.01, 0.49)
    assert launched(actions) == [(1, "pool/main")]
    assert woken_at(actions) == DUE_AT
    assert "PROVISIONAL, waiting for [1]" in repr(one)

    end = answer(one.answered(1, NOW + 0.08))
    assert (end.route.reason, end.candidate.target.id, end.route.attempts) == ("escalated", "pool/main", 2)
    route = end.route
    assert (route.provisional, route.hedged, route.fallback, route.degraded) == (False, False, False, False)


@pytest.mark.parametrize("error", [Unreachable("gone"), Overloaded("full"), InvalidRequest("no such output")])
def test_a_provisional_answer_beats_any_error(error: ServeError) -> None:
    one = at_the_edge(machine())
    one.answered(0, NOW + 0.01, 0.0)
    end = answer(one.failed(1, error, NOW + 0.02))
    assert (end.attempt, end.route.reason, end.route.attempts, end.route.provisional) == (0, "cheapest", 2, True)


def test_a_provisional_answer_is_given_just_before_the_deadline_when_the_better_one_is_silent() -> None:
    one = at_the_edge(machine())
    one.answered(0, NOW + 0.01, 0.0)
    assert one.timer(NOW + 1.0) == [WakeAt(DUE_AT)]
    actions = one.timer(DUE_AT)
    end = answer(actions)
    assert (end.attempt, end.route.provisional) == (0, True)
    assert cancelled(actions) == [1]


def test_an_unsure_answer_is_due_by_when_its_request_came_not_by_when_a_target_was_there() -> None:
    fleet = edge_and_pool()
    for id in fleet.targets:
        fleet.fold(LinkDown(id, "connection reset"), NOW)
    places = ProbePlacer(Placer(fleet), fleet, lambda: 0.5)
    one = RequestMachine(ask(budget_s=0.5), places, escalations=Escalations(0.5))
    back_at = woken_at(one.arrived(NOW))
    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(INT8),)), back_at)
    fleet.fold(LinkUp("pool/main", "pool/main", 1, (offer(FP32),)), back_at)
    assert launched(one.timer(back_at)) == [(0, "edge/a")]
    assert woken_at(one.answered(0, NOW + 0.1, 0.0)) == provisional_due_at(NOW, NOW + 0.5)


def test_an_unsure_answer_that_comes_when_it_is_due_is_given_at_once() -> None:
    assert answer(at_the_edge(machine()).answered(0, DUE_AT, 0.0)).route.provisional


@pytest.mark.parametrize(
    ("fleet", "why"),
    [
        (fleet_of(edge_a=INT8, edge_b=INT8), "nobody has a better variant"),
        (fleet_of(edge_a=INT8, pool_main=variant("fp32", compute_s=0.02)), "nobody measured the other one"),
        (fleet_of(edge_a=variant("int8"), pool_main=FP32), "nobody measured this one"),
        (fleet_of(edge_a=INT8, pool_main=variant("fp32", compute_s=1.97, quality=0.99)), "it would be late"),
    ],
)
def test_an_unsure_answer_is_declared_where_nobody_better_could_answer_in_time(fleet: Fleet, why: str) -> None:
    end = answer(at_the_edge(machine(fleet)).answered(0, NOW + 0.01, 0.0))
    route = end.route
    assert (route.provisional, route.attempts, route.reason) == (
        True,
        1,
        "cheapest" if len(fleet.targets) > 1 else "only",
    ), why


def test_a_better_target_whose_link_is_silent_is_no_promise() -> None:
    fleet = edge_and_pool()
    one = at_the_edge(machine(fleet))
    link = fleet.targets["pool/main"].link
    link.sent(77, NOW)
    link.accepted(77, NOW + 0.001)  # it acknowledges, so that silence means something
    link.sent(78, NOW + 0.002)
    assert link.trust(NOW + 1.0) < 1.0
    assert answer(one.answered(0, NOW + 1.0, 0.0)).route.provisional


def test_an_overloaded_fleet_is_spared() -> None:
    one = at_the_edge(machine(escalations=Escalations(0.5, overloaded=lambda: True)))
    assert answer(one.answered(0, NOW + 0.01, 0.0)).route.provisional


def test_a_demanded_variant_is_never_escalated_but_its_doubt_is_told() -> None:
    one = at_the_edge(machine(demanded="int8"))
    end = answer(one.answered(0, NOW + 0.01, 0.0))
    assert (end.route.reason, end.route.provisional) == ("demanded", True)


def test_a_pinned_request_is_never_escalated_but_its_doubt_is_told() -> None:
    pinned = RequestMachine(ask()._replace(pin="site"), Placer(edge_and_pool()), escalations=Escalations(0.5))
    assert answer(at_the_edge(pinned).answered(0, NOW + 0.01, 0.0)).route.provisional


def test_a_hedge_at_the_better_variant_is_the_escalation() -> None:
    one = machine(fleet_of(edge_a=INT8, pool_main=FP32))
    wake = woken_at(one.arrived(NOW))
    assert launched(one.timer(wake)) == [(1, "pool/main")]

    assert one.answered(0, wake + 0.01, 0.2) == [WakeAt(DUE_AT)]
    end = answer(one.answered(1, wake + 0.02))
    assert (end.route.reason, end.route.hedged, end.route.attempts, end.route.provisional) == ("hedge", True, 2, False)


def test_a_sure_answer_of_the_lesser_variant_ends_it_beside_a_pending_better_one() -> None:
    one = machine(fleet_of(edge_a=INT8, pool_main=FP32))
    one.timer(woken_at(one.arrived(NOW)))
    actions = one.answered(0, NOW + 1.95, 0.9)
    assert (answer(actions).attempt, cancelled(actions)) == (0, [1])


@interpreted_only
def test_a_pending_attempt_of_the_same_variant_is_pointless_after_an_unsure_answer() -> None:
    class Early(DeadlineHedging):
        def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
            return now + 0.1

    one = RequestMachine(ask(), Placer(edge_and_pool()), hedges=Early(), escalations=Escalations(0.5))
    wake = woken_at(one.arrived(NOW))
    assert launched(one.timer(wake)) == [(1, "edge/b")]
    actions = one.answered(0, wake + 0.01, 0.1)
    assert cancelled(actions) == [1]
    assert launched(actions) == [(2, "pool/main")]


def test_an_escalation_is_not_hedged() -> None:
    one = at_the_edge(machine(fleet_of(edge_a=INT8, pool_main=FP32, pool_other=FP32)))
    actions = one.answered(0, NOW + 0.01, 0.0)
    assert woken_at(actions) == DUE_AT
    assert not [action for action in one.timer(DUE_AT) if isinstance(action, Launch)]


def test_an_unsure_better_answer_is_provisional_in_its_turn_and_may_go_further() -> None:
    best = variant("fp64", compute_s=0.060, quality=1.0)
    one = at_the_edge(machine(fleet_of(edge_a=INT8, pool_main=FP32, pool_best=best)))
    assert launched(one.answered(0, NOW + 0.01, 0.1)) == [(1, "pool/main")]
    assert launched(one.answered(1, NOW + 0.08, 0.2)) == [(2, "pool/best")]
    end = answer(one.failed(2, Unreachable("gone"), NOW + 0.1))
    assert (end.attempt, end.route.reason, end.route.provisional) == (1, "escalated", True)


def test_attempts_that_were_spent_on_failures_leave_none_for_an_escalation() -> None:
    one = machine(fleet_of(edge_a=INT8, edge_b=INT8, edge_c=INT8, pool_main=FP32))
    one.arrived(NOW)
    one.failed(0, Unreachable("gone"), NOW)
    one.failed(1, Unreachable("gone"), NOW)
    end = answer(one.answered(2, NOW + 0.01, 0.0))
    assert (end.route.reason, end.route.provisional) == ("fallback", True)


def test_a_caller_who_leaves_beside_a_provisional_answer_frees_the_better_attempt() -> None:
    one = at_the_edge(machine())
    one.answered(0, NOW + 0.01, 0.0)
    assert cancelled(one.cancelled(NOW + 0.02)) == [1]
    assert one.timer(DUE_AT) == []


def test_a_model_that_is_sure_of_nothing_moves_no_more_than_its_share_of_the_load() -> None:
    fleet, escalations = edge_and_pool(), Escalations(0.5, max_share=0.2)
    ends = []
    for _ in range(1000):
        actions = at_the_edge(machine(fleet, escalations=escalations)).answered(0, NOW + 0.01, 0.0)
        ends.append([action for action in actions if isinstance(action, Answer)])
    escalated = sum(not end for end in ends)
    assert 200 <= escalated <= 230  # a fifth, and the burst


@interpreted_only
def test_escalations_take_nothing_from_hedges() -> None:
    class Purse(DeadlineHedging):
        spent = 0

        def may_hedge(self) -> bool:
            self.spent += 1
            return True

        may_fall_back = may_hedge

    quota = Purse()
    one = RequestMachine(ask(), Placer(edge_and_pool()), hedges=quota, escalations=Escalations(0.5))
    one.arrived(NOW)
    assert launched(one.answered(0, NOW + 0.01, 0.0)) == [(1, "pool/main")]
    assert quota.spent == 0


def test_a_floor_that_the_caller_set_is_only_raised() -> None:
    raised = Escalations(0.5).raised(ask()._replace(min_quality=0.9), INT8)
    assert raised is not None
    assert 0.97 < raised.min_quality < 0.970001


@pytest.mark.parametrize(
    ("budget_s", "reserve_s"), [(0.002, 0.001), (0.02, 0.002), (0.5, 0.010), (1.0, 0.020), (60.0, 0.020)]
)
def test_a_provisional_answer_is_due_a_little_before_the_deadline(budget_s: float, reserve_s: float) -> None:
    assert provisional_due_at(NOW, NOW + budget_s) == pytest.approx(NOW + budget_s - reserve_s)


def test_it_shows_its_threshold_and_purse() -> None:
    assert repr(Escalations(0.25)) == "<Escalations below 0.25, <TokenBudget 30.0 of 30>>"
