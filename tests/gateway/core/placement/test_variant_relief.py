"""A pool that lessens its precision for a while: whom its variants answer, and what the answer says."""

from __future__ import annotations

import msgspec
import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkLoad, LinkUp
from gateway.core.placement.fallback import least_request
from gateway.core.placement.placer import Decision, Placer
from gateway.core.request.machine import Answer, RequestMachine
from tests.support.gateway.fleets import NOW, ask, offer, spec, variant
from tidegate.fleet.offers import ModelOffer, Standing
from tidegate.types import LoadReport


def offered(full: Standing, lesser: Standing, *, lesser_takes: int | None = None) -> ModelOffer:
    """fp32 of quality 1, and bf16, which is quicker."""
    fp32 = msgspec.structs.replace(variant("fp32", compute_s=0.050, quality=1.0), standing=full)
    bf16 = variant("bf16", compute_s=0.010, quality=0.99, max_tokens=lesser_takes)
    return offer(fp32, msgspec.structs.replace(bf16, standing=lesser))


def fleet_with(offers: ModelOffer) -> Fleet:
    fleet = Fleet(lambda model, version: "tokens")
    fleet.add(spec("pool/main"), NOW)
    fleet.fold(LinkUp("pool/main", "pool/main", 1, (offers,)), NOW)
    return fleet


def chosen(decision: Decision) -> str:
    assert decision.chosen is not None
    return decision.chosen.variant.name


AT_EASE, DEGRADED = offered("", "spare"), offered("relieved", "relief")


@pytest.mark.parametrize(
    ("offers", "demanded", "min_quality", "answers"),
    [
        (AT_EASE, "", 0.0, "fp32"),
        (AT_EASE, "", 0.9, "fp32"),
        (AT_EASE, "bf16", 0.0, "bf16"),
        (DEGRADED, "", 0.0, "bf16"),
        (DEGRADED, "", 0.995, "fp32"),
        (DEGRADED, "fp32", 0.0, "fp32"),
        (DEGRADED, "bf16", 0.0, "bf16"),
        (offered("", ""), "", 0.0, "bf16"),  # one that may always be used
    ],
)
def test_who_is_answered_in_which_precision(
    offers: ModelOffer, demanded: str, min_quality: float, answers: str
) -> None:
    asked = ask(variant=demanded, min_quality=min_quality)
    fleet = fleet_with(offers)
    assert chosen(Placer(fleet).decide(asked, NOW)) == answers
    assert chosen(least_request(fleet, asked, NOW)) in (answers, "fp32" if offers == offered("", "") else answers)


def test_what_the_lesser_one_does_not_take_the_full_one_answers_all_the_same() -> None:
    fleet = fleet_with(offered("relieved", "relief", lesser_takes=8))
    assert chosen(Placer(fleet).decide(ask(longest_row=16), NOW)) == "fp32"


def test_a_change_of_standing_comes_with_the_load_and_goes_with_it() -> None:
    fleet = fleet_with(AT_EASE)
    for offers, answers in ((DEGRADED, "bf16"), (AT_EASE, "fp32")):
        fleet.fold(LinkLoad("pool/main", LoadReport(1, 1, 0, 0, 0.0), (offers,)), NOW)
        assert chosen(Placer(fleet).decide(ask(), NOW)) == answers


@pytest.mark.parametrize(
    ("offers", "demanded", "degraded"),
    [(DEGRADED, "", True), (DEGRADED, "bf16", False), (DEGRADED, "fp32", False), (AT_EASE, "", False)],
)
def test_the_answer_says_that_it_is_degraded_unless_it_is_what_was_demanded(
    offers: ModelOffer, demanded: str, degraded: bool
) -> None:
    machine = RequestMachine(ask(variant=demanded), Placer(fleet_with(offers)))
    machine.arrived(NOW)
    (answer, *_) = machine.answered(0, NOW + 0.01)
    assert isinstance(answer, Answer)
    assert answer.route.degraded is degraded
