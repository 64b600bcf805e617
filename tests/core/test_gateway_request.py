"""One request's life as a pure machine: each event's actions by example, the invariants by random interleavings."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.fleet import Fleet
from gateway.core.placement import Ask, Decision, Placer
from gateway.core.request import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from tests.support.fleets import NOW, ask, fleet_of, variant
from tidegate.outcome import (
    ERRORS,
    BadAnswer,
    DeadlineExceeded,
    InternalError,
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

    assert (end.reason, end.attempts, end.hedged, end.fallback, end.degraded) == ("cheapest", 1, False, False, False)
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
    final = isinstance(error, InvalidRequest | NothingAlive)
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
    assert (end.reason, end.attempts, end.fallback, end.degraded, end.hedged) == ("fallback", 2, True, True, False)


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
    assert error.message.startswith("pool/main: connection refused; no target offers minilm")


def test_when_one_was_only_busy_the_caller_is_told_when_to_come_back() -> None:
    one = machine(fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant()))
    one.arrived(NOW)
    one.failed(0, Overloaded("full", retry_after_s=0.5), NOW)
    one.failed(1, Overloaded("full", retry_after_s=0.2), NOW)
    error = refusal(one.failed(2, GONE, NOW))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 0.2
    assert error.message == "edge/a: full; edge/b: full; pool/main: connection refused"


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
    assert (end.reason, end.attempts, end.hedged, end.fallback) == ("hedge", 2, True, False)


def test_a_first_attempt_that_comes_back_beside_its_hedge_still_wins() -> None:
    one = machine()
    wake = woken_at(one.arrived(NOW))
    one.timer(wake)
    actions = one.answered(0, wake + 0.01)
    end = answer(actions)
    assert cancelled(actions) == [1]
    assert (end.reason, end.attempts, end.hedged, end.fallback) == ("cheapest", 2, True, False)


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


# Invariants


class Checked:
    """Feeds a machine events as a shell would, and checks every action it gives."""

    def __init__(self, machine: RequestMachine, deadline: float) -> None:
        self.machine = machine
        self.deadline = deadline
        self.now = NOW
        self.under_way: set[int] = set()
        self.ended: set[int] = set()
        self.targets: list[str] = []
        self.terminal: Action | None = None
        self.left = False
        self.wake: float | None = None
        self.take(machine.arrived(self.now))

    def take(self, actions: list[Action]) -> None:
        assert self.terminal is None or not actions, "nothing happens after the end"
        for action in actions:
            match action:
                case Launch(attempt, candidate):
                    assert self.terminal is None
                    assert not self.left
                    assert self.now < self.deadline, "nothing is launched at or after the deadline"
                    assert attempt == len(self.targets) < 3
                    assert candidate.target.id not in self.targets, "no target is asked twice"
                    self.targets.append(candidate.target.id)
                    self.under_way.add(attempt)
                case WakeAt(at):
                    assert self.terminal is None
                    assert at <= self.deadline
                    self.wake = at
                case Cancel(attempt):
                    assert attempt in self.under_way, "only what is under way is cancelled, and once"
                    self.under_way.discard(attempt)
                    self.ended.add(attempt)
                case Answer(attempt):
                    self._terminate(action)
                    assert attempt in self.ended
                case Refuse():
                    self._terminate(action)
        if self.terminal is not None or self.left:
            assert not self.under_way, "no work is orphaned"
            assert self.machine.done
        else:
            assert self.under_way, "somebody is always being waited for"
            assert self.wake is not None, "and the deadline will end it"

    def _terminate(self, action: Action) -> None:
        assert self.terminal is None, "exactly one terminal outcome"
        assert not self.left, "nobody is told after leaving"
        self.terminal = action

    def answered(self, attempt: int) -> None:
        self._end(attempt)
        beaten = self.terminal
        self.take(self.machine.answered(attempt, self.now))
        if beaten is None and not self.left:
            assert isinstance(self.terminal, Answer), "the first answer wins"

    def failed(self, attempt: int, error: ServeError) -> None:
        self._end(attempt)
        others = set(self.under_way)
        self.take(self.machine.failed(attempt, error, self.now))
        if others:
            assert self.terminal is None, "an error never beats an attempt that is under way"

    def _end(self, attempt: int) -> None:
        self.under_way.discard(attempt)
        self.ended.add(attempt)

    def ring(self) -> None:
        """The timer, at its instant."""
        if self.wake is not None and self.terminal is None and not self.left:
            self.now = max(self.now, self.wake)
            self.wake = None
            self.take(self.machine.timer(self.now))

    def leave(self) -> None:
        if self.terminal is None:
            self.left = True
            self.take(self.machine.cancelled(self.now))


ERRORS_OF_TARGETS: list[ServeError] = [
    GONE,
    BadAnswer("garbage"),
    InternalError("crash"),
    Overloaded("full", retry_after_s=0.1),
    Overloaded("full"),
    DeadlineExceeded("cannot make it"),
    NotSupported("no"),
    InvalidRequest("bad"),
]


class RandomPlaces:
    """Places anywhere that is not excluded, or nowhere, as chance has it."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._placer = Placer(
            fleet_of(edge_a=variant(), edge_b=variant(compute_s=0.3), pool_c=variant(), pool_d=variant(compute_s=1.2))
        )

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        hidden = [target for target in self._placer.fleet.targets if self._random.random() < 0.15]
        return self._placer.decide(ask, now, [*exclude, *hidden])


class RequestLife(RuleBasedStateMachine):
    """Hypothesis finds the order of events that breaks an invariant, and shrinks it."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Checked(RequestMachine(ask(), RandomPlaces(Random(0))), NOW + 2.0)

    @rule(pause_s=st.floats(0.0, 1.0))
    def time_passes(self, pause_s: float) -> None:
        wake = self.life.wake if self.life.wake is not None else NOW + 9.0
        self.life.now = min(self.life.now + pause_s, max(self.life.now, wake))

    @precondition(lambda self: self.life.under_way)
    @rule(which=st.integers(0, 3))
    def an_attempt_answers(self, which: int) -> None:
        self.life.answered(sorted(self.life.under_way)[which % len(self.life.under_way)])

    @precondition(lambda self: self.life.under_way)
    @rule(which=st.integers(0, 3), error=st.sampled_from(ERRORS_OF_TARGETS))
    def an_attempt_fails(self, which: int, error: ServeError) -> None:
        self.life.failed(sorted(self.life.under_way)[which % len(self.life.under_way)], error)

    @precondition(lambda self: self.life.under_way)
    @rule(which=st.integers(0, 3), finish_in_s=st.floats(0.0, 3.0))
    def an_attempt_is_accepted(self, which: int, finish_in_s: float) -> None:
        attempt = sorted(self.life.under_way)[which % len(self.life.under_way)]
        self.life.take(self.life.machine.accepted(attempt, Accepted(0, finish_in_s), self.life.now))

    @rule()
    def the_timer_rings(self) -> None:
        self.life.ring()

    @rule()
    def the_timer_rings_early(self) -> None:
        self.life.take(self.life.machine.timer(self.life.now))

    @rule()
    def the_caller_leaves(self) -> None:
        self.life.leave()

    @precondition(lambda self: self.life.ended)
    @rule()
    def news_of_an_attempt_that_has_ended_comes_again(self) -> None:
        attempt = min(self.life.ended)
        self.life.take(self.life.machine.answered(attempt, self.life.now))
        self.life.take(self.life.machine.failed(attempt, GONE, self.life.now))

    @invariant()
    def an_end_is_an_end(self) -> None:
        assert self.life.machine.done == (self.life.terminal is not None or self.life.left)


TestRequestLife = pytest.mark.slow(RequestLife.TestCase)
TestRequestLife.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def live_at_random(seed: int) -> Checked:
    """One request's life with events in random order, until nothing can happen any more."""
    random = Random(seed)
    life = Checked(RequestMachine(ask(), RandomPlaces(random)), NOW + 2.0)
    while life.terminal is None and not life.left:
        wake = life.wake if life.wake is not None else NOW + 2.0
        life.now = min(life.now + random.choice([0.0, 0.0, 0.01, 0.4]), max(life.now, wake))
        chance = random.random()
        attempt = random.choice(sorted(life.under_way))
        if chance < 0.15:
            life.answered(attempt)
        elif chance < 0.45:
            life.failed(attempt, random.choice(ERRORS_OF_TARGETS))
        elif chance < 0.65:
            life.take(life.machine.accepted(attempt, Accepted(0, random.random()), life.now))
        elif chance < 0.95:
            life.ring()
        else:
            life.leave()
    return life


@pytest.mark.slow
def test_random_lives_end_in_one_outcome_and_all_kinds_of_them_occur() -> None:
    lives = [live_at_random(seed) for seed in range(1500)]

    assert {type(life.terminal) for life in lives} == {Answer, Refuse, type(None)}
    assert {len(life.targets) for life in lives} >= {1, 2, 3}
    hedged = [life for life in lives if isinstance(life.terminal, Answer) and life.terminal.hedged]
    assert hedged
