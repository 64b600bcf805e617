"""A target that offers a model which is not in its memory: placed elsewhere, or there knowingly."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkLoad
from gateway.core.placement.placer import Placer, estimate
from gateway.core.placement.utility import UtilityPlacer
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, report, variant
from tidegate.outcome import DeadlineExceeded, NothingAlive


def cold(fleet: Fleet, target: str, cold_s: float) -> None:
    """The target says that its model would take so long to come into memory."""
    there = fleet.targets[target].offers
    told = tuple(replace(one, state="evicted", cold_s=cold_s) for one in there)
    fleet.fold(LinkLoad(target, report(0.0), told), NOW)


def test_a_cold_start_is_in_the_prediction() -> None:
    fleet = fleet_of(pool_a=variant(), pool_b=variant())
    cold(fleet, "pool/b", 3.0)
    found = {one.target.id: estimate(one, 1.0, NOW) for one in fleet.offered("minilm", "1")}
    assert found["pool/b"].wait_s - found["pool/a"].wait_s == pytest.approx(3.0)
    assert found["pool/b"].finish_s - found["pool/a"].finish_s == pytest.approx(3.0)


def test_a_cold_target_is_avoided_while_a_warm_one_is_there() -> None:
    for placer in (Placer, UtilityPlacer):
        fleet = fleet_of(pool_a=variant(), pool_b=variant())
        cold(fleet, "pool/a", 0.5)
        decision = placer(fleet).decide(ask(budget_s=2.0), NOW)
        assert decision.chosen is not None and decision.chosen.target.id == "pool/b"


def test_a_request_with_time_waits_for_the_only_target_knowingly() -> None:
    fleet = fleet_of(pool_a=variant())
    cold(fleet, "pool/a", 3.0)
    decision = Placer(fleet).decide(ask(budget_s=30.0), NOW)
    assert decision.chosen is not None
    assert decision.chosen.finish_s > 3.0


def test_a_target_that_says_nothing_of_a_cold_start_is_not_asked() -> None:
    fleet = fleet_of(pool_a=variant())
    cold(fleet, "pool/a", 0.0)
    refusal = Placer(fleet).decide(ask(), NOW).refusal
    assert isinstance(refusal, NothingAlive | DeadlineExceeded)
    assert "it in state evicted" in refusal.message


def test_an_offer_in_memory_answers_and_one_that_never_comes_does_not() -> None:
    here = offer(variant())
    assert here.answers
    assert replace(here, state="evicted", cold_s=1.0).answers
    assert replace(here, state="loading", cold_s=1.0).answers
    assert not replace(here, state="loading").answers
