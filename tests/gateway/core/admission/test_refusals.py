"""A target that refuses whoever comes: no fault of its health, and yet no place to send the next one."""

from __future__ import annotations

import pytest

from gateway.core.admission.placement_guard import AdmissionGuard
from gateway.core.estimate.shadow_price import ShadowPrice
from gateway.core.fleet.fleet import Fleet
from gateway.core.health.breaker import BreakerState
from gateway.core.placement.placer import Placer
from gateway.core.placement.utility import UtilityPlacer, UtilityWeights
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tidegate.outcome import Overloaded
from tidegate.types import Accepted

PAUSE_S = 0.2
_BUSY_S, BUDGET_S = 0.6, 0.63
LITTLE_BILL = UtilityWeights.weighing(3.0)  # so that the word that is waited for decides, and not what a pool costs
POOL, EDGE = "pool/main", "edge/a"


def fleet_with_a_busy_edge(*, lately: bool = False) -> Fleet:
    """An edge whose queue is longer than a pause of the pool, whose link is known. `lately`: its rent is high."""
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.010))
    queue_estimate = fleet.targets[EDGE].queue_estimate
    queue_estimate.launch(10_000, _BUSY_S, NOW)
    if not lately:
        queue_estimate.congestion = ShadowPrice()  # the rent has come down
    link = fleet.targets[POOL].link
    for number in range(40):
        link.record(0.020, NOW - 1.0 + number / 100)
    return fleet


def place(placer: Placer, now: float) -> str:
    chosen = placer.decide(ask(budget_s=BUDGET_S, at=now), now).chosen
    assert chosen is not None
    return chosen.target.id


def sent(placer: Placer, key: int, now: float) -> AttemptTelemetry:
    """Whatever is decided, this one goes to the pool."""
    decision = placer.decide(ask(budget_s=BUDGET_S, at=now), now, exclude={EDGE})
    assert decision.chosen is not None
    return AttemptTelemetry(decision.chosen, key, 16.0, now)


def refuse(placer: Placer, times: int, now: float) -> None:
    for key in range(times):
        sent(placer, key, now).failed(Overloaded("full", retry_after_s=PAUSE_S), now, 0.5)


@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
def test_nobody_goes_where_two_were_refused_though_the_pause_is_shorter_than_the_queue_elsewhere(
    policy: type[Placer],
) -> None:
    placer = policy(fleet_with_a_busy_edge())
    assert place(placer, NOW) == POOL
    refuse(placer, 2, NOW)
    assert place(placer, NOW + 0.5 * PAUSE_S) == EDGE
    assert placer.fleet.targets[POOL].breaker.state is BreakerState.CLOSED, "a refusal is load, and no failure"
    assert placer.fleet.targets[POOL].state(NOW)[0] == "ready"


def test_one_refusal_may_be_about_the_one_request() -> None:
    placer = UtilityPlacer(fleet_with_a_busy_edge())
    refuse(placer, 1, NOW)
    assert placer.fleet.targets[POOL].trust(NOW + 0.01) == 1.0
    assert place(placer, NOW + 0.5 * PAUSE_S) == POOL


def test_when_the_pause_is_over_one_goes_to_see_and_the_others_wait_for_its_word() -> None:
    placer = UtilityPlacer(fleet_with_a_busy_edge(), LITTLE_BILL)
    refuse(placer, 2, NOW)
    later = NOW + PAUSE_S + 0.001
    assert place(placer, later) == POOL
    scout = sent(placer, 5, later)
    assert place(placer, later + 0.030) == EDGE, "its word may still be under way"
    assert place(placer, later + 0.070) == POOL, "it is not waited for longer than two round trips and a little"
    scout.failed(Overloaded("full", retry_after_s=PAUSE_S), later + 0.040, 0.5)
    assert place(placer, later + 0.070) == EDGE


def test_the_first_that_is_taken_ends_the_doubt() -> None:
    placer = UtilityPlacer(fleet_with_a_busy_edge())
    refuse(placer, 2, NOW)
    later = NOW + PAUSE_S + 0.001
    scout = sent(placer, 5, later)
    assert placer.fleet.targets[POOL].trust(later + 0.02) < 0.5
    scout.accepted(later + 0.02, Accepted(0, 0.01))
    assert placer.fleet.targets[POOL].trust(later + 0.02) == 1.0
    refuse(placer, 1, later + 0.03)
    assert placer.fleet.targets[POOL].trust(later + 0.04) == 1.0, "they are no longer in a row"


def test_where_nobody_else_can_do_it_it_is_asked_all_the_same() -> None:
    placer = UtilityPlacer(fleet_of(pool_main=variant(compute_s=0.010)))
    refuse(placer, 3, NOW)
    assert place(placer, NOW + 0.5 * PAUSE_S) == POOL


def test_whom_rents_keep_from_the_edges_is_not_sent_to_be_refused_but_goes_where_he_would_go_after_that() -> None:
    placer = UtilityPlacer(fleet_with_a_busy_edge(lately=True))
    gate = AdmissionGuard(placer, placer.fleet, admission_of())
    refuse(placer, 2, NOW)
    paused = NOW + 0.5 * PAUSE_S
    assert place(placer, paused) == POOL, "hardly anything is answered there, and the edge is dearer still"
    chosen = gate.decide(ask(budget_s=BUDGET_S, at=paused), paused).chosen
    assert chosen is not None
    assert chosen.target.id == EDGE
    assert chosen.observer is not None
    later = NOW + PAUSE_S + 0.001
    scout = gate.decide(ask(budget_s=BUDGET_S, at=later), later).chosen
    assert scout is not None
    assert scout.target.id == POOL


def test_who_has_nowhere_else_to_go_is_sent_where_he_will_hardly_be_taken() -> None:
    placer = UtilityPlacer(fleet_of(pool_main=variant(compute_s=0.010)))
    refuse(placer, 2, NOW)
    chosen = AdmissionGuard(placer, placer.fleet, admission_of()).decide(ask(at=NOW), NOW).chosen
    assert chosen is not None
    assert chosen.target.id == POOL
