"""Three chances of a generation, and placement by all of them."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.token_calibration import GenerationBudget
from gateway.core.estimate.token_pace import TokenPrediction
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.generation_time import GenerationAsk, begin_by, generation_time, made_late
from gateway.core.placement.utility import UtilityPlacer, UtilityWeights
from gateway.core.request.attempt import AttemptTelemetry, ComputedTokens, ComputedWork
from gateway.core.request.hedge_by_chance import ChanceHedging, shown_in_s
from gateway.core.request.hedging import PendingAttempt
from tests.support.gateway.fleets import NOW, ask, fleet_of, link_of
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import DeadlineExceeded
from tidegate.types import LoadReport

TOKENS = TokenPrediction(first_s=0.2, first_sigma=0.2, step_s=0.02, step_sigma=0.15, wait_variance=0.0, batch=1.0)
LENGTHS = (10.0, 20.0, 40.0, 60.0, 90.0, 150.0, 300.0, 800.0)


def writer(*, prefill_s: float = 0.002, step_s: float = 0.02, slots: int = 4, name: str = "int4") -> VariantOffer:
    """A generating variant as its warm-up measured it; a token of a prompt counts a tenth."""
    points = ((1.8, 8 * prefill_s), (16.8, 8 * prefill_s + 15 * step_s), (13.8, 128 * prefill_s))
    return VariantOffer(name, name, tuple(sorted(points)), None, 4096, None, slots=slots)


def generation(**changes: Any) -> GenerationAsk:
    asked = GenerationAsk(
        prompt_units=11.0, certain_units=11.0, most_units=1010.0, lengths=LENGTHS, mean_length=180.0, max_tokens=1000
    )
    return asked._replace(**changes)


def asking(budget_s: float = 30.0, **changes: Any) -> Ask:
    return ask(budget_s=budget_s, units=190.0, longest_row=1100)._replace(generation=generation(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [
    GenerationBudget(0.25, None, 30.0),
    GenerationBudget(None, 0.021, 30.0),
    GenerationBudget(None, None, 3.0),
    GenerationBudget(0.3, 0.022, 4.0),
])  # fmt: skip
def test_the_chances_are_those_of_drawing_all_of_it(budget: GenerationBudget) -> None:
    path = link_of(0.010, 0.011, 0.012, 0.010, 0.030, 0.011).path(NOW)
    raw = generation_time(path, 0.0, TOKENS, LENGTHS, trust=1.0).chances(budget, 0.0)
    draw, total = Random(1), [0, 0, 0]
    drawn = [0, 0, 0]
    for _ in range(20_000):
        (rtt_s,) = draw.choices(path.values_s, path.weights)
        first_s = rtt_s + TOKENS.first_s * exp(TOKENS.first_sigma * draw.gauss(0.0, 1.0))
        step_s = TOKENS.step_s * exp(TOKENS.step_sigma * draw.gauss(0.0, 1.0))
        length = draw.choice(LENGTHS)
        outcomes = (
            budget.first_by is None or first_s <= budget.first_by,
            budget.next_s is None or step_s <= budget.next_s,
            first_s + (length - 1.0) * step_s <= budget.whole_by,
        )
        for place, kept in enumerate(outcomes):
            drawn[place] += 1
            total[place] += kept
            if not kept:
                break
    for place, chance in enumerate(raw):
        assert chance == pytest.approx(total[place] / drawn[place], abs=0.06)


@given(st.floats(0.01, 5.0), st.floats(0.001, 0.2), st.floats(0.1, 60.0), st.floats(1.0, 1.5))
def test_chances_are_chances_and_more_time_never_lessens_them(
    first_s: float, next_s: float, whole_s: float, more: float
) -> None:
    takes = generation_time(link_of(0.01, 0.02).path(NOW), 0.1, TOKENS, LENGTHS, trust=0.9)
    tight = takes.chances(GenerationBudget(first_s, next_s, whole_s), 0.0)
    loose = takes.chances(GenerationBudget(more * first_s, more * next_s, more * whole_s), 0.0)
    assert all(0.0 <= one <= 1.0 for one in tight)
    assert tight.first <= loose.first + 1e-9
    assert tight.next <= loose.next + 1e-9
    assert takes.chances(GenerationBudget(None, None, whole_s), 0.0).whole <= (
        takes.chances(GenerationBudget(None, None, more * whole_s), 0.0).whole + 1e-9
    )


def test_an_answer_of_one_token_keeps_the_budget_of_further_ones() -> None:
    takes = generation_time(link_of(0.01).path(NOW), 0.0, TOKENS, (1.0,), trust=1.0)
    assert takes.chances(GenerationBudget(None, 0.0001, 10.0), 0.0) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("first_by", [-1.0, 0.0, 0.005, 0.01])
def test_a_first_token_that_is_due_by_now_leaves_a_chance_for_the_whole(first_by: float) -> None:
    takes = generation_time(link_of(0.01).path(NOW), 0.0, TOKENS, (1.0, 5.0), trust=1.0)
    first, next_, whole = takes.chances(GenerationBudget(first_by, 0.1, 10.0), 0.0)
    assert first == pytest.approx(0.0, abs=1e-6)
    assert next_ == whole == pytest.approx(1.0)


@pytest.mark.parametrize(("first_by", "now", "by"), [
    (None, 0.0, 10.0 - 179.0 * 0.02),
    (1.0, 0.0, 1.0),
    (9.0, 0.0, 10.0 - 179.0 * 0.02),
    (1.0, 2.0, 10.0 - 179.0 * 0.02),  # missed already: the rest of the answer counts
    (None, 9.0, 9.0),
])  # fmt: skip
def test_a_first_token_is_due_by_its_budget_or_for_the_rest_to_be_in_time(
    first_by: float | None, now: float, by: float
) -> None:
    assert begin_by(generation(first_by=first_by), TOKENS, 10.0, now) == pytest.approx(by)


def fleet(**changes: Any) -> Fleet:
    """A slow device and a fast pool."""
    return fleet_of(edge_a=writer(**changes), pool_main=writer(prefill_s=0.0001, step_s=0.012, slots=16, name="bf16"))


def placed(one: Fleet, asked: Ask, prices: UtilityWeights = UtilityWeights()) -> str:  # noqa: B008 - a NamedTuple
    decision = UtilityPlacer(one, prices).decide(asked, NOW)
    assert decision.chosen is not None
    return decision.chosen.target.id


def test_with_time_enough_the_cheaper_device_writes() -> None:
    assert placed(fleet(), asking(first_by=NOW + 2.0, next_s=0.1)) == "edge/a"


def test_a_first_token_that_the_device_cannot_make_goes_to_the_pool() -> None:
    assert placed(fleet(prefill_s=0.02), asking(first_by=NOW + 0.4, next_s=0.1)) == "pool/main"


def test_further_tokens_that_the_device_cannot_make_go_to_the_pool() -> None:
    assert placed(fleet(step_s=0.06), asking(first_by=NOW + 2.0, next_s=0.03)) == "pool/main"


def test_a_long_prompt_leaves_a_device_whose_answers_it_would_hold_up() -> None:
    long = asking(first_by=NOW + 5.0, next_s=0.08, prompt_units=100.0, lengths=(10.0, 30.0), mean_length=20.0)
    one, dear = fleet(), UtilityWeights(generation_cost=3.0)  # a pool that it would not go to for being sooner
    assert placed(one, long, dear) == "edge/a"
    one.offered("minilm", "1")[0].cost.pace.launched(5.0)
    assert placed(one, long, dear) == "pool/main"
    assert placed(one, asking(first_by=NOW + 5.0, next_s=0.08), dear) == "edge/a"  # a short one holds up nobody


def test_a_long_answer_does_not_wait_for_a_full_device_beside_a_free_pool() -> None:
    long = asking(first_by=NOW + 2.0, next_s=0.1, lengths=tuple(3.3 * one for one in LENGTHS), mean_length=600.0)
    one = fleet()
    assert placed(one, long) == "edge/a"
    for _ in range(5):  # of four slots
        one.offered("minilm", "1")[0].cost.pace.launched(5.0)
    assert placed(one, long) == "pool/main"
    assert placed(one, long, UtilityWeights(generation_cost=3.0)) == "edge/a", "at the price of single answers"


@pytest.mark.parametrize(("batch", "next_s", "before_s", "harmed"), [
    (1.0, 0.03, 0.02, 0.0),  # nobody is there
    (4.0, None, 0.02, 0.0),  # or nobody has a budget
    (4.0, 1.0, 0.02, 0.0),  # which all keep with it, too
    (4.0, 0.001, 0.02, 0.0),  # or missed without it
    (4.0, 0.025, 0.01, 3.0),  # three kept it
])  # fmt: skip
def test_harm_is_the_answers_under_way_that_would_become_late(
    batch: float, next_s: float | None, before_s: float, harmed: float
) -> None:
    slower = TOKENS._replace(batch=batch, step_s=0.05)
    assert made_late(generation(next_s=next_s), slower, before_s) == pytest.approx(harmed, abs=0.01)


def test_where_all_are_hurt_an_answer_that_is_lost_anyway_does_not_queue_at_a_full_target() -> None:
    one = fleet()
    one.targets["pool/main"].queue_estimate.report(LoadReport(1, 1, 16, 40, 30.0), "link", NOW)
    one.offered("minilm", "1")[0].cost.pace.launched(5.0)
    hurting = asking(first_by=NOW + 0.1, next_s=0.08, prompt_units=100.0, lengths=(10.0, 30.0), mean_length=20.0)
    assert placed(one, hurting) == "edge/a"


def test_budgets_that_none_can_keep_refuse_nothing() -> None:
    decision = UtilityPlacer(fleet()).decide(asking(first_by=NOW + 0.001, next_s=0.0001), NOW)
    assert decision.refusal is None
    assert decision.chosen is not None
    assert decision.chosen.claim is not None
    assert decision.chosen.claim.prediction.claimed == pytest.approx(0.0, abs=0.01)


def test_only_what_is_certain_is_proof_that_a_generation_is_too_late() -> None:
    long = asking(budget_s=1.0, lengths=(500.0, 900.0), mean_length=700.0)
    assert UtilityPlacer(fleet()).decide(long, NOW).refusal is None  # it may end at its first token
    certain = asking(budget_s=0.01, certain_units=1000.0, lengths=(990.0,), mean_length=990.0)
    assert isinstance(UtilityPlacer(fleet()).decide(certain, NOW).refusal, DeadlineExceeded)


def test_a_device_whose_slots_are_taken_is_passed_over() -> None:
    one = fleet()
    for _ in range(6):
        one.offered("minilm", "1")[0].cost.pace.launched(5.0)
    assert placed(one, asking(first_by=NOW + 2.0, next_s=0.1)) == "pool/main"


def test_the_last_slots_of_a_device_are_kept_for_those_that_can_go_nowhere_else() -> None:
    one, easy = fleet(), asking(first_by=NOW + 2.0, next_s=0.1, lengths=(10.0, 30.0), mean_length=20.0)
    for _ in range(3):  # of four slots
        one.offered("minilm", "1")[0].cost.pace.launched(0.5)
    placer = UtilityPlacer(one)
    decision = placer.decide(easy, NOW)
    device = next(each for each in decision.candidates if each.target.id == "edge/a")
    assert decision.chosen is not None
    assert decision.chosen.target.id == "pool/main"
    assert placer.token_claims(device, easy, NOW).all > 0.9, "although it would be in time there"
    only_there = easy._replace(generation=easy.generation and easy.generation._replace(first_by=NOW + 0.4))
    for _ in range(32):
        one.targets["pool/main"].link.record(0.5, NOW)
    assert placed(one, only_there) == "edge/a"


def test_the_price_of_a_slot_is_no_reason_against_a_second_attempt() -> None:
    one = fleet_of(edge_a=writer())
    for _ in range(3):
        one.offered("minilm", "1")[0].cost.pace.launched(0.5)
    decision = UtilityPlacer(one).decide(asking(first_by=NOW + 2.0, next_s=0.1), NOW)
    (score,) = decision.judged
    assert score is not None
    assert score.rent == pytest.approx(0.5 * (3 / 4) ** 4)
    assert score.worth == pytest.approx(score.value + score.rent)
    assert decision.chosen is not None
    assert decision.chosen.claim is not None
    assert decision.chosen.claim.externality == score.harm


def test_others_at_the_target_count_too() -> None:
    one = fleet()
    one.targets["edge/a"].queue_estimate.report(LoadReport(1, 1, 4, 4, 3.0), "link", NOW)
    assert placed(one, asking(first_by=NOW + 2.0, next_s=0.1)) == "pool/main"
    decision = UtilityPlacer(one).decide(asking(), NOW + 10.0)  # the report is too old
    assert next(each for each in decision.candidates if each.target.id == "edge/a").wait_s == 0.0


def test_a_generation_is_not_ahead_of_single_answers_and_holds_a_slot() -> None:
    one = fleet()
    decision = UtilityPlacer(one).decide(asking(first_by=NOW + 2.0, next_s=0.1), NOW)
    chosen = decision.chosen
    assert chosen is not None
    attempt = AttemptTelemetry(chosen, 1, 190.0, NOW)
    assert chosen.target.queue_estimate.wait_s(NOW) == 0.0
    assert chosen.offered.cost.pace.under_way == 1
    attempt.begun(NOW + 0.3, 0)
    work = ComputedWork(60.0, 1.4, ComputedTokens(51, 11.0, 0.25, 1.0))
    attempt.answered({"queue": 0.0, "compute": 1.4}, None, NOW + 1.5, work=work)
    assert chosen.offered.cost.pace.under_way == 0
    calibration = chosen.claim and chosen.claim.prediction.calibration
    assert "TokenCalibration" in repr(calibration)


def test_a_server_that_says_no_times_is_learned_from_by_its_tokens_instants() -> None:
    one = fleet()
    pace = one.offered("minilm", "1")[0].cost.pace
    for _ in range(80):
        chosen = UtilityPlacer(one).decide(asking(first_by=NOW + 2.0, next_s=0.1), NOW, {"pool/main"}).chosen
        assert chosen is not None
        attempt = AttemptTelemetry(chosen, 1, 190.0, NOW)
        attempt.begun(NOW + 0.5, 0)
        work = ComputedWork(60.0, 0.0, ComputedTokens(51, 11.0, 0.0, 0.0))
        attempt.answered({}, None, NOW + 4.5, work=work)
    assert pace.step_s(1) > 0.05  # 80 ms, with 20 ms at warm-up


def test_hedges_watch_the_first_token() -> None:
    one = fleet()
    placer = UtilityPlacer(one)
    hedging = ChanceHedging(placer)
    asked = asking(first_by=NOW + 2.0, next_s=0.1)
    decision = placer.decide(asked, NOW)
    chosen, other = decision.chosen, decision.best_other()
    assert chosen is not None
    assert other is not None
    look_at = hedging.first_look(asked, chosen, other, NOW)
    assert look_at is not None
    assert look_at <= NOW + 2.0 - shown_in_s(other)  # and not near the deadline of the whole, 30 s from now


@pytest.mark.slow
@given(
    st.floats(0.001, 20.0),
    st.none() | st.floats(-5.0, 20.0),
    st.none() | st.floats(1e-6, 10.0),
    st.lists(st.integers(1, 2000), min_size=1, max_size=8),
    st.floats(0.0, 5.0),
    st.integers(0, 9),
    st.booleans(),
)
def test_every_budget_is_decided_on_and_watched(
    budget_s: float,
    first_s: float | None,
    next_s: float | None,
    lengths: list[int],
    later_s: float,
    taken: int,
    races: bool,
) -> None:
    one = fleet()
    for offered in one.offered("minilm", "1")[:1]:
        for _ in range(taken):
            offered.cost.pace.launched(0.5)
    placer = UtilityPlacer(one)
    hedging = ChanceHedging(placer, races=races)
    asked = asking(
        budget_s,
        first_by=None if first_s is None else NOW + first_s,
        next_s=next_s,
        lengths=tuple(sorted(map(float, lengths))),
        mean_length=sum(lengths) / len(lengths),
        max_tokens=max(lengths),
    )
    decision = placer.decide(asked, NOW)
    assert (decision.chosen is None) != (decision.refusal is None)
    chosen, other = decision.chosen, decision.best_other()
    if chosen is None or other is None:
        return
    look_at = hedging.first_look(asked, chosen, other, NOW)
    assert look_at is None or look_at >= NOW
    now = NOW + later_s
    beside = placer.decide(asked, now, {chosen.target.id})
    for watched in (PendingAttempt(chosen, NOW), PendingAttempt(chosen, NOW, NOW + later_s)):
        plan = hedging.plan(asked, watched, beside, now)
        assert plan is None or plan.at >= now
