"""One request's life as a pure machine: each event's actions by example. Invariants: `test_interleavings.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.core.fleet.fleet import LOOK_AGAIN_S, Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp, RedialFailed
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.placer import Placer
from gateway.core.placement.probing import ProbePlacer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.machine import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, spec, variant
from tidegate.outcome import (
    ERRORS,
    BadAnswer,
    DeadlineExceeded,
    Deferred,
    Disconnected,
    InvalidRequest,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    Unreachable,
)
from tidegate.types import Accepted

GONE = Unreachable("connection refused")


def three_targets() -> Fleet:
    return fleet_of(
        edge_a=variant("int8", compute_s=0.010),
        edge_b=variant("int8", compute_s=0.011),
        pool_main=variant("fp32", compute_s=0.050),
    )


def machine(fleet: Fleet | None = None, *, budget_s: float = 2.0, max_attempts: int = 3) -> RequestMachine:
    return RequestMachine(ask(budget_s=budget_s), Placer(fleet or three_targets()), max_attempts=max_attempts)


def launched(actions: list[Action]) -> list[tuple[int, str]]:
    return [(one.attempt, one.candidate.target.id) for one in actions if isinstance(one, Launch)]


def woken_at(actions: list[Action]) -> float:
    (wake,) = [one.at for one in actions if isinstance(one, WakeAt)]
    return wake


def answer(actions: list[Action]) -> Answer:
    (end,) = [one for one in actions if isinstance(one, Answer)]
    return end


def refusal(actions: list[Action]) -> ServeError:
    (end,) = [one for one in actions if isinstance(one, Refuse)]
    return end.error


def cancelled(actions: list[Action]) -> list[int]:
    return [one.attempt for one in actions if isinstance(one, Cancel)]


def test_the_straight_way_is_one_launch_and_one_answer() -> None:
    one = machine()
    assert "NEW" in repr(one)
    actions = one.arrived(NOW)
    assert launched(actions) == [(0, "edge/a")]
    assert NOW + 1.9 < woken_at(actions) < NOW + 2.0
    assert "WAITING for [0]" in repr(one)

    end = answer(one.answered(0, NOW + 0.02))

    route = end.route
    assert (route.reason, route.attempts, route.hedged, route.fallback, route.degraded) == (
        "cheapest",
        1,
        False,
        False,
        False,
    )
    assert "DONE" in repr(one)


def test_what_arrives_late_is_refused_before_anything_is_launched() -> None:
    assert isinstance(refusal(machine(budget_s=0.0).arrived(NOW)), DeadlineExceeded)


def test_nowhere_to_go_is_refused_with_placements_own_reason() -> None:
    error = refusal(machine(fleet_of(up=False, pool_main=variant())).arrived(NOW))
    assert isinstance(error, NothingAlive)
    assert "pool/main is down" in error.message


@pytest.mark.parametrize("error", [error("x") for error in ERRORS])
def test_an_error_that_another_target_may_do_better_goes_to_the_next(error: ServeError) -> None:
    one = machine()
    one.arrived(NOW)
    actions = one.failed(0, error, NOW + 0.01)
    final = isinstance(error, Deferred)  # what was taken for later is no failure
    assert launched(actions) == ([] if final else [(1, "edge/b")])
    if final:
        assert refusal(actions) is error


def test_a_fallback_is_declared_and_a_lesser_variant_is_called_degraded() -> None:
    one = RequestMachine(
        ask(), Placer(fleet_of(edge_a=variant("fp32", compute_s=0.01), edge_b=variant("int8", compute_s=0.02)))
    )
    one.arrived(NOW)
    one.failed(0, GONE, NOW + 0.01)
    end = answer(one.answered(1, NOW + 0.05))
    route = end.route
    assert (route.reason, route.attempts, route.fallback, route.degraded, route.hedged) == (
        "fallback",
        2,
        True,
        True,
        False,
    )


def test_at_most_three_attempts_are_made() -> None:
    one = machine(fleet_of(edge_a=variant(), edge_b=variant(), edge_c=variant(), edge_d=variant()))
    one.arrived(NOW)
    assert launched(one.failed(0, GONE, NOW))[0][0] == 1
    assert launched(one.failed(1, GONE, NOW))[0][0] == 2
    assert isinstance(refusal(one.failed(2, BadAnswer("garbage"), NOW)), BadAnswer)


def test_nothing_is_launched_once_the_deadline_has_passed() -> None:
    one = machine(budget_s=0.5)
    one.arrived(NOW)
    assert refusal(one.failed(0, GONE, NOW + 0.5)) is GONE


def test_when_all_were_unreachable_there_is_nothing_alive() -> None:
    one = machine(fleet_of(pool_main=variant()))
    one.arrived(NOW)
    error = refusal(one.failed(0, GONE, NOW + 0.01))
    assert isinstance(error, NothingAlive)
    assert error.message.startswith("pool/main: connection refused; no target offers minilm version 1")


def test_when_one_was_only_busy_the_caller_is_told_when_to_come_back() -> None:
    one = machine(fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant()))
    one.arrived(NOW)
    one.failed(0, Overloaded("full", retry_after_s=0.5), NOW)
    one.failed(1, Overloaded("full", retry_after_s=0.2), NOW)
    error = refusal(one.failed(2, GONE, NOW))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 0.2
    assert error.message == "edge/a: full; edge/b: full; pool/main: connection refused"


def test_one_target_that_calls_a_request_invalid_is_not_believed_and_two_are() -> None:
    one = machine(fleet_of(edge_a=variant(), edge_b=variant(), edge_c=variant()))
    one.arrived(NOW)
    first, second = InvalidRequest("no such input"), InvalidRequest("no such input here")
    assert launched(one.failed(0, first, NOW)) == [(1, "edge/b")]
    assert refusal(one.failed(1, second, NOW)) is first


def test_a_second_opinion_is_asked_at_once_or_not_at_all() -> None:
    """After another failure the third target would be no second opinion any more."""
    one = machine(fleet_of(edge_a=variant(), edge_b=variant(), edge_c=variant()))
    one.arrived(NOW)
    fault = InvalidRequest("no such input")
    one.failed(0, fault, NOW)
    assert refusal(one.failed(1, GONE, NOW)) is fault


def test_a_second_opinion_takes_nothing_that_failovers_need() -> None:
    placer = UtilityPlacer(fleet_of(edge_a=variant(), edge_b=variant()))
    hedges = ChanceHedging(placer)
    while hedges.may_hedge():
        pass
    one = RequestMachine(ask(), placer, hedges=hedges)
    one.arrived(NOW)
    fault = InvalidRequest("no such input")
    assert refusal(one.failed(0, fault, NOW)) is fault
    assert hedges.may_fall_back(), "and a failure may be overdrawn for"


@pytest.mark.parametrize("changes", [{"tier": "site"}, {"foreign": True}])
def test_a_site_or_a_foreign_server_that_calls_a_request_invalid_is_believed(changes: dict[str, Any]) -> None:
    fleet = fleet_of(pool_main=variant(compute_s=1.0))
    fleet.add(replace(spec("edge/a"), **changes), NOW - 1.0)
    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW - 1.0)
    one = machine(fleet)
    assert launched(one.arrived(NOW)) == [(0, "edge/a")]
    fault = InvalidRequest("the prompt is too long")
    assert refusal(one.failed(0, fault, NOW)) is fault


def test_a_request_that_the_only_target_calls_invalid_is_refused_with_its_words_at_once() -> None:
    one = machine(fleet_of(pool_main=variant()))
    one.arrived(NOW)
    fault = InvalidRequest("no such input")
    assert refusal(one.failed(0, fault, NOW)) is fault


def test_a_callers_fault_outranks_other_errors() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    one.timer(wake)
    fault = InvalidRequest("no such output")
    assert one.failed(0, fault, wake) == []
    assert refusal(one.failed(1, GONE, wake)) is fault


def test_a_silent_attempt_is_hedged_at_the_last_useful_moment_and_the_loser_is_cancelled() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))

    actions = one.timer(wake)
    assert launched(actions) == [(1, "edge/b")]
    assert woken_at(actions) == NOW + 2.0

    actions = one.answered(1, wake + 0.01)
    end = answer(actions)
    assert cancelled(actions) == [0]
    assert (end.route.reason, end.route.attempts, end.route.hedged, end.route.fallback) == ("hedge", 2, True, False)


def test_a_first_attempt_that_comes_back_beside_its_hedge_still_wins() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    one.timer(wake)
    actions = one.answered(0, wake + 0.01)
    end = answer(actions)
    assert cancelled(actions) == [1]
    assert (end.route.reason, end.route.attempts, end.route.hedged, end.route.fallback) == ("cheapest", 2, True, False)


def test_one_hedge_a_request_is_enough() -> None:
    one = machine(fleet_of(edge_a=variant(), edge_b=variant(), edge_c=variant()))
    wake = woken_at(one.arrived(NOW))
    assert woken_at(one.timer(wake)) == NOW + 2.0
    assert one.failed(1, GONE, wake) == []
    actions = one.failed(0, GONE, wake)
    assert launched(actions) == [(2, "edge/c")]
    assert woken_at(actions) == NOW + 2.0


def test_an_error_never_beats_an_attempt_that_is_under_way() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    one.timer(wake)
    assert one.failed(0, GONE, wake + 0.001) == []
    assert answer(one.answered(1, wake + 0.01)).attempt == 1


def test_a_timer_that_comes_too_early_is_set_again() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    assert one.timer(wake - 0.5) == [WakeAt(wake)]
    assert launched(one.timer(wake - 0.0005)) == [(1, "edge/b")]  # within a loop's rounding: due


def test_a_promise_within_the_deadline_postpones_the_hedge() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    assert one.accepted(0, Accepted(3, NOW + 1.995 - wake), wake) == []

    actions = one.timer(wake)
    assert launched(actions) == []
    assert wake < woken_at(actions) < NOW + 2.0
    late = one.timer(woken_at(actions))  # it broke its word, and by now nobody else would make it
    assert late == [WakeAt(NOW + 2.0)]


def test_the_word_of_an_older_attempt_does_not_count() -> None:
    one = machine()
    one.arrived(NOW)
    one.failed(0, GONE, NOW)
    assert one.accepted(0, Accepted(0, 1.9), NOW) == []
    assert launched(one.timer(NOW + 1.93)) == [(2, "pool/main")]  # the latest attempt is silent all the same


def test_no_hedge_where_the_only_other_target_has_gone() -> None:
    fleet = fleet_of(edge_a=variant(), edge_b=variant())
    one = machine(fleet)
    wake = woken_at(one.arrived(NOW))
    fleet.remove("edge/b")
    assert one.timer(wake) == [WakeAt(NOW + 2.0)]


def test_no_hedge_beyond_the_attempts_that_are_allowed() -> None:
    one = machine(max_attempts=1)
    actions = one.arrived(NOW)
    assert woken_at(actions) == NOW + 2.0


def test_the_deadline_ends_it_and_cancels_what_is_under_way() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    one.timer(wake)
    actions = one.timer(NOW + 2.0)
    assert isinstance(refusal(actions), DeadlineExceeded)
    assert cancelled(actions) == [0, 1]


def test_what_failed_before_the_deadline_is_told_with_it() -> None:
    one = machine()
    one.arrived(NOW)
    one.failed(0, NotSupported("no such thing"), NOW + 0.1)
    assert "edge/a: no such thing" in refusal(one.timer(NOW + 2.0)).message


def test_a_caller_who_leaves_cancels_everything_and_hears_nothing() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    one.timer(wake)
    assert one.cancelled(wake) == [Cancel(0), Cancel(1)]
    assert one.cancelled(wake) == []


def test_after_the_end_nothing_happens_any_more() -> None:
    one = machine()
    one.arrived(NOW)
    one.answered(0, NOW + 0.01)
    assert one.answered(0, NOW) == one.failed(0, GONE, NOW) == one.timer(NOW + 5.0) == one.cancelled(NOW) == []


def test_an_answer_that_is_here_beats_a_deadline_that_has_just_passed() -> None:
    one = machine()
    one.arrived(NOW)
    assert answer(one.answered(0, NOW + 2.01)).attempt == 0


CUT = Disconnected("connection reset")


def all_links_are_lost(*, in_order: bool = False) -> tuple[RequestMachine, Fleet]:
    """A request that waits for the one target there is, whose link is gone by now."""
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.010))
    placer = ProbePlacer(Placer(fleet), fleet, lambda: 0.5)
    one = RequestMachine(ask(budget_s=2.0), placer)
    one.arrived(NOW)
    fleet.fold(LinkDown("edge/a", "connection reset", in_order), NOW)
    return one, fleet


def test_when_every_link_was_lost_just_now_a_request_waits_until_one_is_back() -> None:
    one, fleet = all_links_are_lost()
    assert woken_at(one.failed(0, CUT, NOW)) == NOW + LOOK_AGAIN_S
    assert "HELD" in repr(one)
    assert one.accepted(0, Accepted(0, 0.1), NOW) == []  # old news
    assert woken_at(one.timer(NOW + LOOK_AGAIN_S)) == NOW + 2 * LOOK_AGAIN_S

    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW + 0.015)

    assert launched(one.timer(NOW + 0.02)) == [(1, "edge/a")]
    assert answer(one.answered(1, NOW + 0.05)).route.fallback


def test_a_request_that_arrives_meanwhile_waits_as_well_and_is_a_first_attempt() -> None:
    _, fleet = all_links_are_lost()
    placer = ProbePlacer(Placer(fleet), fleet, lambda: 0.5)
    one = RequestMachine(ask(budget_s=2.0), placer)
    assert woken_at(one.arrived(NOW)) == NOW + LOOK_AGAIN_S
    fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(),)), NOW)
    assert launched(one.timer(NOW + LOOK_AGAIN_S)) == [(0, "edge/a")]
    assert not answer(one.answered(0, NOW + 0.05)).route.fallback


def test_when_no_link_comes_back_soon_the_caller_is_told() -> None:
    one, _ = all_links_are_lost()
    one.failed(0, CUT, NOW)
    assert isinstance(refusal(one.timer(NOW + 0.3)), NothingAlive)


def test_a_target_that_is_dialled_anew_is_waited_for_until_that_dial_has_failed() -> None:
    one, fleet = all_links_are_lost()
    at = woken_at(one.failed(0, CUT, NOW))
    for _ in range(10):
        at = woken_at(one.timer(at))
    fleet.fold(RedialFailed("edge/a"), at)
    assert isinstance(refusal(one.timer(at)), NothingAlive)
    assert at < NOW + 0.2


def test_a_server_that_did_not_answer_its_probe_is_not_waited_for() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.010))
    fleet.add(TargetSpec("pool/b", "pool", "b:1", "unary", foreign=True), NOW)
    fleet.fold(LinkUp("pool/b", "pool/b", 0, (offer(),)), NOW)
    fleet.fold(LinkDown("edge/a", "connection reset", in_order=True), NOW)
    fleet.fold(LinkDown("pool/b", "no answer"), NOW)
    one = RequestMachine(ask(budget_s=2.0), ProbePlacer(Placer(fleet), fleet, lambda: 0.5))
    assert isinstance(refusal(one.arrived(NOW)), NothingAlive)


def test_a_target_that_is_forgotten_is_waited_for_no_longer() -> None:
    one, fleet = all_links_are_lost()
    fleet.remove("edge/a")
    assert isinstance(refusal(one.failed(0, CUT, NOW)), NothingAlive)


def test_who_has_no_time_to_wait_is_told_at_once() -> None:
    one, _ = all_links_are_lost()
    assert isinstance(refusal(one.failed(0, CUT, NOW + 1.995)), NothingAlive)


def test_nobody_is_waited_for_who_said_goodbye() -> None:
    one, _ = all_links_are_lost(in_order=True)
    assert isinstance(refusal(one.failed(0, CUT, NOW)), NothingAlive)


def test_a_caller_may_leave_while_nobody_is_there() -> None:
    one, _ = all_links_are_lost()
    one.failed(0, CUT, NOW)
    assert one.cancelled(NOW) == []
    assert one.timer(NOW + 1.0) == []


def test_a_target_whose_connection_ended_is_as_good_as_any_over_the_next_one() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.010))
    one = RequestMachine(ask(), Placer(fleet))
    one.arrived(NOW)
    assert launched(one.failed(0, CUT, NOW)) == [(1, "edge/a")]
    assert isinstance(refusal(one.failed(1, BadAnswer("nonsense"), NOW)), BadAnswer)  # it had its chance


def test_connections_that_end_do_not_use_up_the_attempts_but_are_bounded_too() -> None:
    one = RequestMachine(ask(), Placer(fleet_of(edge_a=variant("int8", compute_s=0.010))))
    one.arrived(NOW)
    for attempt in range(5):
        assert launched(one.failed(attempt, CUT, NOW)) == [(attempt + 1, "edge/a")]
    assert isinstance(refusal(one.failed(5, CUT, NOW)), Unreachable)


# answers that come in parts


def test_the_first_to_begin_answers_and_the_others_are_cancelled() -> None:
    one = machine()
    hedge_at = woken_at(one.arrived(NOW))
    assert launched(one.timer(hedge_at)) == [(1, "edge/b")]

    actions = one.begun(1, hedge_at + 0.01)

    assert cancelled(actions) == [0]
    assert woken_at(actions) == NOW + 2.0, "nothing is to be decided before the deadline any more"
    assert "BEGUN" in repr(one)
    assert one.begun(0, hedge_at + 0.02) == one.begun(1, hedge_at + 0.02) == [], "that was settled"
    assert one.accepted(1, Accepted(0, 9.0), hedge_at + 0.03) == [], "a late promise moves nothing"
    assert answer(one.answered(1, hedge_at + 0.5)).candidate.target.id == "edge/b"


def test_what_breaks_off_after_it_began_fails_the_request_and_is_not_tried_elsewhere() -> None:
    one = machine()
    one.arrived(NOW)
    one.begun(0, NOW + 0.01)

    assert refusal(one.failed(0, GONE, NOW + 0.05)) is GONE


def test_what_has_not_begun_is_tried_elsewhere() -> None:
    one = machine()
    one.arrived(NOW)
    assert launched(one.failed(0, GONE, NOW + 0.05)) == [(1, "edge/b")]
    assert cancelled(one.begun(1, NOW + 0.06)) == []


def test_what_has_begun_still_ends_at_the_deadline() -> None:
    one = machine()
    one.arrived(NOW)
    one.begun(0, NOW + 0.01)

    actions = one.timer(NOW + 2.0)

    assert isinstance(refusal(actions), DeadlineExceeded)
    assert cancelled(actions) == [0]
