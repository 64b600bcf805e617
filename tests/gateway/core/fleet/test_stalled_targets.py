"""A target that accepts requests and gives no answers is left, and used again when it computes."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkRtt, LinkUp
from gateway.core.fleet.target import TargetView
from gateway.core.health.breaker import AttemptVerdict, BreakerState
from gateway.core.health.progress import LEAST_S, MOST_S
from gateway.core.placement.placer import Candidate, estimate
from gateway.core.placement.probing import PATIENCE_S
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import STALLED, PendingAttempt
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, report, variant
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import DeadlineExceeded
from tidegate.types import Accepted

EDGE = "edge/a"


def candidate_on(fleet: Fleet, target_id: str = EDGE) -> Candidate:
    (one,) = [one for one in fleet.offered("minilm", "1") if one.target.id == target_id]
    return estimate(one, 16.0, NOW)


def asked(fleet: Fleet, key: int, at: float, *, promised_s: float | None = 0.01) -> AttemptTelemetry:
    """An attempt at the edge, which accepts it unless `promised_s` is None."""
    attempt = AttemptTelemetry(candidate_on(fleet), key, 16.0, at)
    if promised_s is not None:
        attempt.accepted(at + 0.002, Accepted(0, promised_s))
    return attempt


def looked_at(target: TargetView, from_s: float, to_s: float) -> bool:
    """Whether it is to be used at the end, decided about fifty times a second until then."""
    for look in range(int((to_s - from_s) * 50)):
        target.takes(from_s + look / 50)
    return target.takes(to_s)


@pytest.mark.parametrize("acknowledges", [True, False], ids=["by its own promise", "by what was predicted"])
def test_it_is_taken_out_within_half_a_second_while_its_agent_is_well(acknowledges: bool) -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target = fleet.targets[EDGE]
    for key in range(5):
        asked(fleet, key, NOW, promised_s=0.01 if acknowledges else None)
    if acknowledges:
        fleet.fold(LinkLoad(EDGE, report(0.0, sequence=9)), NOW + 0.3)  # heartbeats go on
    assert looked_at(target, NOW, NOW + 0.15)
    assert not looked_at(target, NOW + 0.15, NOW + 0.5)
    assert "promised answers and gave none" in target.state(NOW + 0.5)[1]
    assert target.degradation.active["stalled"].model == "minilm"


def test_where_most_have_stalled_the_one_that_has_not_is_chosen() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant(compute_s=0.2))
    for key in range(4):
        asked(fleet, key, NOW)
        AttemptTelemetry(candidate_on(fleet, "edge/b"), 10 + key, 16.0, NOW).accepted(NOW + 0.002, Accepted(0, 0.01))
    for look in range(30):
        for target in fleet.targets.values():
            target.takes(NOW + look / 50)
    assert fleet.balance.edges_spared, "as half of the fleet fails"
    decision = UtilityPlacer(fleet).decide(ask(at=NOW + 0.6), NOW + 0.6)
    assert decision.chosen is not None and decision.chosen.target.id == "pool/main"


def test_answers_however_late_are_progress() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target = fleet.targets[EDGE]
    attempts = [asked(fleet, key, NOW) for key in range(30)]
    for place, attempt in enumerate(attempts):
        at = NOW + 0.15 * (place + 1)
        assert looked_at(target, at - 0.15, at), "each is served 150 ms after the one before"
        attempt.answered({"compute": 0.15, "queue": 0.15 * place}, None, at)
    assert target.breaker.state is BreakerState.CLOSED


def test_a_worker_that_is_back_is_tried_at_once_and_a_new_process_has_no_past() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target = fleet.targets[EDGE]
    for key in range(5):
        asked(fleet, key, NOW)
    assert not looked_at(target, NOW, NOW + 0.6)
    assert not target.allows(NOW + 0.61)
    fleet.fold(LinkLoad(EDGE, report(0.0, 10), (offer(variant(), state="loading"),)), NOW + 0.61)
    fleet.fold(LinkLoad(EDGE, report(0.0, 11), (offer(variant()),)), NOW + 0.62)
    assert target.allows(NOW + 0.63), "its probe is due"
    fleet.fold(LinkUp(EDGE, EDGE, 2, (offer(variant()),)), NOW + 0.7)
    assert target.takes(NOW + 0.7)
    assert target.progress.under_way == 0


def test_a_probe_that_is_not_answered_fails_and_one_that_is_closes_it() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target = fleet.targets[EDGE]
    attempts = [asked(fleet, key, NOW) for key in range(5)]
    assert not looked_at(target, NOW, NOW + 0.6)
    for attempt in attempts:
        attempt.cancelled(NOW + 0.6)
    at = target.breaker.retry_at
    asked(fleet, 100, at).failed(DeadlineExceeded("it gave none"), at + 1.0, 0.5)
    assert target.breaker.state is BreakerState.OPEN
    for key in (101, 102):
        at = max(target.breaker.retry_at, at + 1.1)
        asked(fleet, key, at).answered({"compute": 0.01, "queue": 0.0}, None, at + 0.012)
    assert target.breaker.state is BreakerState.CLOSED
    assert looked_at(target, at + 0.1, at + 1.0)


def test_a_server_without_stage_times_is_believed_to_compute_and_its_silence_is_a_stall() -> None:
    fleet = fleet_of(edge_b=variant(), pool_main=VariantOffer("default", "unknown"))
    target = fleet.targets["pool/main"]
    for key in range(60):  # the way there was thought to take longer than the answer took in all
        now = NOW + 0.1 * key
        fleet.fold(LinkRtt("pool/main", 0.05), now)
        AttemptTelemetry(candidate_on(fleet, "pool/main"), key, 16.0, now).answered({}, None, now + 0.04)
    (learned,) = [one.cost for one in fleet.offered("minilm", "1") if one.target is target]
    assert learned.sigma < 1.0
    asked_at = NOW + 10.0
    for key in range(60, 63):
        AttemptTelemetry(candidate_on(fleet, "pool/main"), key, 16.0, asked_at)
    assert looked_at(target, asked_at, asked_at + 0.1)
    assert not looked_at(target, asked_at + 0.1, asked_at + 1.0)


def foreign_fleet(*took_s: float) -> tuple[Fleet, TargetView]:
    """A fleet whose pool is a foreign server that has answered in so many seconds, and what is known of it."""
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=VariantOffer("default", "unknown"))
    for key, one in enumerate(took_s):
        at = NOW - 30.0 + 0.1 * key
        AttemptTelemetry(candidate_on(fleet, "pool/main"), key, 16.0, at).answered({}, None, at + one)
    return fleet, fleet.targets["pool/main"]


def test_a_foreign_server_that_is_silent_for_longer_than_it_ever_was_is_out_though_hedges_answer() -> None:
    fleet, target = foreign_fleet(*[0.05] * 3, *[0.3] * 3, *[0.05] * 20)
    candidate = candidate_on(fleet, "pool/main")
    taken = []
    for number in range(3):  # each is silent for 600 ms, and then an edge answers
        attempt = AttemptTelemetry(candidate, 100 + number, 16.0, NOW + 0.65 * number)
        looked_at(target, NOW + 0.65 * number, NOW + 0.65 * number + 0.6)
        attempt.cancelled(NOW + 0.65 * number + 0.6)
        taken.append(target.takes(NOW + 0.65 * number + 0.6))
    assert (taken[0], taken[-1]) == (True, False), "by 26 answers 0.42 s are usual, and what is beyond adds up"


def test_a_foreign_server_that_answers_quickly_and_hangs_is_out_before_budgets_of_300_ms_are_over() -> None:
    fleet, target = foreign_fleet(*[0.06] * 30)
    attempt = AttemptTelemetry(candidate_on(fleet, "pool/main"), 100, 16.0, NOW)
    assert looked_at(target, NOW, NOW + 0.25)
    assert not looked_at(target, NOW + 0.25, NOW + 0.32)
    attempt.cancelled(NOW + 0.32)
    assert target.degradation.active["stalled"].model == "minilm"
    assert target.state(NOW + 0.32)[0] == "down"


def test_of_few_answers_the_longest_says_little_and_a_silent_server_gets_more_time() -> None:
    for answers, due_s in ((5, 0.9), (20, 0.45), (100, 0.33)):
        fleet, target = foreign_fleet(*[0.3] * answers)
        AttemptTelemetry(candidate_on(fleet, "pool/main"), 1000, 16.0, NOW)
        assert looked_at(target, NOW, NOW + due_s + LEAST_S), answers
        assert not looked_at(target, NOW + due_s + LEAST_S, NOW + due_s + MOST_S + 0.1), answers


def test_losers_of_hedges_add_up_and_callers_with_too_short_budgets_do_not() -> None:
    for silent_s, is_taken in ((0.09, True), (0.3, False)):
        fleet, target = foreign_fleet(*[0.06] * 30)
        for number in range(20):
            at = NOW + 0.1 * number
            attempt = AttemptTelemetry(candidate_on(fleet, "pool/main"), 100 + number, 16.0, at)
            looked_at(target, at, at + silent_s)
            attempt.cancelled(at + silent_s)
            if not target.takes(at + silent_s):
                break
        assert target.takes(at + silent_s) is is_taken


def test_a_foreign_server_with_a_long_tail_is_not_taken_out() -> None:
    chance = Random(7)
    took_s = [0.05 * chance.lognormvariate(0.0, 0.4) * (12.0 if chance.random() < 0.05 else 1.0) for _ in range(400)]
    fleet, target = foreign_fleet(*took_s[:200])
    at = NOW
    for key, one in enumerate(took_s[200:]):  # one at a time: nothing else can answer meanwhile
        attempt = AttemptTelemetry(candidate_on(fleet, "pool/main"), 1000 + key, 16.0, at)
        assert looked_at(target, at, at + one)
        attempt.answered({}, None, at + one)
        at += one + 0.05
    assert max(took_s) > 0.5, "the tail is longer than the floor"
    assert target.breaker.state is BreakerState.CLOSED


def test_what_a_server_held_back_while_it_hung_is_not_learned_as_usual() -> None:
    fleet, target = foreign_fleet(*[0.06] * 30)
    candidate = candidate_on(fleet, "pool/main")
    held = [AttemptTelemetry(candidate, 100 + number, 16.0, NOW) for number in range(8)]
    assert not looked_at(target, NOW, NOW + 3.0)
    for attempt in held:
        attempt.answered({}, None, NOW + 3.0)
    assert candidate.offered.cost.answer_times.p99_s(16.0) == pytest.approx(0.06)


@pytest.mark.parametrize("stalled", [True, False])
def test_who_had_stalled_and_answers_again_is_as_quick_as_ever_and_who_had_failed_starts_slowly(stalled: bool) -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target, at = fleet.targets[EDGE], NOW + 20.0
    if stalled:
        target.breaker.trip("it promised answers and gave none", at, 0.5)
    for _ in range(5):
        target.breaker.record(AttemptVerdict.FAILURE, at, 0.5)
    for number in range(2):
        at += 1.0
        probe = target.breaker.launched(at)
        target.breaker.record(AttemptVerdict.SUCCESS, at + 0.1 * number, 0.5, probe=probe)
    assert target.breaker.state is BreakerState.CLOSED
    target.queue_estimate.launch(1, 0.1, at + 0.2)
    assert target.wait_s(at + 0.2) == pytest.approx(0.1 if stalled else 1.0)


@pytest.mark.parametrize("noticed", ["its heartbeats were missed", "requests were not acknowledged"])
def test_what_could_not_come_over_a_path_that_was_gone_is_not_held_against_its_target(noticed: str) -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target = fleet.targets[EDGE]
    under_way = [asked(fleet, key, NOW) for key in range(3)]
    if noticed == "its heartbeats were missed":
        fleet.fold(LinkDown(EDGE, "silent for 3 heartbeats"), NOW + 0.1)
    else:
        target.path_breaker.trip("three requests were not acknowledged", NOW + 0.1, 0.5)
    for number, attempt in enumerate(under_way):  # their callers have no more time
        attempt.cancelled(NOW + 0.3 + number / 10)
    back_at = NOW + 1.0
    if noticed == "its heartbeats were missed":
        fleet.fold(LinkUp(EDGE, EDGE, 1, (offer(),)), back_at)
    for heard in range(2):
        fleet.fold(LinkRtt(EDGE, 0.002), back_at + heard / 100)
    assert looked_at(target, back_at + 0.02, back_at + 0.2)
    for key in range(10, 15):
        asked(fleet, key, back_at + 0.2)
    assert not looked_at(target, back_at + 0.2, back_at + 0.7), "what it owes from then on is"


@pytest.mark.parametrize("foreign", [True, False], ids=["it promises nothing", "it has not acknowledged"])
def test_a_probe_of_a_stalled_target_is_given_up_when_its_answer_was_due(foreign: bool) -> None:
    fleet, target = foreign_fleet(*[0.05] * 20)
    target.link.acknowledges = not foreign
    placer = UtilityPlacer(fleet)
    for key in range(100, 105):
        AttemptTelemetry(candidate_on(fleet, "pool/main"), key, 16.0, NOW)
    assert not looked_at(target, NOW, NOW + 2.0)
    launched_at = NOW + 2.0
    probe = PendingAttempt(
        estimate(candidate_on(fleet, "pool/main").offered, 16.0, launched_at), launched_at, None, True
    )
    late = launched_at + probe.candidate.finish_s + 2.5 * probe.candidate.margin_s
    request = ask(at=launched_at, budget_s=60.0)

    def hedged(now: float) -> str:
        hedge = ChanceHedging(placer).plan(request, probe, placer.decide(request, now, {"pool/main"}), now)
        return "" if hedge is None else hedge.instead

    assert hedged(launched_at + 0.001) != STALLED, "it has its chance"
    assert (hedged(late) == STALLED) == foreign


def test_a_target_that_stalled_is_probed_within_three_seconds_however_often_it_failed() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    target = fleet.targets[EDGE]
    for key in range(5):
        asked(fleet, key, NOW)
    assert not looked_at(target, NOW, NOW + 0.6)
    for _ in range(8):  # each opening is longer than the one before, up to the cap
        at = target.breaker.retry_at
        probe = target.breaker.launched(at)
        target.breaker.record(AttemptVerdict.FAILURE, at + 0.1, 0.99, probe=probe)
        assert target.breaker.retry_at - (at + 0.1) + PATIENCE_S < 3.0
