"""Races to the first token: what one is worth, when it begins, and what it takes from the purse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.placement.ask import Ask
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.placement.utility import AnswerWorth, UtilityPlacer
from gateway.core.request.first_token_race import RaceRunner, has_room, prompt_harm, race_gain
from gateway.core.request.hedge_by_chance import SOONEST_S, ChanceHedging
from gateway.core.request.hedging import RACE, Hedge, PendingAttempt
from gateway.core.request.machine import Cancel, Launch, RequestMachine
from gateway.core.request.token_budget import TokenBudget
from tests.support.gateway.fleets import NOW, ask, fleet_of
from tidegate.fleet.offers import VariantOffer

WORTH = AnswerWorth(1.0, 0.3)
CHEAP = RaceRunner(WORTH, 0.02, 0.25)


@pytest.mark.parametrize(("left", "fresh", "gain"), [
    (1.0, 1.0, 0.0),  # the first is sure: nothing is to be gained
    (0.5, 0.0, 0.0),
    (0.5, 0.8, 0.5 * 0.8 * 0.7),
    (0.0, 1.0, 0.7),
])  # fmt: skip
def test_a_race_gains_what_the_first_would_miss(left: float, fresh: float, gain: float) -> None:
    found = race_gain(CHEAP, left, CHEAP, fresh, dearness=0.0)
    assert found.gain == pytest.approx(gain)
    assert found.share == pytest.approx(0.25), "whichever loses, a quarter of an answer was its prompt"


def test_one_that_speaks_sooner_and_then_dawdles_is_no_gain() -> None:
    dawdler = CHEAP._replace(worth=AnswerWorth(0.3, 0.3))
    assert race_gain(CHEAP, 0.8, dawdler, 0.9, dearness=0.0).gain < 0.0


def test_a_dear_second_costs_its_prompt_where_it_loses_and_the_difference_where_it_wins() -> None:
    dear = RaceRunner(WORTH, 0.2, 0.1)
    lost = race_gain(CHEAP, 1.0, dear, 0.0, dearness=3.0)
    assert lost == (pytest.approx(-3.0 * 0.02), pytest.approx(0.1))
    won = race_gain(CHEAP, 0.0, dear, 1.0, dearness=3.0)
    assert won.gain == pytest.approx(0.7 - 3.0 * (0.2 - 0.75 * 0.02))
    thrift = race_gain(dear, 0.0, CHEAP, 1.0, dearness=3.0)
    assert thrift.gain == pytest.approx(0.7), "that a cheaper one wins is no reason to race"


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_no_race_takes_more_than_a_whole_attempt(left: float, fresh: float, first: float, second: float) -> None:
    found = race_gain(
        CHEAP._replace(prompt_share=first), left, CHEAP._replace(prompt_share=second), fresh, dearness=3.0
    )
    assert -1e-9 <= found.share <= 1.0 + 1e-9


# in the hedging


def writer(*, prefill_s: float = 0.002, step_s: float = 0.02, slots: int = 8, name: str = "int4") -> VariantOffer:
    points = ((1.8, 8 * prefill_s), (16.8, 8 * prefill_s + 15 * step_s), (13.8, 128 * prefill_s))
    return VariantOffer(name, name, tuple(sorted(points)), None, 4096, None, slots=slots)


class RaceScene:
    """Two targets with links whose round trips are 10 ms and now and then 400; a request was placed on the first."""

    def __init__(self, *, ttft_s: float | None = 0.45, races: bool = True, **variants: Any) -> None:
        self.fleet = fleet_of(**(variants or {"edge_a": writer(), "edge_b": writer()}))
        for target in self.fleet.targets.values():
            for index in range(16):
                target.link.record(0.400 if index % 4 == 3 else 0.010, NOW - 1.0 + index / 100)
        self.placer = UtilityPlacer(self.fleet)
        self.tokens = TokenBudget()
        self.hedging = ChanceHedging(self.placer, tokens=self.tokens, races=races)
        first_by = None if ttft_s is None else NOW + ttft_s
        lengths = (10.0, 20.0, 40.0, 80.0)
        asked = GenerationAsk(11.0, 11.0, 1010.0, lengths, 37.5, 1000, first_by=first_by, next_s=0.05)
        self.ask: Ask = ask(budget_s=30.0, units=48.0, longest_row=1100)._replace(generation=asked)
        self.first = self.placed(next(iter(self.fleet.targets)))

    def placed(self, target_id: str) -> Candidate:
        others = [one for one in self.fleet.targets if one != target_id]
        chosen = self.placer.decide(self.ask, NOW, others).chosen
        assert chosen is not None
        return chosen

    def elsewhere(self, now: float) -> Decision:
        return self.placer.decide(self.ask, now, self.hedging.avoid([self.first]))

    def plan(self, after_s: float) -> Hedge | None:
        now = NOW + after_s
        return self.hedging.plan(self.ask, PendingAttempt(self.first, NOW), self.elsewhere(now), now)


def test_a_race_begins_at_once_where_later_the_other_would_be_late_as_well() -> None:
    planned = RaceScene(ttft_s=0.45).plan(after_s=0.01)
    assert planned is not None
    assert planned.reason == RACE and 0.0 < planned.share < 0.5
    assert planned.at == NOW + 0.01


def test_with_more_time_a_race_waits_until_most_first_tokens_are_here() -> None:
    planned = RaceScene(ttft_s=0.7).plan(after_s=0.01)
    assert planned is not None
    assert planned.reason == RACE
    assert NOW + 0.25 < planned.at < NOW + 0.5, "after the usual 210 ms, and 210 before the budget is over"


def test_without_races_a_second_attempt_waits_until_it_is_the_better_bet() -> None:
    for after_s in (0.01, 0.1, 0.2):
        planned = RaceScene(races=False).plan(after_s)
        assert planned is None or (planned.reason == "hedge" and planned.share == 1.0)


def test_a_target_without_room_is_not_raced_to() -> None:
    scene = RaceScene()
    second = scene.elsewhere(NOW).chosen
    assert second is not None and second.tokens is not None
    assert has_room(second)
    assert not has_room(second._replace(wait_s=0.1))
    assert not has_room(second._replace(tokens=second.tokens._replace(batch=5.0)))
    for _ in range(4):
        second.offered.cost.pace.launched(1.0)
    planned = scene.plan(after_s=0.01)
    assert planned is None or planned.reason != RACE


def test_a_prompt_harms_those_whose_batch_it_joins() -> None:
    scene = RaceScene()
    second = scene.elsewhere(NOW).chosen
    assert second is not None and second.tokens is not None
    assert prompt_harm(second, scene.ask, WORTH) == 0.0, "nobody is there"
    three = second._replace(tokens=second.tokens._replace(batch=4.0))
    assert prompt_harm(three, scene.ask, WORTH) == pytest.approx(3 * second.tokens.first_s / (0.05 * 37.5) * 0.7)


def test_no_race_in_overload_nor_without_tokens_in_the_purse() -> None:
    scene = RaceScene()
    scene.hedging = ChanceHedging(scene.placer, overloaded=lambda: True, races=True)
    assert scene.plan(after_s=0.2) is None
    scene = RaceScene()
    scene.tokens.tokens = 0.1
    assert not scene.hedging.may_hedge(0.2)
    assert scene.hedging.may_hedge(0.05)
    assert scene.tokens.tokens == pytest.approx(0.05)


def test_a_surely_kept_first_token_is_looked_after_when_it_is_overdue_and_a_doubtful_one_at_once() -> None:
    doubtful, sure = RaceScene(), RaceScene(ttft_s=3.0)
    for scene, at_once in ((doubtful, True), (sure, False)):
        other = scene.elsewhere(NOW).chosen
        assert other is not None
        at = scene.hedging.first_look(scene.ask, scene.first, other, NOW)
        assert at is not None and (at == pytest.approx(NOW + SOONEST_S)) is at_once
        watched = PendingAttempt(scene.first, NOW, NOW + 5.0)
        second_look = scene.hedging.second_look(scene.ask, watched, NOW + 0.02)
        assert (second_look == NOW + 0.02) is at_once


def test_the_machine_launches_the_race_and_the_first_token_cancels_the_loser() -> None:
    scene = RaceScene()
    machine = RequestMachine(scene.ask, scene.placer, hedges=scene.hedging)
    actions, now = machine.arrived(NOW), NOW
    while not any(isinstance(one, Launch) and one.attempt == 1 for one in actions):
        now = actions[-1].at  # type: ignore[union-attr]
        assert now < NOW + 0.45
        actions = machine.timer(now)
    assert machine.reasons[1] == RACE
    assert scene.tokens.tokens > 30.0 + 0.05 - 0.5 - 1e-9, "a prompt's share of a token, not a whole one"
    assert [one.attempt for one in machine.begun(0, now + 0.01) if isinstance(one, Cancel)] == [1]
    assert machine.begun(1, now + 0.02) == []


def test_a_pin_holds_for_the_second_as_well() -> None:
    scene = RaceScene(edge_a=writer(), pool_main=writer(prefill_s=0.0001, slots=32, name="bf16"))
    assert scene.plan(after_s=0.2) is not None
    scene.ask = scene.ask._replace(pin="edge")
    assert scene.plan(after_s=0.2) is None
