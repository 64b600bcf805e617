"""Probes: who is on trial is asked again, who was forgotten is remembered, and nobody pays for it who cannot."""

from __future__ import annotations

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.health.breaker import AttemptVerdict
from gateway.core.history.decision_record import pack_decision
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.probing import GAP_S, LONG_S, PATIENCE_S, RECHECK_S, SHARE, ProbePlacer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.fleets import NOW, ask, fleet_of, report, variant
from tidegate.outcome import BadAnswer, NothingAlive

LOW, HIGH = 3, 1


def never() -> float:
    return 0.999


def always() -> float:
    return 0.0


def broken(fleet: Fleet, target_id: str, at: float = NOW) -> None:
    for _ in range(5):
        fleet.targets[target_id].breaker.record(AttemptVerdict.FAILURE, at, 0.5)


def three() -> Fleet:
    return fleet_of(
        edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.020), pool_main=variant(compute_s=0.030)
    )


def placed(fleet: Fleet, one: Ask, now: float, draw: float = 0.999, exclude: tuple[str, ...] = ()) -> Decision:
    placer = ProbePlacer(Placer(fleet), fleet, lambda: draw)
    return placer.decide(one, now, exclude)


def where(decision: Decision) -> tuple[str, str]:
    assert decision.chosen is not None
    return decision.chosen.target.id, decision.reason


def prioritized(priority: int, *, at: float, budget_s: float = 2.0) -> Ask:
    return ask(at=at, budget_s=budget_s)._replace(priority=priority)


@pytest.mark.parametrize(
    ("priority", "after_s", "expected"),
    [
        (LOW, 0.49, ("edge/b", "cheapest")),  # its breaker is not due
        (LOW, 0.51, ("edge/a", "probe")),
        (HIGH, 0.51, ("edge/b", "cheapest")),  # waits for one that matters less
        (HIGH, 0.51 + PATIENCE_S, ("edge/a", "probe")),  # none came
    ],
)
def test_a_target_on_trial_gets_a_request_that_can_bear_it(
    priority: int, after_s: float, expected: tuple[str, str]
) -> None:
    fleet = three()
    broken(fleet, "edge/a")
    now = NOW + after_s
    decision = placed(fleet, prioritized(priority, at=now), now)
    assert where(decision) == expected
    assert {one.target.id for one in decision.candidates} >= {"edge/b", "pool/main"}, "others stay for the fallback"


def test_what_is_placed_anew_is_nobodys_trial() -> None:
    fleet = three()
    broken(fleet, "edge/a")
    now = NOW + 0.51
    assert where(placed(fleet, prioritized(LOW, at=now)._replace(again=True), now)) == ("edge/b", "cheapest")


@pytest.mark.parametrize("queued_s", [0.0, 0.45])
def test_a_request_that_would_hardly_be_answered_elsewhere_is_the_trial_at_once(queued_s: float) -> None:
    fleet = fleet_of(edge_a=variant(compute_s=0.010), edge_b=variant(compute_s=0.020))
    fleet.targets["edge/b"].queue_estimate.report(report(queued_s), "link", NOW + 0.51)
    broken(fleet, "edge/a")
    now = NOW + 0.51
    placer = ProbePlacer(UtilityPlacer(fleet), fleet, never)
    decision = placer.decide(prioritized(HIGH, at=now, budget_s=0.4), now)
    assert where(decision)[0] == ("edge/a" if queued_s else "edge/b")
    assert (decision.reason == "probe") == bool(queued_s)


def test_what_was_judged_goes_with_the_candidates_one_by_one_also_where_a_probe_is_added() -> None:
    fleet = three()
    broken(fleet, "edge/a")
    placer = ProbePlacer(UtilityPlacer(fleet), fleet, lambda: 0.999)
    now = NOW + 0.51
    decision = placer.decide(prioritized(LOW, at=now), now)
    assert where(decision) == ("edge/a", "probe")
    assert len(decision.judged) == len(decision.candidates)
    kept = pack_decision(decision)
    assert kept is not None, "a probe is remembered as any other request"


def test_one_probe_at_a_time() -> None:
    fleet = three()
    broken(fleet, "edge/a")
    now = NOW + 1.0
    decision = placed(fleet, prioritized(LOW, at=now), now)
    assert decision.chosen is not None and decision.chosen.target.id == "edge/a"
    probe = AttemptTelemetry(decision.chosen, 1, 16.0, now)
    assert where(placed(fleet, prioritized(LOW, at=now), now))[0] == "edge/b"

    probe.failed(BadAnswer("still broken"), now, 0.5)
    assert where(placed(fleet, prioritized(LOW, at=now + 0.5), now + 0.5))[0] == "edge/b"
    assert where(placed(fleet, prioritized(LOW, at=now + 1.1), now + 1.1))[0] == "edge/a"


def test_a_request_without_time_for_a_second_try_is_no_probe() -> None:
    fleet = three()
    broken(fleet, "edge/a")
    now = NOW + 1.0
    assert where(placed(fleet, prioritized(LOW, at=now, budget_s=0.036), now))[0] == "edge/b"


def test_a_second_attempt_is_no_probe_unless_there_is_nobody_else() -> None:
    fleet = three()
    broken(fleet, "edge/a")
    now = NOW + 1.0
    assert where(placed(fleet, prioritized(LOW, at=now), now, exclude=("edge/b",)))[0] == "pool/main"
    assert where(placed(fleet, prioritized(HIGH, at=now), now, exclude=("edge/b", "pool/main"))) == ("edge/a", "probe")
    refusal = placed(fleet, prioritized(HIGH, at=now), now, exclude=("edge/a", "edge/b", "pool/main")).refusal
    assert isinstance(refusal, NothingAlive)


def test_a_refusal_says_when_the_next_trial_is_due() -> None:
    fleet = three()
    broken(fleet, "pool/main")
    refusal = placed(fleet, prioritized(HIGH, at=NOW), NOW, exclude=("edge/a", "edge/b")).refusal
    assert isinstance(refusal, NothingAlive)
    assert refusal.retry_after_s == pytest.approx(0.5)


def test_one_in_a_hundred_of_low_priority_goes_to_whoever_was_not_asked_for_long() -> None:
    fleet = three()
    now = NOW + LONG_S
    for target_id in ("edge/a", "edge/b"):
        fleet.targets[target_id].asked_at = now - 1.0
    fleet.targets["pool/main"].asked_at = now - LONG_S
    assert where(placed(fleet, prioritized(LOW, at=now), now, draw=0.9 * SHARE)) == ("pool/main", "probe")
    assert where(placed(fleet, prioritized(LOW, at=now), now, draw=SHARE))[0] == "edge/a"
    assert where(placed(fleet, prioritized(HIGH, at=now), now, draw=0.0))[0] == "edge/a"


def test_nobody_explores_where_it_would_be_late_or_in_panic() -> None:
    fleet = three()
    now = NOW + 2 * LONG_S
    for target_id in ("edge/a", "edge/b"):
        fleet.targets[target_id].asked_at = now
    assert where(placed(fleet, prioritized(LOW, at=now, budget_s=0.08), now, draw=0.0))[0] == "edge/a"

    broken(fleet, "edge/a", at=now)
    broken(fleet, "edge/b", at=now)
    assert fleet.balance.panic
    assert where(placed(fleet, prioritized(LOW, at=now), now, draw=0.0))[1] != "probe"


def test_nobody_explores_in_overload() -> None:
    fleet = three()
    now = NOW + 2 * LONG_S
    placer = ProbePlacer(Placer(fleet), fleet, always, overloaded=lambda: True)
    assert placer.decide(prioritized(LOW, at=now), now).reason != "probe"
    assert repr(placer) == "<ProbePlacer <EjectionPolicy 0 of 3 ejected>>"


def test_a_trial_takes_only_work_that_its_target_takes() -> None:
    fleet = fleet_of(edge_a=variant("int8", max_batch=1), edge_b=variant("int8"), pool_main=variant())
    broken(fleet, "edge/a")
    now = NOW + 1.0
    assert where(placed(fleet, prioritized(LOW, at=now)._replace(rows=4), now))[0] == "edge/b"
    assert where(placed(fleet, prioritized(LOW, at=now)._replace(pin="edge"), now))[0] == "edge/a"


# targets that were slow


def slowed(fleet: Fleet, *target_ids: str, times: float = 20.0) -> None:
    for target_id in target_ids:
        offered = fleet.offers("minilm", "1").all.get((target_id, "fp32"))
        assert offered is not None
        offered.cost.relearn(times)


@pytest.mark.parametrize(
    ("priority", "times", "after_s", "budget_s", "is_probe"),
    [
        (LOW, 20.0, RECHECK_S, 2.0, True),
        (LOW, 20.0, RECHECK_S - 0.1, 2.0, False),  # it was asked just now
        (LOW, 2.0, RECHECK_S, 2.0, False),  # slow, but not out of the ordinary
        (LOW, 20.0, RECHECK_S, 0.03, False),  # no time for a second try
        (HIGH, 20.0, RECHECK_S, 2.0, False),  # waits for one that matters less
        (HIGH, 20.0, RECHECK_S + PATIENCE_S, 2.0, True),  # none came
    ],
)
def test_a_target_that_is_left_alone_for_being_slow_is_asked_now_and_then(
    priority: int, times: float, after_s: float, budget_s: float, is_probe: bool
) -> None:
    fleet = three()
    slowed(fleet, "edge/a", times=times)
    for target in fleet.targets.values():
        target.asked_at = NOW
    now = NOW + after_s
    decision = placed(fleet, prioritized(priority, at=now, budget_s=budget_s), now)
    assert (where(decision) == ("edge/a", "probe")) == is_probe
    assert (decision.reason == "probe") == is_probe


def test_slow_targets_are_asked_one_after_another_and_not_in_overload() -> None:
    fleet, now = three(), NOW + 10.0
    slowed(fleet, "edge/a", "edge/b", times=20.0)
    strained = ProbePlacer(Placer(fleet), fleet, never, overloaded=lambda: True)
    assert where(strained.decide(prioritized(LOW, at=now, budget_s=0.15), now)) == ("pool/main", "faster")

    placer = ProbePlacer(Placer(fleet), fleet, never)
    seen = []
    for turn in range(4):
        at = now + turn * 0.6 * GAP_S
        decision = placer.decide(prioritized(LOW, at=at, budget_s=0.15), at)
        assert decision.chosen is not None
        decision.chosen.target.asked_at = at
        seen.append(where(decision))
    assert [reason == "probe" for _, reason in seen] == [True, False, True, False]
    assert {target for target, reason in seen if reason == "probe"} == {"edge/a", "edge/b"}


def test_an_answer_that_shows_it_well_again_ends_the_doubt() -> None:
    fleet, now = three(), NOW + 10.0
    slowed(fleet, "edge/a")
    decision = placed(fleet, prioritized(LOW, at=now), now)
    assert where(decision) == ("edge/a", "probe") and decision.chosen is not None
    decision.chosen.offered.cost.relearn(1.0)
    assert where(placed(fleet, prioritized(LOW, at=now + 5.0), now + 5.0)) == ("edge/a", "cheapest")
