"""Second attempts: the purse, the crossing of two chances, the last resort, and the machine that performs them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.crossing import MIN_GAIN, SOONEST_S, Crossing, domain_of
from gateway.core.evidence import Attempt
from gateway.core.fleet import Fleet, TargetSpec
from gateway.core.hedging import Hedge, LatestUseful, Watched
from gateway.core.placement import Candidate, Decision
from gateway.core.request import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
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
    assert scene.plan(after_s=0.050, promised_in_s=3.0) == Hedge(NOW + 0.050)
    ahead = scene.plan(after_s=0.050, promised_in_s=0.3)
    assert ahead is not None
    assert ahead.at > NOW + 0.3


def test_a_missing_ack_brings_the_hedge_forward() -> None:
    scene = edge_and_pool()
    link = scene.fleet.targets["edge/a"].link
    link.sent(1, NOW - 0.5)
    link.accepted(1, NOW - 0.49)
    link.sent(2, NOW)
    before, after = scene.plan(after_s=0.030), scene.plan(after_s=0.080)
    assert before is not None
    assert before.at > NOW + 0.1
    assert after == Hedge(NOW + 0.080)


def test_a_gain_that_does_not_pay_is_left() -> None:
    assert edge_and_pool(priority=4).plan(after_s=0.5) is None, f"a quarter of an answer is less than {MIN_GAIN}"
    scene = edge_and_pool()
    scene.placer.prices = scene.placer.prices._replace(cost=20.0)
    assert scene.plan(after_s=0.5) is None


def test_no_hedge_in_overload_nor_to_a_target_with_a_queue_of_its_own() -> None:
    scene = edge_and_pool()
    scene.crossing = Crossing(scene.placer, overloaded=lambda: True)
    assert scene.plan(after_s=0.5) is None

    scene = edge_and_pool()
    for key in range(4):
        scene.fleet.targets["pool/main"].ledger.launch(key, 0.050, NOW + 0.5)
    assert scene.plan(after_s=0.5) is None


def test_no_hedge_where_nobody_else_is_left() -> None:
    assert Scene(pool_main=variant()).plan(after_s=0.5) is None


def test_when_the_pool_is_silent_and_no_hedge_pays_a_cheaper_one_is_the_last_resort() -> None:
    scene = Scene(priority=4, pool_main=variant(compute_s=0.050), edge_a=variant("int8", compute_s=0.100))
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


def test_where_acks_are_usual_a_missing_one_is_looked_after_first() -> None:
    scene = edge_and_pool()
    link = scene.fleet.targets["edge/a"].link
    link.sent(1, NOW - 0.5)
    link.accepted(1, NOW - 0.49)
    assert first_look_after_s(scene) == pytest.approx(4 * 0.010 + 0.020 + SOONEST_S)


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
    for _ in range(400):
        scene.placer.calibrations["edge"].record(1.0, 1.0, came=False)  # so that the pool is chosen
    machine = machine_of(scene)
    actions = machine.arrived(NOW)
    assert launched(actions) == ["pool/main"]
    for _ in range(400):
        scene.placer.calibrations["edge"].record(1.0, 1.0, came=True)
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
    for calibration in scene.placer.calibrations.values():
        assert calibration.claimed.ece < 0.5


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
                case Cancel(number):
                    attempts.pop(number).cancelled(now)
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
        attempts[number].accepted(now)
        return machine.accepted(number, Accepted(1, chance.uniform(0.0, 0.5)), now)
    if what < 0.45:
        attempts.pop(number).answered({"queue": 0.0, "compute": 0.02}, None, now)
        return machine.answered(number, now)
    if what < 0.5:
        error: ServeError = GONE if chance.random() < 0.1 else Overloaded("full")  # fallbacks draw on the purse too
        attempts.pop(number).failed(error, now, chance.random())
        return machine.failed(number, error, now)
    return []
