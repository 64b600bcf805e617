"""A request that requires an attested target meets no other: whatever happens to it, and to the evidence meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.attestation import ATTESTATION_OFF, CONNECTION_ENDED, Attestation
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkAttested, LinkDown, LinkUp
from gateway.core.placement.fallback import least_request
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.probing import ProbePlacer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.escalation import Escalations
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy
from gateway.core.request.machine import Action, Launch, RequestMachine
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tidegate.outcome import BadAnswer, NothingAlive, Overloaded, ServeError, Unreachable
from tidegate.types import Accepted

ERRORS = [Unreachable("gone"), BadAnswer("garbage"), Overloaded("full", retry_after_s=0.1)]
EXPIRES_AT = 1_800_000_000.0


def until(instant: float) -> Attestation:
    return Attestation("", instant, "software", "3f9a", EXPIRES_AT)


def attest(fleet: Fleet, target_id: str, attestation: Attestation) -> None:
    fleet.fold(LinkAttested(target_id, attestation), NOW)


def hospital() -> Fleet:
    """Two slow edges, and a pool that is best. Only one edge has evidence."""
    fleet = fleet_of(
        edge_a=variant("int8", compute_s=0.200, quality=0.97),
        edge_b=variant("fp32", compute_s=0.300, quality=1.0),
        pool_main=variant("fp32", compute_s=0.002, quality=1.0),
    )
    attest(fleet, "edge/a", until(NOW + 600.0))
    return fleet


def candidates(decision: Decision) -> set[str]:
    return {one.target.id for one in decision.candidates}


@pytest.mark.parametrize("make", [Placer, UtilityPlacer])
def test_only_attested_targets_are_candidates_where_that_is_required(make: type[Placer]) -> None:
    assert candidates(make(hospital()).decide(ask(attested=True), NOW)) == {"edge/a"}
    assert candidates(make(hospital()).decide(ask(), NOW)) == {"edge/a", "edge/b", "pool/main"}


def test_the_emergency_rule_keeps_the_requirement() -> None:
    chosen = least_request(hospital(), ask(attested=True), NOW).chosen
    assert chosen is not None and chosen.target.id == "edge/a"
    refusal = least_request(hospital(), ask(attested=True), NOW, exclude=["edge/a"]).refusal
    assert isinstance(refusal, NothingAlive)


@pytest.mark.parametrize(("left_s", "budget_s", "served"), [(2.0, 2.0, True), (1.999, 2.0, False), (-1.0, 2.0, False)])
def test_evidence_has_to_count_until_the_deadline(left_s: float, budget_s: float, served: bool) -> None:
    fleet = hospital()
    attest(fleet, "edge/a", until(NOW + left_s))
    assert (Placer(fleet).decide(ask(attested=True, budget_s=budget_s), NOW).chosen is not None) is served


def test_where_nobody_is_attested_the_caller_is_told_so_and_why_of_each_target() -> None:
    fleet = hospital()
    attest(fleet, "edge/a", until(NOW + 1.0))
    attest(fleet, "edge/b", Attestation("key 77 is not allowed"))

    refusal = Placer(fleet).decide(ask(attested=True), NOW).refusal

    assert isinstance(refusal, NothingAlive)
    assert refusal.message.startswith("no target offers minilm version 1 attested for 1 row × 16: ")
    assert "edge/a is not attested: its evidence ends 2027-01-15T08:00:00Z, before the deadline" in refusal.message
    assert "edge/b is not attested: key 77 is not allowed" in refusal.message
    assert f"pool/main is not attested: {ATTESTATION_OFF.why_not}" in refusal.message


def test_evidence_ends_with_its_connection_and_the_next_begins_with_none() -> None:
    fleet = hospital()
    offers = fleet.targets["edge/a"].offers
    fleet.fold(LinkUp("edge/a", "edge/a", 1, offers), NOW)  # nobody said that the one before had ended
    assert fleet.targets["edge/a"].attestation is CONNECTION_ENDED

    attest(fleet, "edge/a", until(NOW + 600.0))
    fleet.fold(LinkDown("edge/a", "cut"), NOW)
    fleet.fold(LinkUp("edge/a", "edge/a", 1, offers), NOW)
    assert Placer(fleet).decide(ask(attested=True), NOW).chosen is None
    assert fleet.targets["edge/a"].attestation is CONNECTION_ENDED


def test_nobody_without_evidence_is_probed_by_such_a_request() -> None:
    fleet = hospital()
    for _ in range(20):
        fleet.targets["pool/main"].breaker.trip("it kept failing", NOW, 0.5)
    placer = ProbePlacer(Placer(fleet), fleet, lambda: 0.0)
    later = NOW + 120.0

    probed = placer.decide(ask(at=later, budget_s=5.0), later)
    assert probed.chosen is not None and probed.chosen.target.id == "pool/main"
    required = placer.decide(ask(at=later, budget_s=5.0, attested=True), later)
    assert required.chosen is not None and required.chosen.target.id == "edge/a"
    last = placer.decide(ask(at=later, budget_s=5.0, attested=True), later, exclude=["edge/a"])
    assert isinstance(last.refusal, NothingAlive)


def test_an_answer_says_the_evidence_in_one_line() -> None:
    assert str(until(NOW)) == "software; key=3f9a; expires=2027-01-15T08:00:00Z"
    assert str(CONNECTION_ENDED) == CONNECTION_ENDED.why_not


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["accepted", "failed", "unsure", "timer", "link", "attested", "revoked"]), st.integers(0, 9)
    ),
    max_size=25,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cheapest", "value"])
@given(budget_s=st.sampled_from([0.01, 0.3, 0.5, 2.0]), events=EVENTS)
def test_under_any_events_nothing_is_launched_where_evidence_does_not_reach_the_deadline(
    policy: str, budget_s: float, events: list[tuple[str, int]]
) -> None:
    fleet = hospital()
    placer = UtilityPlacer(fleet) if policy == "value" else Placer(fleet)
    places = ProbePlacer(placer, fleet, lambda: 0.0)
    hedges: HedgePolicy = ChanceHedging(placer) if isinstance(placer, UtilityPlacer) else DeadlineHedging()
    asked = ask(attested=True, budget_s=budget_s)
    machine = RequestMachine(asked, places, hedges=hedges, escalations=Escalations(0.5))
    now = NOW

    def check(actions: list[Action]) -> None:
        for one in actions:
            if isinstance(one, Launch):
                assert one.candidate.target.attestation.until >= asked.deadline

    check(machine.arrived(now))
    for what, number in events:
        now += number * budget_s / 40.0
        target_id = list(fleet.targets)[number % len(fleet.targets)]
        match what:
            case "accepted":
                check(machine.accepted(number % 3, Accepted(0, number / 50.0), now))
            case "failed":
                check(machine.failed(number % 3, _error(number), now))
            case "unsure":
                check(machine.answered(number % 3, now, confidence=number / 10.0))
            case "timer":
                check(machine.timer(now))
            case "link":
                fleet.fold(LinkUp(target_id, target_id, 1 + number, fleet.targets[target_id].offers), now)
            case "attested":
                attest(fleet, target_id, until(now + number * budget_s / 4.0))
            case _:
                attest(fleet, target_id, Attestation("revoked"))


def _error(number: int) -> ServeError:
    return ERRORS[number % len(ERRORS)]
