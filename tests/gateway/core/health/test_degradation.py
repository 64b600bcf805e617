"""What ails a target: what begins and ends a condition, which lever it pulls, and that nothing flaps."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.ejection import SLOW_START_S
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkRtt, LinkUp
from gateway.core.fleet.target import TargetView
from gateway.core.health.degradation import HOLD_S, WIDER, Condition, ConditionChange, Degradation, Name
from gateway.core.health.detectors import COLD_ANSWERS, IDLE_S
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.observe.conditions import MOST_SERIES, condition_family, conditions_json
from tests.support.gateway.fleets import NOW, ask, fleet_of, offer, variant
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.offers import ModelOffer, ModelState, WorkerReport
from tidegate.outcome import InternalError
from tidegate.types import LoadReport

INT8 = ("minilm", "1", "int8")
MIB = 2**20


def names(subject: Degradation) -> list[Name]:
    return sorted(subject.active)


class Life:
    """One target's life, second by second: answers and looks."""

    def __init__(self) -> None:
        self.subject = Degradation()
        self.now = NOW
        self.changes: list[ConditionChange] = []

    def answers(
        self, count: int, times: float = 1.0, *, every_s: float = 1.0, spread: float = 0.1, seed: int = 0
    ) -> None:
        draw = Random(seed)
        for _ in range(count):
            self.now += every_s
            self.subject.answered(INT8, 0.010, 0.010 * times * exp(draw.gauss(0.0, spread)), self.now)
            self.look()

    def look(
        self,
        *,
        rtt_s: float = 0.003,
        wait_s: float = 0.0,
        conditions: DeviceConditions = DeviceConditions(),  # noqa: B008
    ) -> None:
        self.subject.look(self.now, rtt_s=rtt_s, wait_s=wait_s, conditions=conditions)
        self.changes += self.subject.take_changes()

    def seconds(
        self,
        count: int,
        *,
        rtt_s: Callable[[int], float] = lambda _: 0.003,
        wait_s: Callable[[int], float] = lambda _: 0.0,
        conditions: Callable[[int], DeviceConditions] = lambda _: DeviceConditions(),
    ) -> None:
        for second in range(count):
            self.now += 1.0
            self.look(rtt_s=rtt_s(second), wait_s=wait_s(second), conditions=conditions(second))


# slow_drift


def test_a_device_that_becomes_half_as_slow_again_is_told_with_the_number_and_forgiven_when_it_is_over() -> None:
    life = Life()
    life.answers(300)
    assert names(life.subject) == []
    life.answers(60, 1.5, seed=1)
    assert names(life.subject) == ["slow_drift"]
    assert "minilm int8: compute takes 1." in life.subject.active["slow_drift"].evidence
    life.answers(300, seed=2)
    assert names(life.subject) == []
    assert [change.begun for change in life.changes] == [True, False]


def test_a_device_that_was_always_slower_than_its_table_is_as_usual() -> None:
    life = Life()
    life.answers(600, 3.0)
    assert names(life.subject) == []


def test_compute_that_creeps_up_over_the_hour_is_told() -> None:
    life = Life()
    life.answers(300)
    for minute in range(50):
        life.answers(30, 1.0 + 0.008 * minute, every_s=2.0, spread=0.02, seed=minute)
    assert "crept" in life.subject.active["slow_drift"].evidence


def test_a_tail_that_has_grown_is_told_though_the_median_has_not_moved() -> None:
    life, draw = Life(), Random(5)
    life.answers(4000, spread=0.05, every_s=0.2)
    for _ in range(4000):
        life.now += 0.2
        life.subject.answered(INT8, 0.010, 0.010 * (6.0 if draw.random() < 0.08 else 0.95), life.now)
        life.look()
    assert "p95/p50" in life.subject.active["slow_drift"].evidence


def test_an_episode_that_comes_back_at_once_is_one_condition() -> None:
    life = Life()
    life.answers(300)
    life.answers(80, 2.0)
    for seed in range(3):
        life.answers(15, seed=seed)  # not yet worked off: that takes 26
        life.answers(60, 2.0, seed=seed)
    assert [change.begun for change in life.changes] == [True]


# cold_cache


def test_the_first_answers_after_long_idleness_are_cold_and_not_a_drift() -> None:
    life = Life()
    life.answers(200)
    life.now += IDLE_S + 1.0
    life.answers(8, 4.0)
    assert names(life.subject) == ["cold_cache"]
    life.answers(COLD_ANSWERS, 1.0)
    life.seconds(int(HOLD_S) + 3)
    assert names(life.subject) == []
    assert [change.condition.name for change in life.changes] == ["cold_cache", "cold_cache"]


def test_a_new_process_ends_what_ailed_the_old_one_and_is_cold_at_first() -> None:
    life = Life()
    life.answers(300)
    life.answers(80, 2.0)
    life.subject.new_process(life.now)
    assert names(life.subject) == []
    life.answers(6, 3.0)
    assert names(life.subject) == ["cold_cache"]


# error_burst


def test_failures_in_numbers_are_a_burst_and_scattered_ones_are_none() -> None:
    subject = Degradation()
    for number in range(5000):
        subject.ended(failed=number % 100 == 0, now=NOW)
    assert names(subject) == []
    for _ in range(4):
        subject.ended(failed=True, now=NOW)
    assert names(subject) == ["error_burst"]
    assert "of the last 50 attempts failed" in subject.active["error_burst"].evidence


# link_regime


def test_round_trips_that_stay_long_are_another_regime_and_passing_weather_is_none() -> None:
    life = Life()
    life.seconds(300, rtt_s=lambda second: 0.050 if second % 12 == 0 else 0.006)
    assert names(life.subject) == []
    life.seconds(45, rtt_s=lambda _: 0.040)
    assert names(life.subject) == ["link_regime"]
    assert "round trips take 40.0 ms" in life.subject.active["link_regime"].evidence
    life.seconds(60, rtt_s=lambda _: 0.006)
    assert names(life.subject) == []


# queue_buildup


def test_a_wait_that_is_long_and_grows_is_a_build_up_and_a_steady_one_is_none() -> None:
    life, draw = Life(), Random(7)
    life.seconds(300, wait_s=lambda _: 0.4 * draw.random())
    assert names(life.subject) == []
    life.seconds(40, wait_s=lambda second: 0.05 * second + 0.02 * draw.random())
    assert names(life.subject) == ["queue_buildup"]
    assert "s of work wait" in life.subject.active["queue_buildup"].evidence
    life.seconds(30)
    assert names(life.subject) == []


# memory_leak


def test_memory_that_grows_and_will_be_full_within_hours_is_a_leak_and_a_sawtooth_is_none() -> None:
    def device(rss_mib: float) -> DeviceConditions:
        return DeviceConditions(memory_bytes=int(rss_mib * MIB), memory_limit_bytes=2048 * MIB)

    life = Life()
    life.seconds(3600, conditions=lambda second: device(400.0 + second % 97))
    assert names(life.subject) == []
    life.seconds(3600, conditions=lambda second: device(400.0 + 0.1 * second + second % 97))
    assert names(life.subject) == ["memory_leak"]
    assert "MiB an hour" in life.subject.active["memory_leak"].evidence


def test_memory_that_a_device_does_not_tell_is_no_leak() -> None:
    life = Life()
    life.seconds(100, conditions=lambda second: DeviceConditions(memory_bytes=second * MIB))
    assert names(life.subject) == []


# the agent's event loop


def test_what_a_device_says_of_its_event_loop_is_a_condition_for_as_long_as_it_says_so() -> None:
    life = Life()
    life.seconds(3, conditions=lambda _: DeviceConditions(held_up_s=1.2))
    assert names(life.subject) == ["loop_stalled"]
    assert "1.2 s" in life.subject.active["loop_stalled"].evidence
    life.seconds(15, conditions=lambda _: DeviceConditions())
    assert names(life.subject) == []


# thermal


def test_heat_has_two_thresholds() -> None:
    life = Life()
    life.seconds(20, conditions=lambda _: DeviceConditions(temperature_c=84.0))
    assert names(life.subject) == []
    life.seconds(5, conditions=lambda _: DeviceConditions(temperature_c=86.0))
    assert names(life.subject) == ["thermal"]
    life.seconds(100, conditions=lambda second: DeviceConditions(temperature_c=80.0, throttled=second % 7 == 0))
    assert names(life.subject) == ["thermal"]
    life.seconds(15, conditions=lambda _: DeviceConditions(temperature_c=70.0))
    assert [change.begun for change in life.changes] == [True, False]


# for all of them

steps = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),
        st.sampled_from(["answer", "fail", "succeed", "look", "renew"]),
        st.floats(0.1, 20.0),
    ),
    max_size=250,
)


@pytest.mark.slow
@given(steps)
def test_conditions_begin_and_end_in_turn_and_last_for_the_hold_unless_the_process_ended(
    told: list[tuple[float, str, float]],
) -> None:
    subject, now, renewed_at = Degradation(), NOW, -1.0
    held: dict[str, Condition] = {}
    for gap_s, what, size in told:
        now += gap_s
        hot = DeviceConditions(temperature_c=min(150.0, 10.0 * size), throttled=size > 10.0)
        match what:
            case "answer":
                for _ in range(10):
                    subject.answered(INT8, 0.010, 0.010 * size, now)
            case "look":
                subject.look(now, rtt_s=0.01 * size, wait_s=size, conditions=hot)
            case "renew":
                subject.new_process(now)
                renewed_at = now
            case _:
                subject.ended(failed=what == "fail", now=now)
        for change in subject.take_changes():
            name = change.condition.name
            assert change.begun is (name not in held)
            if change.begun:
                held[name] = change.condition
            else:
                assert change.at - held.pop(name).since >= HOLD_S or change.at == renewed_at
        assert set(subject.active) == set(held)


# levers


def two_edges() -> tuple[Fleet, TargetView]:
    fleet = fleet_of(edge_a=variant("int8"), edge_b=variant("int8"), pool_p=variant())
    return fleet, fleet.targets["edge/a"]


def answered(fleet: Fleet, target: TargetView, times: float, count: int, at: float) -> float:
    """That many answers from the target, through the evidence that the conductor notes."""
    placer = UtilityPlacer(fleet)
    for key in range(count):
        at += 1.0
        asked = ask(at=at)
        others = [one for one in fleet.targets if one != target.id]
        chosen = placer.decide(asked, at, others).chosen
        assert chosen is not None
        attempt = AttemptTelemetry(chosen, key, asked.units, at)
        attempt.answered({"queue": 0.0, "compute": 0.010 * times}, None, at + 0.010 * times + 0.002)
        fleet.fold(LinkRtt(target.id, 0.002), at + 0.09)
    return at


def test_a_drift_is_relearned_at_once_and_widens_predictions_until_it_is_over() -> None:
    fleet, target = two_edges()
    told: list[tuple[str, str, bool]] = []
    fleet.on_condition = lambda one, change: told.append((one.id, change.condition.name, change.begun))
    (cost,) = [one.cost for one in fleet.offered("minilm", "1") if one.target is target]
    at = answered(fleet, target, 1.0, 200, NOW)
    usual = cost.sigma
    at = answered(fleet, target, 2.0, 60, at)
    assert told == [("edge/a", "slow_drift", True)]
    assert cost.factor == pytest.approx(2.0, rel=0.1)
    assert cost.sigma >= WIDER * usual
    answered(fleet, target, 1.0, 400, at)
    assert told[-1] == ("edge/a", "slow_drift", False)
    assert cost.sigma == pytest.approx(usual, rel=0.2)


def test_a_cold_cache_starts_slowly() -> None:
    fleet, target = two_edges()
    at = answered(fleet, target, 1.0, 200, NOW + 2 * SLOW_START_S) + IDLE_S + 1.0
    assert target.plain_from < at
    answered(fleet, target, 4.0, 8, at)
    assert "cold_cache" in target.degradation.active
    assert target.plain_from > at


def test_heat_stays_a_price_until_it_is_over() -> None:
    fleet, target = two_edges()
    usual = target.price

    def beat(at: float, degrees: float) -> None:
        fleet.heard(target.id, load=None, doubt="", conditions=DeviceConditions(temperature_c=degrees), now=at)
        fleet.fold(LinkRtt(target.id, 0.002), at)

    beat(NOW + 1.0, 90.0)
    hot = target.price
    assert hot > 3.0 * usual
    beat(NOW + 2.0, 76.0)  # cooler, but not cool
    assert target.price == pytest.approx(hot)
    for second in range(15):
        beat(NOW + 3.0 + second, 50.0)
    assert target.price == pytest.approx(usual)


def test_a_leak_makes_a_second_dearer() -> None:
    fleet, target = two_edges()
    usual = target.price
    for minute in range(60):
        told = DeviceConditions(memory_bytes=(400 + 20 * minute) * MIB, memory_limit_bytes=2048 * MIB)
        at = NOW + 61.0 * minute
        fleet.heard(target.id, load=None, doubt="", conditions=told, now=at)
        fleet.fold(LinkRtt(target.id, 0.002), at)
    assert "memory_leak" in target.degradation.active
    assert target.price == pytest.approx(1.5 * usual)


def build_up(fleet: Fleet, target: TargetView) -> float:
    at = NOW
    for second in range(60):
        at = NOW + 1.0 + second
        target.queue_estimate.report(LoadReport(1, second + 1, second, 1, 0.02 * second), "link", at)
        fleet.fold(LinkRtt(target.id, 0.002), at)
    assert "queue_buildup" in target.degradation.active
    return at


def test_hedges_stay_away_from_a_queue_that_builds_up_while_somebody_else_is_there() -> None:
    fleet, target = two_edges()
    crossing = ChanceHedging(UtilityPlacer(fleet))
    first = UtilityPlacer(fleet).decide(ask(), NOW, ["edge/a", "pool/p"]).chosen
    assert first is not None
    assert sorted(crossing.avoid([first])) == ["edge/b"]
    build_up(fleet, target)
    assert sorted(crossing.avoid([first])) == ["edge/a", "edge/b"]
    fleet.remove("pool/p")
    assert sorted(crossing.avoid([first])) == ["edge/b"]
    fleet.remove("edge/a")
    assert fleet.unhedged == set()


def test_a_request_that_may_have_to_leave_its_target_goes_also_where_hedges_do_not() -> None:
    fleet, target = two_edges()
    crossing = ChanceHedging(UtilityPlacer(fleet))
    first = UtilityPlacer(fleet).decide(ask(), NOW, ["edge/a", "pool/p"]).chosen
    assert first is not None
    at = build_up(fleet, target)
    own = first.offered.target
    own.breaker.trip("it promised answers and gave none", at, 0.5)
    own.ejected = True
    assert sorted(crossing.avoid([first])) == ["edge/b"]


def test_hedges_go_where_they_should_not_before_they_go_nowhere() -> None:
    fleet, target = two_edges()
    crossing = ChanceHedging(UtilityPlacer(fleet))
    first = UtilityPlacer(fleet).decide(ask(), NOW, ["edge/a", "pool/p"]).chosen
    assert first is not None
    build_up(fleet, target)
    fleet.targets["pool/p"].ejected = True
    assert sorted(crossing.avoid([first])) == ["edge/b"], "the only other one does not work"


def test_failures_through_the_evidence_keep_hedges_away_and_a_new_process_is_given_a_chance() -> None:
    fleet, target = two_edges()
    chosen = UtilityPlacer(fleet).decide(ask(), NOW, ["edge/b", "pool/p"]).chosen
    assert chosen is not None
    for key in range(4):
        AttemptTelemetry(chosen, key, 16.0, NOW).failed(InternalError("broken"), NOW + 0.01, 0.5)
    fleet.fold(LinkRtt(target.id, 0.002), NOW + 1.0)
    assert fleet.unhedged == {"edge/a"}
    fleet.fold(LinkUp("edge/a", "edge/a", 2, (offer(variant("int8")),)), NOW + 2.0)
    assert fleet.unhedged == set()


def lost(count: int, state: ModelState = "ready") -> ModelOffer:
    return ModelOffer("minilm", "1", (variant(),), state=state, worker=WorkerReport(count, "hung for 0.6 s"))


def test_a_worker_that_hung_is_a_condition_of_its_model_until_it_has_been_back_for_the_hold() -> None:
    one = Degradation()
    one.offered([lost(3)], NOW)
    assert not one.active, "they may have been lost before this gateway began"
    one.offered([lost(4, "loading")], NOW + 1.0)
    condition = one.active["worker_lost"]
    assert (condition.model, condition.evidence) == ("minilm", "minilm: hung for 0.6 s; 4 lost since its start")
    one.offered([lost(3)], NOW + 1.1)  # an older message, by the slower path
    for second in range(2, 40):
        one.look(NOW + second, rtt_s=0.002, wait_s=0.0)
        assert ("worker_lost" in one.active) == (second < 2 + HOLD_S)
    one.offered([lost(5, "bad")], NOW + 50.0)
    for second in range(51, 90):
        one.look(NOW + second, rtt_s=0.002, wait_s=0.0)
    assert "worker_lost" in one.active, "it is not back"
    one.new_process(NOW + 90.0)
    one.offered([lost(1)], NOW + 90.0)
    assert not one.active


# told


def test_what_ails_is_told_as_json_and_as_a_bounded_metric() -> None:
    fleet, target = two_edges()
    at = build_up(fleet, target)
    (told,) = conditions_json(fleet, at + 5.0)
    assert (told["target"], told["condition"], told["variant"]) == ("edge/a", "queue_buildup", None)
    assert told["for_s"] >= 5.0
    (sample,) = condition_family(fleet).samples
    assert sample.labels == {"target": "edge/a", "condition": "queue_buildup"}
    crowd = fleet_of(**{f"edge_{n}": variant("int8") for n in range(MOST_SERIES + 50)})
    for one in crowd.targets.values():
        one.degradation.active["thermal"] = Condition("thermal", NOW, "90 °C")
    assert len(condition_family(crowd).samples) == MOST_SERIES
