"""Every choice of a target follows one predicate, `ineligible`, over random fleets and requests.

Placement's loop spells the rules out for speed; the fallback placer, probes, refusals' reasons and decision records use
parts of the predicate. `_plainly` below states the rules a second time, as docs/placement.md does.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.estimate.calibration import Calibration
from gateway.core.fleet.attestation import ATTESTATION_OFF, Attestation
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkAttested, LinkUp
from gateway.core.fleet.offer_index import Offer
from gateway.core.fleet.target import TargetView
from gateway.core.fleet.variant_rank import deferred_to
from gateway.core.history.decision_record import pack_decision
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import Ineligibility, UsableTest, ineligible
from gateway.core.placement.fallback import least_request
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.probing import ProbePlacer
from gateway.core.placement.utility import UtilityPlacer, UtilityWeights
from tests.support.gateway.fleets import NOW, ask, spec
from tests.support.gateway.plain_placement import plain_candidates
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.outcome import NothingAlive
from tidegate.placement_pin import PINS, Zone

seeds = st.integers(0, 2**32)
ZONES: tuple[Zone | None, ...] = (None, None, "edge", "site", "cloud")
Key = tuple[str, str]  # target, variant


def random_fleet(draw: Random) -> Fleet:
    """One to eight targets in different zones and states, each with up to three variants."""
    fleet = Fleet(lambda _model, _version: "tokens", draw=draw.random)
    for number in range(draw.randrange(1, 9)):
        id = f"{draw.choice(('edge', 'pool'))}/{number}"
        fleet.add(spec(id, zone=draw.choice(ZONES)), NOW - 100.0)
        names = draw.sample(("int8", "fp16", "fp32"), draw.randrange(1, 4))
        state = draw.choice(("ready", "ready", "ready", "soaking", "loading"))
        if draw.random() < 0.9:
            offers = (ModelOffer("minilm", "1", tuple(random_variant(name, draw) for name in names), state),)
            fleet.fold(LinkUp(id, id, 1, offers), NOW - 100.0)
        evidence = draw.choice((ATTESTATION_OFF, Attestation("revoked"), Attestation("", NOW + 4.0 * draw.random())))
        fleet.fold(LinkAttested(id, evidence), NOW - 99.0)
        for breaker in (fleet.targets[id].breaker, fleet.targets[id].path_breaker):
            if draw.random() < 0.2:
                breaker.trip("for the test", NOW - 2.0 * draw.random(), draw.random())
    return fleet


def random_variant(name: str, draw: Random) -> VariantOffer:
    return VariantOffer(
        name,
        name,
        ((1.0, 0.001 + 0.02 * draw.random()),),
        max_batch=draw.choice((None, None, 4)),
        max_tokens=draw.choice((None, None, 128)),
        quality=draw.choice((None, 0.9, 0.97, 1.0)),
        standing=draw.choice(("", "", "relief", "spare", "demanded")),
        schemas=draw.random() < 0.7,
    )


def random_ask(draw: Random) -> Ask:
    asked = ask(
        budget_s=0.1 + 3.0 * draw.random(),
        rows=draw.choice((1, 1, 8)),
        longest_row=draw.choice((16, 16, 200)),
        variant=draw.choice(("", "", "", "int8", "fp32")),
        min_quality=draw.choice((0.0, 0.0, 0.95)),
        pin=draw.choice(PINS),
        attested=draw.random() < 0.4,
    )
    return asked._replace(priority=draw.randrange(5), schema=draw.random() < 0.2)


def _plainly(one: Offer, asked: Ask, *, deferred: bool) -> bool:
    """The rules about promises and variants, one after the other."""
    within = {"edge": ("edge",), "edge-input": ("edge",), "site": ("edge", "site"), "any": ("edge", "site", "cloud")}
    allowed = within[asked.pin]
    variant = one.variant
    return all(
        (
            one.zone in allowed,
            not asked.attested or one.target.attestation.until >= asked.deadline,
            variant.max_batch is None or asked.rows <= variant.max_batch,
            variant.max_tokens is None or asked.longest_row <= variant.max_tokens,
            asked.variant in ("", variant.name, variant.precision),
            asked.min_quality == 0.0 or (variant.quality is not None and variant.quality >= asked.min_quality),
            variant.schemas or not asked.schema,
            deferred or not deferred_to(variant, asked.variant, asked.min_quality),
        )
    )


def always(target: TargetView, now: float) -> bool:
    return True


def by_breakers(target: TargetView, now: float) -> bool:
    return not target.ejected or (target.breaker.allows(now) and target.path_breaker.allows(now))


def on_trial(target: TargetView, now: float) -> bool:
    return target.ejected and target.breaker.allows(now)


def eligible(
    fleet: Fleet, asked: Ask, usable: UsableTest = TargetView.takes, *, deferred: bool = True
) -> dict[Key, Offer]:
    """By `ineligible`: the offers that may take the request; deferred ones where there is no other, if they may."""
    for allow in (False, True) if deferred else (False,):
        found = {
            (one.target.id, one.variant.name): one
            for one in fleet.offered("minilm", "1")
            if ineligible(one.target, one.variant, asked, NOW, usable=usable, deferred=allow) is None
        }
        if found:
            return found
    return {}


def keys(decision: Decision) -> set[Key]:
    return {(one.target.id, one.variant.name) for one in decision.candidates}


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_the_predicate_says_what_the_rules_say(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    for one in fleet.offered("minilm", "1"):
        for deferred in (False, True):
            why = ineligible(one.target, one.variant, asked, NOW, usable=always, deferred=deferred)
            assert (why is None) is _plainly(one, asked, deferred=deferred)
            unusable = ineligible(one.target, one.variant, asked, NOW, usable=lambda *_: False, deferred=deferred)
            assert unusable is not None


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
@given(seed=seeds)
@settings(max_examples=200)
def test_candidates_are_the_eligible_offers(policy: type[Placer], seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    expected = eligible(fleet, asked)

    decision = policy(fleet).decide(asked, NOW)

    assert keys(decision) == expected.keys()
    assert isinstance(decision.refusal, NothingAlive) is not expected


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_candidates_exclude_targets_that_were_tried(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    tried = draw.sample(sorted(fleet.targets), draw.randrange(len(fleet.targets)))
    usable = lambda target, now: target.id not in tried and target.takes(now)  # noqa: E731
    assert keys(Placer(fleet).decide(asked, NOW, tried)) == eligible(fleet, asked, usable).keys()


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_the_fallback_placer_chooses_among_the_eligible_by_the_breakers(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    expected = eligible(fleet, asked, by_breakers)

    decision = least_request(fleet, asked, NOW)

    assert (decision.chosen is None) is not expected
    assert keys(decision) <= expected.keys()
    if decision.chosen is not None:  # all are idle here, so the least measured time wins
        assert decision.chosen.compute_s == min(one.variant.cost[0][1] for one in expected.values())


class _Refusing:
    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        return Decision(now, ask, (), None, "", NothingAlive("for the test"))


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_a_probe_of_last_resort_goes_to_an_eligible_target_on_trial(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    expected = eligible(fleet, asked, on_trial, deferred=False)

    decision = ProbePlacer(_Refusing(), fleet, lambda: 0.0).decide(asked, NOW)

    assert (decision.chosen is None) is not expected
    if decision.chosen is not None:
        assert (decision.chosen.target.id, decision.chosen.variant.name) in expected


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_no_probe_breaks_a_promise_or_takes_work_that_does_not_fit(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)

    decision = ProbePlacer(Placer(fleet), fleet, lambda: 0.0).decide(asked, NOW)

    if decision.chosen is not None:
        chosen = decision.chosen
        assert ineligible(chosen.target, chosen.variant, asked, NOW, usable=always, deferred=True) is None


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_a_refusal_tells_each_target_the_rule_that_leaves_it_out(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    refusal = Placer(fleet).decide(asked, NOW).refusal
    if not isinstance(refusal, NothingAlive):
        return
    told = refusal.message.split(": ", 1)[1]
    for target in fleet.targets.values():
        reasons = [
            ineligible(target, one, asked, NOW, deferred=True) for model in target.offers for one in model.variants
        ]
        assert None not in reasons or not target.up or target.offers[0].state not in ("ready", "soaking")
        rules = {one.rule for one in reasons if one is not None}
        outside = f"{target.id} is outside of the pin, in zone {target.spec.lies_in}" in told
        unattested = f"{target.id} is not attested: " in told
        if reasons:
            assert outside is ("pin" in rules)
        assert not unattested or "attestation" in rules
        if _is_ready(target) and rules == {"attestation"}:
            assert unattested
        if _is_ready(target) and rules == {"variant"}:
            assert f"{target.id} has " in told or f"{target.id} takes " in told


def _is_ready(target: TargetView) -> bool:
    return target.state(NOW)[0] != "down" and all(one.state == "ready" for one in target.offers)


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_a_decision_record_names_the_rule_that_left_an_offer_out(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    decision = Placer(fleet).decide(asked, NOW)
    kept = pack_decision(decision)
    assert kept is not None
    offers = {(one.target.id, one.variant.name): one for one in fleet.offered("minilm", "1")}
    for target, name, why_not in kept.passed_over:
        one = offers[target, name]
        reason = ineligible(one.target, one.variant, asked, NOW, usable=always)
        assert why_not == ("it kept failing, or was left out of the draw" if reason is None else reason.why)
        assert reason is not None or one.target.ejected


@pytest.mark.slow
@given(seeds)
def test_plain_placement_knows_the_same_candidates(seed: int) -> None:
    draw = Random(seed)
    fleet, asked = random_fleet(draw), random_ask(draw)
    offers = fleet.offered("minilm", "1")
    plain = plain_candidates(offers, asked, UtilityWeights(), Calibration().curve, NOW)
    found = {(one.offered.target.id, one.offered.variant.name) for one in plain}
    assert found == eligible(fleet, asked, deferred=False).keys()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (ask(pin="edge"), Ineligibility("pin", "outside of the pin edge, in zone cloud")),
        (ask(attested=True), "attestation"),
        (ask(rows=5), Ineligibility("variant", "takes at most 4 rows")),
        (ask(), Ineligibility("deferred", "int8 stands aside there just now (spare)")),
        (ask(variant="int8"), None),
    ],
)
def test_the_reason_names_its_rule(asked: Ask, expected: Ineligibility | str | None) -> None:
    fleet = Fleet(lambda _model, _version: "tokens")
    target = fleet.add(spec("pool/main"), NOW)
    one = VariantOffer("int8", "int8", ((1.0, 0.01),), max_batch=4, max_tokens=None, standing="spare")
    reason = ineligible(target, one, asked, NOW)
    assert expected == (reason.rule if reason is not None and isinstance(expected, str) else reason)
