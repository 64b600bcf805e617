"""Second attempts: the purse, the crossing of two chances, the last resort, and the machine that performs them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.congestion import Congestion
from gateway.core.crossing import MIN_GAIN, MOST_GAIN, SOONEST_S, Crossing, domain_of
from gateway.core.evidence import Attempt
from gateway.core.fleet import Fleet
from gateway.core.hedging import Hedge, LatestUseful, Watched
from gateway.core.link import SLACK_S
from gateway.core.placement import Candidate, Decision
from gateway.core.request import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from gateway.core.target import TargetSpec
from gateway.core.token_budget import TokenBudget
from gateway.core.value import ValuePlacer
from tests.support.fleets import NOW, ask, fleet_of, variant
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import Overloaded, ServeError, Unreachable
from tidegate.types import Accepted

GONE = Unreachable("connection refused")


# the purse


def test_hedges_stop_first_and_fallbacks_may_overdraw() -> None:
    purse = TokenBudget(share=0.5, cap=2.0)
    assert [purse.spend() for _ in range(3)] == [True, True, False]
    assert [purse.overdraw() for _ in range(3)] == [True, True, False]
    assert repr(purse) == "<TokenBudget -2.0 of 2>"
    for _ in range(6):
        purse.earn()
    assert purse.spend()
    assert not purse.spend()


@given(st.lists(st.sampled_from(["earn", "spend", "overdraw"]), max_size=300))
def test_second_attempts_stay_a_share_of_the_requests(steps: list[str]) -> None:
    purse, spent = TokenBudget(share=0.05, cap=5.0), 0
    for step in steps:
        spent += bool(getattr(purse, step)())
        assert -5.0 <= purse.tokens <= 5.0
    assert spent <= 0.05 * steps.count("earn") + 10.0 + 1e-9


# the crossing


class Scene:
    """A placer by value over fresh targets, and a request that was placed on the first of them."""

    def __init__(self, *, budget_s: float = 1.0, priority: int = 0, **variants: VariantOffer) -> None:
        offers: dict[str, Any] = {**variants}
        self.fleet = fleet_of(**offers)
        for target in self.fleet.targets.values():
            for index in range(8):
                target.link.record(0.010, NOW - 1.0 + index / 100)
        self.placer = ValuePlacer(self.fleet)
        self.crossing = Crossing(self.placer)
        self.ask = ask(budget_s=budget_s)._replace(priority=priority)
        self.first = self.placed(next(iter(self.fleet.targets)))

    def placed(self, target_id: str) -> Candidate:
        others = [one for one in self.fleet.targets if one != target_id]
        chosen = self.placer.decide(self.ask, NOW, others).chosen
        assert chosen is not None
        return chosen

    def elsewhere(self, now: float) -> Decision:
        return self.placer.decide(self.ask, now, self.crossing.avoid([self.first]))

    def plan(self, after_s: float, promised_in_s: float | None = None) -> Hedge | None:
        promised_at = None if promised_in_s is None else NOW + promised_in_s
        now = NOW + after_s
        return self.crossing.plan(self.ask, Watched(self.first, NOW, promised_at), self.elsewhere(now), now)


def edge_and_pool(**more: float) -> Scene:
    return Scene(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.050), **more)  # type: ignore[arg-type]


def test_before_the_usual_time_is_over_the_crossing_lies_ahead() -> None:
    hedge = edge_and_pool().plan(after_s=0.050)
    assert hedge is not None
    assert hedge.reason == "hedge"
    assert NOW + 0.1 < hedge.at < NOW + 0.5


def test_an_attempt_that_is_long_overdue_is_hedged_now() -> None:
    assert edge_and_pool().plan(after_s=0.500) == Hedge(NOW + 0.500)


def test_the_hedge_comes_while_it_can_still_be_in_time() -> None:
    scene = edge_and_pool()
    assert scene.plan(after_s=0.93) == Hedge(NOW + 0.93)
    assert scene.plan(after_s=0.95) is None


def test_a_promise_beyond_the_deadline_is_no_reason_to_wait() -> None:
    scene = edge_and_pool()
    assert scene.plan(after_s=0.050, promised_in_s=3.0) == Hedge(NOW + 0.050, instead=True)
    ahead = scene.plan(after_s=0.050, promised_in_s=0.3)
    assert ahead is not None
    assert ahead.at > NOW + 0.3


def test_who_promised_well_and_is_late_is_not_taken_out_for_it() -> None:
    scene = edge_and_pool()
    assert scene.plan(after_s=0.600, promised_in_s=0.1) == Hedge(NOW + 0.600), "it may be on its way"
    assert scene.plan(after_s=0.600) == Hedge(NOW + 0.600), "nor is who never promised"


def test_a_promise_heard_on_a_path_that_has_since_gone_silent_is_still_a_good_one() -> None:
    scene = edge_and_pool()
    scene.fleet.targets["edge/a"].link.acknowledges = True
    scene.fleet.targets["edge/a"].link.sent(7, NOW)
    assert scene.plan(after_s=0.3, promised_in_s=0.1) == Hedge(NOW + 0.3)


def test_a_missing_ack_brings_the_hedge_forward() -> None:
    scene = edge_and_pool()
    link = scene.fleet.targets["edge/a"].link
    link.sent(1, NOW - 0.5)
    link.accepted(1, NOW - 0.49)
    link.sent(2, NOW)
    scene.crossing.tokens.tokens = 15.0
    before, after = scene.plan(after_s=0.030), scene.plan(after_s=0.080)
    assert before is not None
    assert before.at > NOW + 0.1
    assert after == Hedge(NOW + 0.080)


def test_a_gain_that_does_not_pay_is_left() -> None:
    scene = edge_and_pool(priority=4)
    assert scene.plan(after_s=0.5) == Hedge(NOW + 0.5), f"a quarter of an answer is more than {MIN_GAIN}"
    scene.crossing.tokens.tokens = 10.0
    assert scene.plan(after_s=0.5) is None, "but not when few tokens are left"
    scene.crossing.tokens.tokens = 0.0
    assert edge_and_pool(priority=1).plan(after_s=0.5) is not None, f"two answers are more than {MOST_GAIN}"
    scene = edge_and_pool()
    scene.placer.prices = scene.placer.prices._replace(cost=20.0)
    assert scene.plan(after_s=0.5) is None


def test_no_hedge_in_overload() -> None:
    scene = edge_and_pool()
    scene.crossing = Crossing(scene.placer, overloaded=lambda: True)
    assert scene.plan(after_s=0.5) is None
    assert scene.plan(after_s=0.050, promised_in_s=3.0) is None, "nor is anybody moved"


def test_a_queue_is_no_reason_against_a_hedge_but_what_it_burdens_others_with_is() -> None:
    scene = edge_and_pool()
    ledger = scene.fleet.targets["pool/main"].ledger
    for key in range(4):
        ledger.launch(key, 0.020, NOW)
    ledger.congestion = Congestion()
    assert scene.plan(after_s=0.5) == Hedge(NOW + 0.5)

    decision = scene.elsewhere(NOW + 0.5)
    assert decision.chosen is not None
    assert decision.chosen.stake is not None
    for burden, hedges in ((0.5, True), (0.9, False)):
        chosen = decision.chosen._replace(stake=decision.chosen.stake._replace(burden=burden))
        watched = Watched(scene.first, NOW)
        planned = scene.crossing.plan(scene.ask, watched, decision._replace(chosen=chosen), NOW + 0.5)
        assert (planned is not None) is hedges
    bare = decision._replace(chosen=decision.chosen._replace(stake=None))
    assert scene.crossing.plan(scene.ask, Watched(scene.first, NOW), bare, NOW + 0.5) is not None


def test_no_hedge_where_nobody_else_is_left() -> None:
    assert Scene(pool_main=variant()).plan(after_s=0.5) is None


def test_when_the_pool_is_silent_and_no_hedge_pays_a_cheaper_one_is_the_last_resort() -> None:
    scene = Scene(priority=4, pool_main=variant(compute_s=0.050), edge_a=variant("int8", compute_s=0.100))
    scene.crossing.tokens.tokens = 5.0  # a token is worth more than a quarter of an answer
    ahead = scene.plan(after_s=0.3)
    assert ahead is not None
    assert ahead.reason == "last-resort"
    assert NOW + 0.7 < ahead.at < NOW + 0.9
    assert scene.plan(after_s=0.88) == Hedge(NOW + 0.88, "last-resort")


def test_no_last_resort_while_the_pool_is_a_good_bet() -> None:
    scene = Scene(priority=4, pool_main=variant(compute_s=0.100), edge_a=variant("int8", compute_s=0.850))
    assert scene.plan(after_s=0.02) is None


@given(
    st.floats(0.005, 0.4), st.floats(0.005, 0.4), st.floats(0.05, 2.0), st.floats(0.0, 1.0), st.none() | st.floats(0, 3)
)
def test_a_hedge_is_never_planned_for_the_past_nor_too_late(
    first_s: float, second_s: float, budget_s: float, share: float, promised_in_s: float | None
) -> None:
    scene = Scene(budget_s=2.0, pool_a=variant(compute_s=first_s), pool_b=variant(compute_s=second_s))
    scene.ask = ask(budget_s=budget_s)
    now = NOW + share * budget_s
    decision = scene.elsewhere(now)
    hedge = scene.crossing.plan(
        scene.ask, Watched(scene.first, NOW, promised_in_s and NOW + promised_in_s), decision, now
    )
    if hedge is not None:
        assert decision.chosen is not None
        assert now <= hedge.at <= scene.ask.deadline - decision.chosen.finish_s + 1e-6


# the first look


def first_look_after_s(scene: Scene) -> float | None:
    other = scene.placer.decide(scene.ask, NOW, [scene.first.target.id]).chosen
    assert other is not None
    at = scene.crossing.first_look(scene.ask, scene.first, other, NOW)
    return None if at is None else at - NOW


def test_a_safe_attempt_is_looked_after_when_it_is_overdue() -> None:
    scene = edge_and_pool()
    assert first_look_after_s(scene) == pytest.approx(scene.first.finish_s + scene.first.margin_s)


def test_where_acks_are_usual_a_missing_one_is_looked_after_when_nine_of_ten_would_be_here() -> None:
    scene = edge_and_pool()
    link = scene.fleet.targets["edge/a"].link
    link.sent(1, NOW - 0.5)
    link.accepted(1, NOW - 0.49)
    assert link.path(NOW).quantile_s(0.9) == pytest.approx(0.012)
    assert first_look_after_s(scene) == pytest.approx(0.012 + SLACK_S)


def test_a_doubtful_bet_is_looked_after_at_once() -> None:
    scene = Scene(budget_s=0.125, edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.020))
    assert first_look_after_s(scene) == pytest.approx(SOONEST_S)
    scene.first = scene.first._replace(stake=None)
    assert first_look_after_s(scene) != pytest.approx(SOONEST_S), "without a claim nothing is known to be doubtful"


def test_a_look_that_comes_too_late_for_the_other_is_brought_forward_or_left_out() -> None:
    scene = Scene(budget_s=0.6, edge_a=variant("int8", compute_s=0.300), pool_main=variant(compute_s=0.290))
    after_s = first_look_after_s(scene)
    assert after_s is not None
    assert after_s < 0.25
    hopeless = Scene(budget_s=0.2, edge_a=variant("int8", compute_s=0.1), pool_main=variant(compute_s=0.190))
    assert first_look_after_s(hopeless) is None


# the second look


@pytest.mark.parametrize(("promised_in_s", "at_once"), [(0.2, False), (0.9, False), (1.05, True), (60.0, True)])
def test_an_ack_with_a_doubtful_promise_is_looked_after_at_once(promised_in_s: float, at_once: bool) -> None:
    scene = edge_and_pool()
    watched = Watched(scene.first, NOW, NOW + promised_in_s)
    later = watched.promised_at + scene.first.margin_s  # type: ignore[operator]
    assert scene.crossing.second_look(scene.ask, watched, NOW + 0.010) == (NOW + 0.010 if at_once else later)


def test_without_chances_a_promise_is_believed() -> None:
    scene = edge_and_pool()
    rule, watched = LatestUseful(), Watched(scene.first, NOW, NOW + 0.9)
    assert rule.second_look(scene.ask, watched, NOW) is None
    assert rule.plan(scene.ask, watched, scene.elsewhere(NOW), NOW) == Hedge(NOW + 0.9)
    late = watched._replace(promised_at=NOW + 9.0)
    assert rule.plan(scene.ask, late, scene.elsewhere(NOW), NOW) == Hedge(NOW)


# failure domains


@pytest.mark.parametrize(
    ("address", "domain"),
    [
        ("10.0.0.7:9000", "10.0.0.7"),
        ("kiosk.local:9000", "kiosk.local"),
        ("[fd00::1]:9000", "fd00::1"),
        ("127.0.0.1:9000", "edge/a"),
        ("localhost:9000", "edge/a"),
        ("unix-socket", "edge/a"),
        ("[::1]:9000", "edge/a"),
    ],
)
def test_targets_on_one_machine_fail_together(address: str, domain: str) -> None:
    assert domain_of(TargetSpec("edge/a", "edge", address)) == domain


def test_a_hedge_avoids_the_whole_machine() -> None:
    fleet = Fleet(lambda model, version: "tokens")
    for target_id, address in (("edge/a", "10.0.0.7:1"), ("edge/b", "10.0.0.7:2"), ("edge/c", "10.0.0.8:1")):
        fleet.add(TargetSpec(target_id, "edge", address), NOW)
    scene = edge_and_pool()
    crossing = Crossing(ValuePlacer(fleet))
    tried = scene.first._replace(offered=scene.first.offered._replace(target=fleet.targets["edge/a"]))
    assert sorted(crossing.avoid([tried])) == ["edge/a", "edge/b"]
    assert LatestUseful().avoid([tried]) == ["edge/a"]
    assert "LatestUseful" in repr(LatestUseful())


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
    assert [(one.reason, one.hedged, one.degraded) for one in answers] == [("hedge", True, False)]
    assert "29.0" in repr(scene.crossing)


def test_a_last_resort_is_declared_and_degraded() -> None:
    scene = Scene(priority=4, pool_main=variant(compute_s=0.050), edge_a=variant("int8", compute_s=0.100))
    scene.fleet.targets["edge/a"].ledger.congestion.sent(1.0, NOW)  # so that the pool is chosen
    scene.crossing.tokens.tokens = 5.0  # a token is worth more than a quarter of an answer
    machine = machine_of(scene)
    actions = machine.arrived(NOW)
    assert launched(actions) == ["pool/main"]
    while not launched(actions := machine.timer(wake(actions))):
        pass
    (answer,) = [one for one in machine.answered(1, NOW + 0.95) if isinstance(one, Answer)]
    assert (answer.reason, answer.hedged, answer.degraded) == ("last-resort", True, True)


def test_without_tokens_there_is_no_hedge_but_a_fallback_until_that_is_overdrawn_too() -> None:
    scene = edge_and_pool()
    scene.crossing = Crossing(scene.placer, tokens=TokenBudget(share=0.0, cap=1.0))
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
    scene.crossing = Crossing(scene.placer, tokens=TokenBudget(share=0.0, cap=0.0))
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
    assert (answer.reason, answer.attempts, answer.hedged, answer.fallback) == ("fallback", 2, False, True)


def test_a_doubtful_promise_is_hedged_beside_and_paid() -> None:
    scene = edge_and_pool()
    machine = machine_of(scene)
    machine.arrived(NOW)
    actions = machine.accepted(0, Accepted(9, scene.ask.deadline - NOW - 0.010), NOW + 0.010)
    assert [type(one) for one in actions] == [Launch, WakeAt]
    assert launched(actions) == ["pool/main"]
    assert scene.crossing.tokens.tokens == 29.0
    assert machine.accepted(1, Accepted(9, 60.0), NOW + 0.020) == [], "one hedge a request"


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
    assert machine.accepted(0, Accepted(9, 60.0), NOW + 0.010) == [WakeAt(scene.ask.deadline)]


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
    assert all(target.ledger.in_flight == 0 for target in scene.fleet.targets.values())
    assert 100 < hedged <= 30 + 10_000 * 0.05
    assert scene.placer.calibration.claimed.ece < 0.5


def _live(machine: RequestMachine, scene: Scene, now: float, chance: Random, life: int) -> tuple[float, bool]:
    attempts: dict[int, Attempt] = {}
    ends, hedged, wake_at = 0, False, now
    actions = machine.arrived(now)
    while True:
        for action in actions:
            match action:
                case Launch(number, candidate):
                    assert now < scene.ask.deadline
                    attempts[number] = Attempt(candidate, life * 10 + number, 16.0, now)
                case WakeAt(at):
                    wake_at = at
                case Cancel(number, hopeless):
                    attempts.pop(number).cancelled(now, hopeless=hopeless)
                case Answer():
                    ends, hedged = ends + 1, action.hedged
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
    machine: RequestMachine, attempts: dict[int, Attempt], now: float, wake_at: float, chance: Random
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
