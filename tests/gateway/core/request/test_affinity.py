"""Steps of a sequence go to the target that remembers it, under the same rules and for the same price as all else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import TenantSpec
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Decision
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.affinity import Affinity
from gateway.placement_stack import placement_of
from gateway.serving.own_places import OwnPlaces
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, ask, offer, spec, variant
from tidegate.oip.sequence import SequenceStep
from tidegate.outcome import NothingAlive, Overloaded, Unreachable


def fleet_with(count: int, *, tier: str = "edge", standby: int | None = None) -> Fleet:
    fleet = Fleet(lambda _model, _version: "items")
    for number in range(count):
        id = f"{tier}/{number}"
        fleet.add(replace(spec(id), standby=number == standby), NOW - 100.0)
        fleet.fold(LinkUp(id, id, 1, (offer(variant(compute_s=0.01)),)), NOW - 100.0)
    return fleet


def stack_over(fleet: Fleet, admission: Admission) -> Placement:
    return placement_of(UtilityPlacer(fleet), fleet, admission, random.Random(1).random, admission.overloaded)


def step_at(home: str, placement: Placement, *, tenant: str = "") -> Decision:
    """Where a step goes whose sequence `home` remembers."""
    affinity = Affinity()
    affinity.answered("minilm", SequenceStep(7, True, False), home, NOW + 60.0)
    sticky = affinity.placement("minilm", SequenceStep(7, False, False), placement, NOW)
    return sticky.decide(ask(budget_s=1.0)._replace(tenant=tenant), NOW)


def test_in_a_large_fleet_each_step_finds_its_home() -> None:
    fleet = fleet_with(100)
    placement = stack_over(fleet, admission_of())
    for number in range(100):
        decision = step_at(f"edge/{number}", placement)
        assert decision.chosen is not None and decision.chosen.target.id == f"edge/{number}"
        assert (decision.reason, len(decision.candidates)) == ("bound", 1)


def test_a_home_in_reserve_is_asked_though_others_would_do() -> None:
    decision = step_at("pool/2", stack_over(fleet_with(3, tier="pool", standby=2), admission_of()))
    assert decision.chosen is not None and decision.chosen.target.id == "pool/2"


def test_steps_are_charged_and_refused_as_other_requests_are() -> None:
    admission = admission_of(acme=TenantSpec(pool_s_per_s=0.001, burst_s=0.02))
    placement = stack_over(fleet_with(2, tier="pool"), admission)
    placed = 0
    while (decision := step_at("pool/0", placement, tenant="acme")).chosen is not None:
        assert decision.chosen.observer is not None
        decision.chosen.observer.launched(NOW)
        placed += 1
        assert placed < 100
    assert 35 <= placed <= 40, "each is charged its part of a full batch"
    assert isinstance(decision.refusal, Overloaded) and "over-budget" in decision.refusal.message


def test_a_home_that_is_gone_is_named_with_the_way_out() -> None:
    fleet = fleet_with(3)
    fleet.targets["edge/1"].breaker.trip("for the test", NOW, 0.5)
    placement = stack_over(fleet, admission_of())
    for home in ("edge/1", "edge/gone"):
        refusal = step_at(home, placement).refusal
        assert isinstance(refusal, NothingAlive) and f"{home} remembers this sequence" in refusal.message


def test_a_step_that_was_refused_before_it_was_sent_may_be_looked_at_again() -> None:
    fleet = fleet_with(3)
    affinity = Affinity()
    affinity.answered("minilm", SequenceStep(7, True, False), "edge/1", NOW + 60.0)
    sticky = affinity.placement("minilm", SequenceStep(7, False, False), stack_over(fleet, admission_of()), NOW)
    fleet.fold(LinkDown("edge/1", "gone"), NOW)
    assert isinstance(sticky.decide(ask(budget_s=1.0), NOW).refusal, NothingAlive)
    fleet.fold(LinkUp("edge/1", "edge/1", 1, (offer(variant(compute_s=0.01)),)), NOW)
    decision = sticky.decide(ask(budget_s=1.0), NOW + 0.01)
    assert decision.chosen is not None and decision.chosen.target.id == "edge/1"
    assert isinstance(sticky.decide(ask(budget_s=1.0), NOW + 0.02).refusal, Unreachable), "it is sent once"


@pytest.mark.parametrize("through_own_places", [False, True])
def test_what_comes_from_upstream_probes_ejected_targets_and_is_judged_by_admission(through_own_places: bool) -> None:
    fleet = fleet_with(3)
    fleet.targets["edge/1"].breaker.trip("for the test", NOW - 60.0, 0.5)
    admission = admission_of()
    placement = stack_over(fleet, admission)
    seen: list[float] = []
    admission.placed = lambda wait_s, strain, loss: seen.append(loss)  # type: ignore[method-assign]
    if through_own_places:
        placement = OwnPlaces(placement, {"edge/0"})
    decision = placement.decide(ask(budget_s=1.0), NOW)
    assert decision.chosen is not None and (decision.chosen.target.id, decision.reason) == ("edge/1", "probe")
    assert len(seen) == 1


def test_what_is_left_out_is_never_a_probe_nor_an_own_place() -> None:
    fleet = fleet_with(3)
    fleet.targets["edge/0"].breaker.trip("for the test", NOW - 60.0, 0.5)
    placement = OwnPlaces(stack_over(fleet, admission_of()), {"edge/0", "edge/1"})
    for _ in range(20):
        decision = placement.decide(ask(budget_s=1.0), NOW)
        assert decision.chosen is not None and decision.chosen.target.id == "edge/2"
    refusal = OwnPlaces(placement, set(fleet.targets)).decide(ask(budget_s=1.0), NOW).refusal
    assert isinstance(refusal, NothingAlive) and "edge/1 is not for this request" in refusal.message
