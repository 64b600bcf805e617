"""Targets in reserve: asked only where the others cannot make it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkUp
from gateway.core.placement.placer import Decision, Placer
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tidegate.types import LoadReport


@pytest.fixture
def fleet() -> Fleet:
    """An edge, a pool, and a pool in reserve that is faster than both."""
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.050))
    fleet.add(replace(spec("pool/spare"), standby=True), NOW)
    fleet.fold(LinkUp("pool/spare", "pool/spare", 1, (offer(variant(compute_s=0.001)),)), NOW)
    return fleet


def decide(fleet: Fleet, *, exclude: tuple[str, ...] = (), variant: str = "", budget_s: float = 2.0) -> Decision:
    return Placer(fleet).decide(ask(budget_s=budget_s, variant=variant), NOW, exclude)


def chosen(decision: Decision) -> tuple[str, str]:
    assert decision.chosen is not None
    return decision.chosen.target.id, decision.reason


def test_it_gets_nothing_while_another_makes_it(fleet: Fleet) -> None:
    decision = decide(fleet)
    assert chosen(decision) == ("edge/a", "cheapest")
    other = decision.best_other()
    assert other is not None and other.target.id == "pool/main", "nor is it hedged with"
    assert {one.target.id for one in decision.considered} == {"edge/a", "pool/main", "pool/spare"}


def test_it_is_asked_when_no_other_is_sure_to_make_it(fleet: Fleet) -> None:
    fleet.fold(LinkLoad("pool/main", LoadReport(1, 1, 90, 8, 5.0)), NOW)
    assert chosen(decide(fleet, budget_s=0.090)) == ("pool/spare", "reserve")


def test_it_is_asked_when_the_others_are_out_or_were_tried(fleet: Fleet) -> None:
    assert chosen(decide(fleet, exclude=("edge/a", "pool/main"))) == ("pool/spare", "reserve")
    for target in ("edge/a", "pool/main"):
        fleet.fold(LinkDown(target, "gone", in_order=True), NOW)
    assert chosen(decide(fleet)) == ("pool/spare", "reserve")


def test_it_is_asked_for_what_only_it_has(fleet: Fleet) -> None:
    fleet.fold(LinkUp("pool/spare", "pool/spare", 2, (offer(variant("bf16")),)), NOW)
    assert chosen(decide(fleet, variant="bf16")) == ("pool/spare", "demanded")


def test_a_fleet_forgets_a_reserve_that_is_removed(fleet: Fleet) -> None:
    assert fleet.has_reserve
    fleet.remove("pool/spare")
    assert not fleet.has_reserve
