"""When a second attempt pays: the crossing of two chances, the looks before it, the last resort, failure domains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import SLACK_S
from gateway.core.estimate.shadow_price import ShadowPrice
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import MIN_GAIN, MOST_GAIN, SOONEST_S, ChanceHedging, failure_domain
from gateway.core.request.hedging import CUT_OFF, HOPELESS, STALLED, DeadlineHedging, Hedge, PendingAttempt
from tests.support.gateway.crossing import Scene, edge_and_pool
from tests.support.gateway.fleets import NOW, ask, variant

# the crossing


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
    assert scene.plan(after_s=0.050, promised_in_s=3.0) == Hedge(NOW + 0.050, instead=HOPELESS)
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
    scene.placer.prices = scene.placer.prices._replace(cost=40.0)
    assert scene.plan(after_s=0.5) == Hedge(NOW + 0.5), "the bill chooses where, and not whether there is a hedge"


def test_a_server_that_acknowledges_nothing_is_hedged_once_its_answer_takes_longer_than_its_answers_do() -> None:
    scene = edge_and_pool()
    by_prediction = scene.plan(after_s=0.050)
    assert by_prediction is not None
    assert by_prediction.at > NOW + 0.1
    for _ in range(100):
        scene.first.offered.cost.answer_times.record(16.0, 0.010, NOW - 1.0)
    assert scene.plan(after_s=0.050) == Hedge(NOW + 0.050)
    promised = scene.plan(after_s=0.050, promised_in_s=0.3)
    assert promised is not None
    assert promised.at > NOW + 0.3, "a promise is the better witness"


def test_no_hedge_in_overload() -> None:
    scene = edge_and_pool()
    scene.crossing = ChanceHedging(scene.placer, overloaded=lambda: True)
    assert scene.plan(after_s=0.5) is None
    assert scene.plan(after_s=0.050, promised_in_s=3.0) is None, "nor is anybody moved"


def unheard(*, is_probe: bool = False) -> tuple[Scene, PendingAttempt]:
    """A request on its way over a path that acknowledges in 10 ms, from which nothing has come, in overload."""
    scene = edge_and_pool()
    link = scene.fleet.targets["edge/a"].link
    link.sent(1, NOW - 0.5)
    link.accepted(1, NOW - 0.49)
    link.sent(2, NOW)
    scene.crossing = ChanceHedging(scene.placer, overloaded=lambda: True)
    return scene, PendingAttempt(scene.first, NOW, is_probe=is_probe)


def planned(scene: Scene, watched: PendingAttempt, after_s: float) -> Hedge | None:
    return scene.crossing.plan(scene.ask, watched, scene.elsewhere(NOW + after_s), NOW + after_s)


def test_an_attempt_on_a_path_that_has_gone_silent_moves_also_in_overload() -> None:
    scene, watched = unheard()
    assert planned(scene, watched, 0.030) is None, "acks take so long now and then"
    assert planned(scene, watched, 0.300) == Hedge(NOW + 0.300 + SLACK_S, instead=CUT_OFF), "to be seen twice"
    assert planned(scene, watched, 0.330) == Hedge(NOW + 0.330, instead=CUT_OFF)


def test_nothing_moves_that_would_be_late_elsewhere_too_nor_a_probe_nor_after_the_path_has_spoken() -> None:
    scene, watched = unheard()
    planned(scene, watched, 0.300)
    assert planned(scene, watched, 0.999) is None
    scene, probe = unheard(is_probe=True)
    planned(scene, probe, 0.300)
    assert planned(scene, probe, 0.330) is None
    scene, watched = unheard()
    planned(scene, watched, 0.300)
    scene.fleet.targets["edge/a"].link.heard(NOW + 0.325)
    assert planned(scene, watched, 0.330) is None


def test_a_queue_is_no_reason_against_a_hedge_but_what_it_burdens_others_with_is() -> None:
    scene = edge_and_pool()
    queue_estimate = scene.fleet.targets["pool/main"].queue_estimate
    for key in range(4):
        queue_estimate.launch(key, 0.020, NOW)
    queue_estimate.congestion = ShadowPrice()
    assert scene.plan(after_s=0.5) == Hedge(NOW + 0.5)

    decision = scene.elsewhere(NOW + 0.5)
    assert decision.chosen is not None
    assert decision.chosen.claim is not None
    for externality, hedges in ((0.5, True), (0.9, False)):
        chosen = decision.chosen._replace(claim=decision.chosen.claim._replace(externality=externality))
        watched = PendingAttempt(scene.first, NOW)
        planned = scene.crossing.plan(scene.ask, watched, decision._replace(chosen=chosen), NOW + 0.5)
        assert (planned is not None) is hedges
    bare = decision._replace(chosen=decision.chosen._replace(claim=None))
    assert scene.crossing.plan(scene.ask, PendingAttempt(scene.first, NOW), bare, NOW + 0.5) is not None


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


@pytest.mark.slow
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
        scene.ask, PendingAttempt(scene.first, NOW, promised_in_s and NOW + promised_in_s), decision, now
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
    scene.first = scene.first._replace(claim=None)
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
    watched = PendingAttempt(scene.first, NOW, NOW + promised_in_s)
    overdue_at = watched.promised_at + scene.first.margin_s  # type: ignore[operator]
    later = min(overdue_at, NOW + 0.010 + 0.3)
    assert scene.crossing.second_look(scene.ask, watched, NOW + 0.010) == (NOW + 0.010 if at_once else later)


def test_an_answer_that_is_promised_for_much_later_moves_once_its_target_has_stalled() -> None:
    scene = edge_and_pool()
    target, watched = scene.fleet.targets["edge/a"], PendingAttempt(scene.first, NOW, NOW + 0.7)
    target.progress.due(1, NOW, NOW)  # another one, which it owes
    for look_ms in range(0, 240, 20):
        target.takes(NOW + look_ms / 1e3)
    look_at = scene.crossing.second_look(scene.ask, watched, NOW + 0.010)
    assert look_at is not None
    assert look_at < NOW + 0.35, "long before it is overdue itself"
    decision = scene.elsewhere(look_at)
    assert scene.crossing.plan(scene.ask, watched, decision, look_at) == Hedge(look_at, instead=STALLED)


def test_without_chances_a_promise_is_believed() -> None:
    scene = edge_and_pool()
    rule, watched = DeadlineHedging(), PendingAttempt(scene.first, NOW, NOW + 0.9)
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
    assert failure_domain(TargetSpec("edge/a", "edge", address)) == domain


def test_a_hedge_avoids_the_whole_machine() -> None:
    fleet = Fleet(lambda model, version: "tokens")
    for target_id, address in (("edge/a", "10.0.0.7:1"), ("edge/b", "10.0.0.7:2"), ("edge/c", "10.0.0.8:1")):
        fleet.add(TargetSpec(target_id, "edge", address), NOW)
    scene = edge_and_pool()
    crossing = ChanceHedging(UtilityPlacer(fleet))
    tried = scene.first._replace(offered=scene.first.offered._replace(target=fleet.targets["edge/a"]))
    assert sorted(crossing.avoid([tried])) == ["edge/a", "edge/b"]
    assert DeadlineHedging().avoid([tried]) == ["edge/a"]
    assert "DeadlineHedging" in repr(DeadlineHedging())
