"""A pinned request never leaves: no placement, fallback or hedge outside of its pin, whatever happens to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkUp
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy
from gateway.core.request.machine import Action, Launch, RequestMachine
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tidegate.outcome import BadAnswer, NothingAlive, Overloaded, ServeError, Unreachable
from tidegate.placement_pin import INSIDE, PINS, Pin
from tidegate.types import Accepted, LoadReport

ERRORS = [Unreachable("gone"), BadAnswer("garbage"), Overloaded("full", retry_after_s=0.1)]


def campus() -> Fleet:
    """Two devices, a server on the premises, one device that is rented somewhere, and a pool; the pool is best."""
    fleet = fleet_of(
        edge_a=variant("int8", compute_s=0.200, quality=0.97),
        edge_b=variant("fp32", compute_s=0.400, quality=1.0),
        pool_cloud=variant("fp32", compute_s=0.002, quality=1.0),
    )
    for one in (spec("pool/site", zone="site"), spec("edge/rented", zone="cloud")):
        fleet.add(one, NOW)
        fleet.fold(LinkUp(one.id, one.id, 1, (offer(variant("fp32", compute_s=0.020, quality=1.0)),)), NOW)
    return fleet


def chosen(decision: Decision) -> tuple[str, str]:
    assert decision.chosen is not None
    return decision.chosen.target.id, decision.reason


@pytest.mark.parametrize(("pin", "may"), [
    ("edge", {"edge/a", "edge/b"}),
    ("site", {"edge/a", "edge/b", "pool/site"}),
    ("any", {"edge/a", "edge/b", "pool/site", "pool/cloud", "edge/rented"}),
])  # fmt: skip
def test_only_targets_inside_of_the_pin_are_candidates(pin: Pin, may: set[str]) -> None:
    decision = Placer(campus()).decide(ask(pin=pin), NOW)
    assert {one.target.id for one in decision.candidates} == may


def test_a_pinned_answer_says_so_also_when_a_variant_is_demanded() -> None:
    assert chosen(Placer(campus()).decide(ask(pin="edge"), NOW)) == ("edge/a", "pinned")
    assert chosen(Placer(campus()).decide(ask(pin="edge", variant="fp32"), NOW)) == ("edge/b", "pinned")
    assert chosen(UtilityPlacer(campus()).decide(ask(pin="site"), NOW))[1] == "pinned"


def test_a_pin_with_nobody_inside_is_refused_with_each_targets_reason() -> None:
    fleet = fleet_of(edge_a=variant(), pool_main=variant())
    fleet.fold(LinkDown("edge/a", "it left"), NOW + 1.0)

    refusal = Placer(fleet).decide(ask(pin="edge"), NOW + 3.0).refusal

    assert isinstance(refusal, NothingAlive)
    assert "pinned to edge" in refusal.message
    assert "edge/a is down since 2.0 s: it left" in refusal.message
    assert "pool/main is outside of the pin, in zone cloud" in refusal.message


def test_a_quality_floor_leaves_out_what_is_worse_and_what_nobody_measured() -> None:
    fleet = fleet_of(edge_a=variant("int8", quality=0.97), edge_b=variant("int8"), pool_main=variant(quality=1.0))

    decision = Placer(fleet).decide(ask(min_quality=0.98), NOW)
    assert [one.target.id for one in decision.candidates] == ["pool/main"]

    refusal = Placer(fleet).decide(ask(min_quality=0.98, pin="edge"), NOW).refusal
    assert refusal is not None
    assert "of quality 0.98 pinned to edge" in refusal.message
    assert "edge/a has int8 of quality 0.97; edge/b has int8 of unknown quality" in refusal.message


def test_in_a_fleet_that_is_too_large_to_look_at_all_a_pin_finds_the_few_inside() -> None:
    fleet = fleet_of(**{f"edge_{number}": variant("int8", quality=0.97) for number in range(200)})
    for number in range(50):
        rented = spec(f"edge/rented-{number}", zone="cloud")
        fleet.add(rented, NOW)
        fleet.fold(LinkUp(rented.id, rented.id, 1, (offer(variant("fp32", quality=1.0)),)), NOW)
    site = spec("pool/site", zone="site")
    fleet.add(site, NOW)
    fleet.fold(LinkUp(site.id, site.id, 1, (offer(variant("fp32", compute_s=0.1, quality=1.0)),)), NOW)

    for placer in (Placer(fleet), UtilityPlacer(fleet)):
        for _ in range(20):
            assert chosen(placer.decide(ask(pin="site", min_quality=0.98), NOW)) == ("pool/site", "pinned")
            assert chosen(placer.decide(ask(pin="edge"), NOW))[0].startswith("edge/")
            assert placer.decide(ask(pin="edge", min_quality=0.98), NOW).chosen is None


# Whatever may happen to a request under way. The number says to whom, or how much later.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["accepted", "failed", "timer", "link down", "link up", "load"]), st.integers(0, 9)),
    max_size=25,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cheapest", "value"])
@given(
    pin=st.sampled_from(PINS),
    floor=st.sampled_from([0.0, 0.97, 0.98]),
    budget_s=st.sampled_from([0.01, 0.3, 0.5, 2.0]),
    events=EVENTS,
)
def test_under_any_events_nothing_is_launched_outside_of_the_pin_or_below_the_floor(
    policy: str, pin: Pin, floor: float, budget_s: float, events: list[tuple[str, int]]
) -> None:
    fleet = campus()
    places = UtilityPlacer(fleet) if policy == "value" else Placer(fleet)
    hedges: HedgePolicy = ChanceHedging(places) if isinstance(places, UtilityPlacer) else DeadlineHedging()
    asked = ask(pin=pin, min_quality=floor, budget_s=budget_s)
    machine = RequestMachine(asked, places, hedges=hedges)
    now = NOW

    def check(actions: list[Action]) -> None:
        for one in actions:
            if isinstance(one, Launch):
                assert one.candidate.target.spec.lies_in in INSIDE[pin]
                assert (one.candidate.variant.quality or 0.0) >= floor

    check(machine.arrived(now))
    for what, number in events:
        now += number * budget_s / 40.0
        target_id = list(fleet.targets)[number % len(fleet.targets)]
        if what == "accepted":
            check(machine.accepted(number % 3, Accepted(0, number / 50.0), now))
        elif what == "failed":
            check(machine.failed(number % 3, _error(number), now))
        elif what == "timer":
            check(machine.timer(now))
        elif what == "link down":
            fleet.fold(LinkDown(target_id, "gone"), now)
        elif what == "link up":
            offers = fleet.targets[target_id].offers
            fleet.fold(LinkUp(target_id, target_id, 1 + number, offers), now)
        else:
            fleet.fold(LinkLoad(target_id, LoadReport(1, number, number, 1, number / 10.0)), now)


def _error(number: int) -> ServeError:
    return ERRORS[number % len(ERRORS)]
