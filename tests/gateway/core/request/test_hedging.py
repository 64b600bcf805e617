"""Second attempts: the purse that they are paid from, and the machine that performs them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.machine import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from gateway.core.request.token_budget import TokenBudget
from tests.support.gateway.crossing import GONE, Scene, edge_and_pool
from tests.support.gateway.fleets import NOW, ask, offer, variant
from tidegate.outcome import Disconnected, Overloaded, ServeError
from tidegate.types import Accepted

CUT = Disconnected("connection reset")

# the purse


def test_hedges_stop_first_and_fallbacks_may_overdraw() -> None:
    quota = TokenBudget(share=0.5, cap=2.0)
    assert [quota.spend() for _ in range(3)] == [True, True, False]
    assert [quota.overdraw() for _ in range(3)] == [True, True, False]
    assert repr(quota) == "<TokenBudget -2.0 of 2>"
    for _ in range(6):
        quota.earn()
    assert quota.spend()
    assert not quota.spend()


def test_a_fallback_costs_what_the_failed_attempt_had_done_and_never_nothing() -> None:
    quota = TokenBudget(share=0.0, cap=1.0)
    for share, left in ((0.5, 0.5), (0.0, 0.4), (1.0, -0.6)):
        assert quota.overdraw(share)
        assert quota.tokens == pytest.approx(left)
    assert not quota.overdraw(0.5)
    assert quota.overdraw(0.0)


@pytest.mark.slow
@given(st.lists(st.sampled_from(["earn", "spend", "overdraw"]), max_size=300))
def test_second_attempts_stay_a_share_of_the_requests(steps: list[str]) -> None:
    quota, spent = TokenBudget(share=0.05, cap=5.0), 0
    for step in steps:
        spent += bool(getattr(quota, step)())
        assert -5.0 <= quota.tokens <= 5.0
    assert spent <= 0.05 * steps.count("earn") + 10.0 + 1e-9


# in the machine


def machine_of(scene: Scene) -> RequestMachine:
    return RequestMachine(scene.ask, scene.placer, hedges=scene.crossing)


def launched(actions: list[Action]) -> list[str]:
    return [one.candidate.target.id for one in actions if isinstance(one, Launch)]


def wake(actions: list[Action]) -> float:
    return next(one.at for one in actions if isinstance(one, WakeAt))


def test_the_machine_hedges_at_the_crossing_and_says_so() -> None:
    scene = edge_and_pool()
    machine = machine_of(scene)
    at, actions = NOW, machine.arrived(NOW)
    for _ in range(10):
        at = wake(actions)
        actions = machine.timer(at)
        if launched(actions):
            break
    assert launched(actions) == ["pool/main"]
    assert NOW + 0.15 < at < NOW + 0.5, "the crossing, not the last useful moment"
    assert scene.crossing.tokens.tokens == 29.0
    answers = [one for one in machine.answered(1, at + 0.06) if isinstance(one, Answer)]
    assert [(one.route.reason, one.route.hedged, one.route.degraded) for one in answers] == [("hedge", True, False)]
    assert "29.0" in repr(scene.crossing)


def test_a_machine_that_is_back_helps_one_that_was_asked_in_its_place() -> None:
    """Its connection ended under the first attempt, which says nothing of the next one; and nobody else is there."""
    quick, slow = variant("int8", compute_s=0.100), variant("int8", compute_s=0.110)
    scene = Scene(edge_a=quick, edge_b=slow, pool_main=variant(compute_s=0.200))
    machine = machine_of(scene)
    assert launched(machine.arrived(NOW)) == ["edge/a"]
    scene.fleet.fold(LinkDown("edge/a", "connection reset"), NOW)
    actions = machine.failed(0, CUT, NOW)
    assert launched(actions) == ["edge/b"]
    scene.fleet.fold(LinkUp("edge/a", "edge/a", 1, (offer(quick),)), NOW + 0.01)
    scene.fleet.fold(LinkDown("pool/main", "connection reset"), NOW + 0.02)
    while not launched(actions := machine.timer(wake(actions))):
        pass
    assert launched(actions) == ["edge/a"]


def test_a_silent_attempt_that_nobody_might_help_is_looked_at_again_when_somebody_may() -> None:
    """Overload at the one instant at which it was looked at is no reason to let it die in silence seconds later."""
    scene, overloaded = edge_and_pool(budget_s=10.0), True
    scene.crossing = ChanceHedging(scene.placer, overloaded=lambda: overloaded)
    machine = machine_of(scene)
    at, actions = NOW, machine.arrived(NOW)
    for _ in range(2):
        at = wake(actions)
        actions = machine.timer(at)
        assert launched(actions) == []
    assert at < NOW + 9.0
    overloaded = False
    while not launched(actions):
        at = wake(actions)
        actions = machine.timer(at)
    assert launched(actions) == ["pool/main"]
    assert at <= NOW + 9.0


def test_a_request_that_nobody_helps_is_looked_at_a_handful_of_times() -> None:
    scene = edge_and_pool(budget_s=10.0)
    scene.crossing = ChanceHedging(scene.placer, overloaded=lambda: True)
    machine = machine_of(scene)
    actions, looks = machine.arrived(NOW), 0
    while not machine.done:
        actions, looks = machine.timer(wake(actions)), looks + 1
    assert looks <= 12
    assert isinstance(actions[0], Refuse)


def test_a_last_resort_is_declared_and_degraded() -> None:
    scene = Scene(priority=4, pool_main=variant(compute_s=0.050), edge_a=variant("int8", compute_s=0.100))
    scene.fleet.targets["edge/a"].queue_estimate.congestion.sent(1.0, NOW)  # so that the pool is chosen
    scene.crossing.tokens.tokens = 5.0  # a token is worth more than a quarter of an answer
    machine = machine_of(scene)
    actions = machine.arrived(NOW)
    assert launched(actions) == ["pool/main"]
    while not launched(actions := machine.timer(wake(actions))):
        pass
    (answer,) = [one for one in machine.answered(1, NOW + 0.95) if isinstance(one, Answer)]
    assert (answer.route.reason, answer.route.hedged, answer.route.degraded) == ("last-resort", True, True)


def test_without_tokens_there_is_no_hedge_but_a_fallback_until_that_is_overdrawn_too() -> None:
    scene = edge_and_pool()
    scene.crossing = ChanceHedging(scene.placer, tokens=TokenBudget(share=0.0, cap=1.0))
    assert scene.crossing.may_hedge()

    silent = machine_of(scene)
    actions = silent.arrived(NOW)
    while (at := wake(actions)) < scene.ask.deadline:
        actions = silent.timer(at)
        assert launched(actions) == []

    failing = machine_of(scene)
    failing.arrived(NOW)
    assert launched(failing.failed(0, GONE, NOW + 0.01)) == ["pool/main"]
    another = machine_of(scene)
    another.arrived(NOW)
    assert [one.error for one in another.failed(0, GONE, NOW + 0.01) if isinstance(one, Refuse)] == [GONE]
    refused = machine_of(scene)
    refused.arrived(NOW)
    assert launched(refused.failed(0, Overloaded("full"), NOW + 0.01)) == ["pool/main"], "a refusal is free"


def test_a_hopeless_promise_moves_the_request_at_once_and_for_nothing() -> None:
    scene = edge_and_pool()
    scene.crossing = ChanceHedging(scene.placer, tokens=TokenBudget(share=0.0, cap=0.0))
    machine = machine_of(scene)
    machine.arrived(NOW)

    actions = machine.accepted(0, Accepted(9, 3.0), NOW + 0.010)

    assert [one for one in actions if isinstance(one, Cancel)] == [Cancel(0, hopeless=True)]
    assert actions.index(Cancel(0, hopeless=True)) < next(i for i, one in enumerate(actions) if type(one) is Launch)
    assert launched(actions) == ["pool/main"]
    assert machine.answered(0, NOW + 0.020) == [], "who was taken out answers no more"
    assert machine.accepted(0, Accepted(0, 0.1), NOW + 0.020) == []
    (answer,) = machine.answered(1, NOW + 0.080)
    assert isinstance(answer, Answer)
    route = answer.route
    assert (route.reason, route.attempts, route.hedged, route.fallback) == ("fallback", 2, False, True)


@pytest.mark.parametrize("cuts", [0, 1, 2, 3])
def test_connections_that_ended_take_no_look_from_the_attempt_after_them(cuts: int) -> None:
    """Where all were reset, the first target that is back gets everybody, and says at once who will be late."""
    scene = edge_and_pool()
    machine = machine_of(scene)
    actions = machine.arrived(NOW)
    for attempt in range(cuts):
        assert launched(actions) == ["edge/a"]
        actions = machine.failed(attempt, CUT, NOW + 0.001)
    assert launched(machine.accepted(cuts, Accepted(9, 3.0), NOW + 0.010)) == ["pool/main"]


def test_what_had_only_waited_in_a_queue_is_asked_elsewhere_for_little() -> None:
    for computed, spent in ((-0.5, 0.1), (0.5, 0.5), (1.5, 1.0)):
        scene = edge_and_pool()
        machine = machine_of(scene)
        (first, _) = machine.arrived(NOW)
        assert isinstance(first, Launch)
        machine.accepted(0, Accepted(2, 0.2), NOW)
        machine.failed(0, CUT, NOW + 0.2 - (1.0 - computed) * first.candidate.compute_s)
        assert scene.crossing.tokens.tokens == pytest.approx(30.0 - spent)


def test_what_was_sent_into_a_silence_moves_by_two_looks_for_nothing_and_in_overload() -> None:
    scene = edge_and_pool()
    scene.crossing = ChanceHedging(scene.placer, overloaded=lambda: True, tokens=TokenBudget(share=0.0, cap=0.0))
    link = scene.fleet.targets["edge/a"].link
    link.sent(1, NOW - 0.5)
    link.accepted(1, NOW - 0.49)
    machine = machine_of(scene)
    actions = machine.arrived(NOW)
    link.sent(2, NOW)
    looks = 0
    while not launched(actions := machine.timer(now := wake(actions))):
        looks += 1
        assert now < scene.ask.deadline and looks < 12
    assert now < NOW + 0.4, "while there is time for another"
    assert actions[0] == Cancel(0, hopeless=True)
    assert launched(actions) == ["pool/main"]
    (answer,) = machine.answered(1, now + 0.05)
    assert isinstance(answer, Answer)
    assert (answer.route.reason, answer.route.hedged) == ("fallback", False)


def test_a_doubtful_promise_is_hedged_beside_and_paid() -> None:
    scene = edge_and_pool()
    machine = machine_of(scene)
    machine.arrived(NOW)
    actions = machine.accepted(0, Accepted(9, scene.ask.deadline - NOW - 0.010), NOW + 0.010)
    assert [type(one) for one in actions] == [Launch, WakeAt]
    assert launched(actions) == ["pool/main"]
    assert scene.crossing.tokens.tokens == 29.0
    assert launched(machine.accepted(1, Accepted(9, 60.0), NOW + 0.020)) == [], "one hedge a request"


def test_a_good_promise_sets_the_timer_to_when_it_is_broken() -> None:
    scene = edge_and_pool()
    machine = machine_of(scene)
    machine.arrived(NOW)
    (rearmed,) = machine.accepted(0, Accepted(0, 0.3), NOW + 0.010)
    assert isinstance(rearmed, WakeAt)
    assert NOW + 0.3 < rearmed.at < NOW + 0.6


def test_nobody_is_moved_more_often_than_attempts_are_allowed_and_the_story_is_told() -> None:
    offers = {f"edge_{name}": variant(compute_s=0.050) for name in "abcd"}
    scene = Scene(**offers)
    machine = machine_of(scene)
    machine.arrived(NOW)
    for number in range(2):
        actions = machine.accepted(number, Accepted(9, 3.0), NOW + 0.010 * (number + 1))
        assert actions[0] == Cancel(number, hopeless=True)
        assert len(launched(actions)) == 1
    assert machine.accepted(2, Accepted(9, 3.0), NOW + 0.030) == [], "the last has to be waited for"
    refused, *cancels = machine.timer(scene.ask.deadline)
    assert isinstance(refused, Refuse)
    assert refused.error.message.count("promised its answer for after the deadline") == 2
    assert cancels == [Cancel(2)]


def test_when_the_next_one_fails_after_a_move_the_caller_hears_that_it_was_load() -> None:
    scene = edge_and_pool()
    machine = machine_of(scene)
    machine.arrived(NOW)
    machine.accepted(0, Accepted(9, 3.0), NOW + 0.010)
    (refused,) = machine.failed(1, GONE, NOW + 0.020)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, Overloaded)


@pytest.mark.parametrize("happens", ["answered", "left", "the deadline is here", "it was never sent"])
def test_a_late_ack_moves_nothing(happens: str) -> None:
    scene = edge_and_pool()
    machine, now, number = machine_of(scene), NOW + 0.010, 0
    machine.arrived(NOW)
    if happens == "answered":
        machine.answered(0, now)
    elif happens == "left":
        machine.cancelled(now)
    elif happens == "the deadline is here":
        now = scene.ask.deadline
    else:
        number = 7
    assert machine.accepted(number, Accepted(9, 60.0), now) == []


def test_who_is_alone_is_not_taken_out_of_the_only_queue_there_is() -> None:
    scene = Scene(edge_a=variant("int8"))
    machine = machine_of(scene)
    machine.arrived(NOW)
    actions = machine.accepted(0, Accepted(9, 60.0), NOW + 0.010)
    while not machine.done:
        assert [type(one) for one in actions] == [WakeAt]
        actions = machine.timer(wake(actions))


@pytest.mark.slow
def test_ten_thousand_random_lives_keep_the_invariants() -> None:
    """One terminal outcome, no orphaned work, nothing launched late, and ledgers that end empty."""
    chance = Random(11)
    scene = Scene(edge_a=variant("int8", compute_s=0.05), edge_b=variant(compute_s=0.08), pool_main=variant())
    now, hedged = NOW, 0
    for life in range(10_000):
        scene.ask = ask(budget_s=chance.uniform(0.05, 1.0), at=now)._replace(priority=chance.randrange(5))
        now, was_hedged = _live(machine_of(scene), scene, now, chance, life)
        hedged += was_hedged
    assert all(target.queue_estimate.in_flight == 0 for target in scene.fleet.targets.values())
    assert 100 < hedged <= 30 + 10_000 * 0.05
    assert scene.placer.calibration.claimed.ece < 0.5


def _live(machine: RequestMachine, scene: Scene, now: float, chance: Random, life: int) -> tuple[float, bool]:
    attempts: dict[int, AttemptTelemetry] = {}
    ends, hedged, wake_at = 0, False, now
    actions = machine.arrived(now)
    while True:
        for action in actions:
            match action:
                case Launch(number, candidate):
                    assert now < scene.ask.deadline
                    attempts[number] = AttemptTelemetry(candidate, life * 10 + number, 16.0, now)
                case WakeAt(at):
                    wake_at = at
                case Cancel(number, hopeless):
                    attempts.pop(number).cancelled(now, hopeless=hopeless)
                case Answer():
                    ends, hedged = ends + 1, action.route.hedged
                case Refuse():
                    ends += 1
        if machine.done:
            break
        now = min(now + chance.expovariate(20.0), max(now, wake_at))
        actions = _event(machine, attempts, now, wake_at, chance)
    assert ends == 1
    assert attempts == {}
    return now, hedged


def _event(
    machine: RequestMachine, attempts: dict[int, AttemptTelemetry], now: float, wake_at: float, chance: Random
) -> list[Action]:
    if now >= wake_at or not attempts:
        return machine.timer(max(now, wake_at))
    number = chance.choice(sorted(attempts))
    what = chance.random()
    if what < 0.3:
        word = Accepted(1, chance.uniform(0.0, 0.5))
        attempts[number].accepted(now, word)
        return machine.accepted(number, word, now)
    if what < 0.45:
        attempts.pop(number).answered({"queue": 0.0, "compute": 0.02}, None, now)
        return machine.answered(number, now)
    if what < 0.5:
        error: ServeError = GONE if chance.random() < 0.1 else Overloaded("full")  # fallbacks draw on the purse too
        attempts.pop(number).failed(error, now, chance.random())
        return machine.failed(number, error, now)
    return []


def test_where_two_of_a_tier_owe_their_answers_a_second_hedge_goes_to_another_tier() -> None:
    scene = Scene(
        edge_a=variant("int8"), edge_b=variant("int8"), edge_c=variant("int8"), pool_main=variant(compute_s=0.1)
    )
    machine, now = machine_of(scene), NOW
    actions = machine.arrived(now)
    tiers = launched(actions)
    while not machine.done and len(tiers) < 3:
        for one in [one for one in actions if isinstance(one, Launch)]:
            actions = [*actions, *machine.accepted(one.attempt, Accepted(0, 0.02), now + 0.005)]
        now = [one.at for one in actions if isinstance(one, WakeAt)][-1]
        actions = machine.timer(now)
        tiers += launched(actions)
    assert [one.partition("/")[0] for one in tiers] == ["edge", "edge", "pool"]
    assert scene.crossing.tokens.tokens == 28.0, "both are paid"
    (answer,) = [one for one in machine.answered(2, now + 0.1) if isinstance(one, Answer)]
    assert answer.route.hedged
