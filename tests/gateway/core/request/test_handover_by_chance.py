"""The rule by which answers are handed over: what is left of one, where its rest is worth more, and when it may go."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.placement.ask import Ask
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.handover import LONGEST_PAUSE_S, HandoverPlan
from gateway.core.request.handover_by_chance import AnswerLeft, ChanceHandovers
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.machine import HANDOVER_LOOK_S, Action, Keep, Launch, RequestMachine, WakeAt
from gateway.core.request.resumption import Resumption, ResumptionTerms
from gateway.core.request.token_budget import TokenBudget
from tests.support.gateway.fleets import NOW, ask, spec, variant
from tidegate.fleet.offers import ModelOffer
from tidegate.token_sink import TokenBatch

LENGTHS = (50.0, 100.0, 150.0)
TERMS = ResumptionTerms(prompt_tokens=10, max_tokens=200, prompt_weight=0.1, next_s=0.05)


@pytest.mark.parametrize(
    ("left", "starts_s", "step_s", "kept", "whole"),
    [
        (AnswerLeft(1.0, 0.0, 60.0, 0.05, LENGTHS), 0.0, 0.02, 1.0, 1.0),
        (AnswerLeft(1.0, 0.0, 60.0, 0.05, LENGTHS), 0.0, 0.2, 0.0, 1.0),
        (AnswerLeft(1.0, 0.0, 60.0, None, LENGTHS), 0.0, 0.2, 1.0, 1.0),
        (AnswerLeft(1.0, 0.0, 1.0, 0.05, LENGTHS), 0.0, 0.1, 0.0, 0.0),
        (AnswerLeft(1.0, 0.0, 7.5, 0.9, LENGTHS), 0.0, 0.1, 1 / 3, 1 / 3),  # the shortest of three
        (AnswerLeft(1.0, 0.0, 60.0, 0.05, LENGTHS), 4.0, 0.02, 1 / 3, 1.0),  # a late start is made good by the longest
        (AnswerLeft(101.0, 9.0, 60.0, 0.05, LENGTHS), 0.0, 0.02, 1 / 3, 1.0),  # and what was late before
        (AnswerLeft(1.0, 0.0, -1.0, 0.05, LENGTHS), 0.0, 0.02, 0.0, 0.0),
    ],
)
def test_the_chances_of_what_is_left(
    left: AnswerLeft, starts_s: float, step_s: float, kept: float, whole: float
) -> None:
    assert left.chances(starts_s, step_s, 0.02) == pytest.approx((kept, whole), abs=0.02)


class Two:
    """A slow edge that speaks, and a place with quick tokens. Args: step_s: of the edge, and of the other one."""

    def __init__(self, *step_s: float, purse: TokenBudget | None = None, overloaded: bool = False) -> None:
        self.fleet = Fleet(lambda model, version: "tokens")
        for id, each_s in zip(("edge/a", "pool/b"), step_s, strict=True):
            one = replace(variant("int4"), slots=4, cost=((1.0, each_s), (601.0, 601.0 * each_s)))
            self.fleet.add(spec(id), NOW)
            self.fleet.fold(LinkUp(id, id, 1, (ModelOffer("minilm", "1", (one,), digest="same"),)), NOW)
        self.placer = UtilityPlacer(self.fleet)
        hedging = ChanceHedging(self.placer, tokens=purse)
        self.handovers = ChanceHandovers(self.placer, hedging, overloaded=lambda: overloaded)
        self.answer = AnswerSoFar(10_000)

    def ask(self, first_by: float | None = None) -> Ask:
        generation = GenerationAsk(2.0, 2.0, 201.0, LENGTHS, 100.0, 200, first_by, 0.05, prompt_tokens=10)
        return ask(budget_s=60.0)._replace(generation=generation, units=101.0)

    def plan(self, tokens: int, each_s: float, terms: ResumptionTerms = TERMS) -> HandoverPlan | float:
        """After so many tokens of the edge."""
        whole, self.answer = self.ask(), AnswerSoFar(10_000)
        speaks = next(one for one in self.placer.decide(whole, NOW).candidates if one.target.id == "edge/a")
        resumption, now = Resumption(terms, self.answer), NOW
        resumption.begun(speaks, now)
        self.answer.speaks(10_000, None, now)
        for _ in range(tokens):
            self.answer.took(TokenBatch(len(self.answer), (7,)), speaks.offered.cost.token_gaps, now)
            now += each_s
        rest = self.placer.decide(resumption.remaining(whole), now, ("edge/a",))
        return self.handovers.plan(whole, speaks, resumption, rest, now)


def test_what_is_written_too_slowly_goes_where_its_tokens_come_in_time() -> None:
    found = Two(0.08, 0.01).plan(10, 0.08)
    assert isinstance(found, HandoverPlan) and 0.0 < found.share < 0.5
    assert found.keeps_until is not None and found.gives_up_at >= found.keeps_until
    assert found.keeps_until - NOW - 0.8 == pytest.approx(LONGEST_PAUSE_S), "it is late, and later if it stays"


def test_where_both_give_the_same_text_nothing_is_kept_back() -> None:
    found = Two(0.08, 0.01).plan(10, 0.08, TERMS._replace(alone=frozenset({"int4"})))
    assert isinstance(found, HandoverPlan) and found.keeps_until is None


def test_what_is_ahead_of_its_budget_waits_for_its_second_target_as_long_as_that_lets_it() -> None:
    terms = TERMS._replace(next_s=0.5)
    found = Two(0.08, 0.01).plan(10, 0.08, terms)  # placed by 0.05, held by 0.5
    assert isinstance(found, HandoverPlan) and found.keeps_until is not None
    assert found.keeps_until == pytest.approx(NOW + 10 * 0.5)


@pytest.mark.parametrize(
    "stays",
    [Two(0.02, 0.01), Two(0.08, 0.2), Two(0.08, 0.01, overloaded=True)],
    ids=["well where it is", "slower there", "overloaded"],
)
def test_other_answers_stay(stays: Two) -> None:
    assert not isinstance(stays.plan(10, stays.fleet.targets["edge/a"].offers and 0.02), HandoverPlan)


def test_the_purse_of_hedges_bounds_what_is_computed_twice() -> None:
    purse = TokenBudget(share=0.0, cap=1.0)
    two = Two(0.08, 0.01, purse=purse)
    found = two.plan(10, 0.08)
    assert isinstance(found, HandoverPlan)
    while two.handovers.may_hand_over(found.share):
        pass
    assert 0.0 <= purse.tokens < found.share and purse.suppressed == 1


def test_the_machine_asks_the_second_beside_the_first_once() -> None:
    two = Two(0.08, 0.01)
    machine = RequestMachine(
        two.ask(),
        Only(two.placer, "edge/a"),
        resumption=Resumption(TERMS, two.answer),
        handovers=two.handovers,
    )
    machine.arrived(NOW)
    two.answer.speaks(10_000, None, NOW)
    actions: list[Action] = machine.begun(0, NOW)
    assert actions == [WakeAt(pytest.approx(NOW + HANDOVER_LOOK_S))]
    gaps = next(iter(two.placer.decide(two.ask(), NOW).candidates)).offered.cost.token_gaps
    two.answer.took(TokenBatch(0, (7,)), gaps, NOW)
    actions = machine.timer(NOW + HANDOVER_LOOK_S)
    keep, launch, wake = actions
    assert keep == Keep(0) and isinstance(launch, Launch) and isinstance(wake, WakeAt)
    assert (launch.attempt, launch.candidate.target.id, launch.answered) == (1, "pool/b", 1)
    assert machine.differed(0, NOW) == [], "the one that speaks cannot differ from itself"
    assert [type(one).__name__ for one in machine.differed(1, NOW + 0.1)] == ["Cancel", "Release", "WakeAt"]
    assert machine.begun(1, NOW + 0.1) == []
    two.answer.took(TokenBatch(1, (7,)), gaps, NOW + 0.15)
    assert [type(one) for one in machine.timer(NOW + 0.3)] == [WakeAt], "one is tried"


class Only:
    """First at one target; the rest of an answer anywhere."""

    def __init__(self, placer: UtilityPlacer, first: str) -> None:
        self._placer, self._first = placer, first

    def decide(self, ask: Ask, now: float, exclude: tuple[str, ...] = ()) -> object:
        others = tuple(id for id in self._placer.fleet.targets if id != self._first)
        return self._placer.decide(ask, now, exclude or others)
