"""The agreement watch: who is demoted, who is not although its answers drift, and who comes back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from gateway.core.agreement.agreement_watch import AgreementTurn, AgreementWatch, AnswerSource, ShadowedAnswer
from gateway.core.agreement.expectation import AgreementTerms

TERMS = AgreementTerms("cosine", "embedding", 0.02)
GOOD, BAD = 0.008, 0.5


def source(target: str = "edge/a", variant: str = "int8") -> AnswerSource:
    return AnswerSource(target, "minilm", "2", variant)


def answer(of: AnswerSource, score: float, *, size: int = 2, terms: AgreementTerms = TERMS) -> ShadowedAnswer:
    return ShadowedAnswer(of, "pool/main's fp32", score, terms, size, "tokens")


def live(watch: AgreementWatch, of: AnswerSource, score: float, count: int, *, size: int = 2) -> list[AgreementTurn]:
    turns = [watch.record(answer(of, score, size=size), 10.0 * number) for number in range(count)]
    return [turn for turn in turns if turn is not None]


def test_a_device_that_drifts_is_demoted_once_with_the_evidence_in_words() -> None:
    watch = AgreementWatch()
    (turn,) = live(watch, source(), BAD, 30)
    assert (turn.turn, turn.source) == ("demoted", source())
    assert "minilm 2 int8: the last" in turn.evidence and "pool/main's fp32 by 0.5 on average" in turn.evidence
    assert watch.drifting_among("minilm", "2") == [source()]
    assert watch.drifting_among("minilm", "1") == []


def test_a_device_that_agrees_is_left_alone() -> None:
    watch = AgreementWatch()
    assert live(watch, source(), GOOD, 5000) == []
    assert watch.sources[source()].mean == pytest.approx(GOOD)


def test_a_repaired_device_comes_back_and_is_watched_anew() -> None:
    watch = AgreementWatch()
    live(watch, source(), BAD, 30)
    (turn,) = live(watch, source(), GOOD, 60)
    assert turn.turn == "returned" and "agree with pool/main's fp32 again" in turn.evidence
    assert not watch.drifting
    assert [one.turn for one in live(watch, source(), BAD, 30)] == ["demoted"]
    assert watch.sources[source()].relapses == 1


def test_what_was_before_a_device_came_back_is_not_its_mean_of_late() -> None:
    watch = AgreementWatch()
    live(watch, source(), BAD, 30)
    assert watch.sources[source()].recent_mean == pytest.approx(BAD)
    while watch.drifting:
        live(watch, source(), GOOD, 1)
    assert watch.sources[source()].recent_mean is None
    live(watch, source(), GOOD, 1)
    assert watch.sources[source()].recent_mean == pytest.approx(GOOD)


def test_a_relapse_is_forgiven_after_a_week_without_one() -> None:
    watch = AgreementWatch()
    live(watch, source(), BAD, 30)
    live(watch, source(), GOOD, 60)
    watch.forgive(600.0)
    assert watch.sources[source()].relapses == 1
    watch.forgive(8 * 86_400.0)
    assert watch.sources[source()].relapses == 0


def test_a_fault_that_only_one_slice_of_inputs_shows_is_found_by_its_slice() -> None:
    watch = AgreementWatch()
    turns: list[AgreementTurn | None] = []
    for number in range(400):  # one input in twenty is long, and the mean over all stays below the limit
        long = number % 20 == 0
        score = 0.2 if long else GOOD
        turns.append(watch.record(answer(source(), score, size=4 if long else 2), 10.0 * number))
    (turn,) = [one for one in turns if one is not None]
    assert turn.turn == "demoted" and "rows of 256 to 1023 tokens" in turn.evidence


def test_at_most_half_of_the_devices_with_one_variant_are_demoted_and_the_model_is_named() -> None:
    watch = AgreementWatch()
    devices = [source(f"edge/{number}") for number in range(6)]
    for one in devices:
        live(watch, one, GOOD, 20)
    turns = [turn for one in devices for turn in live(watch, one, BAD, 40)]
    assert [one.turn for one in turns] == ["demoted"] * 3 + ["suspected"] * 3
    ((group, since, evidence),) = watch.common()
    assert group == ("minilm", "2", "int8") and since > 0.0
    assert evidence.startswith("6 of 6 devices drift")
    assert watch.drifting_among("minilm", "2")[:3] == devices[:3]


def test_one_of_those_that_were_spared_is_demoted_once_the_others_are_back() -> None:
    watch = AgreementWatch()
    devices = [source(f"edge/{number}") for number in range(4)]
    for one in devices:
        live(watch, one, GOOD, 5)
    for one in devices:
        live(watch, one, BAD, 40)
    for one in devices[:3]:
        assert [turn.turn for turn in live(watch, one, GOOD, 80)] == ["returned"]
    assert [turn.turn for turn in live(watch, devices[3], BAD, 5)] == ["demoted"]
    assert list(watch.common()) == []


def test_a_device_is_due_again_after_the_gap_and_the_threshold_follows_from_it() -> None:
    watch = AgreementWatch(every_s=10.0)
    assert watch.is_due("edge/a", 100.0)
    watch.asked("edge/a", 100.0)
    assert not watch.is_due("edge/a", 109.9)
    assert watch.is_due("edge/b", 100.0)
    assert watch.is_due("edge/a", 110.0)
    assert watch.alarm_at == 3 * 30 * 86_400 / 10
    assert AgreementWatch(every_s=1.0).alarm_at == 10 * watch.alarm_at


def test_what_is_followed_is_bounded_and_those_that_drift_stay() -> None:
    watch = AgreementWatch(most=10)
    live(watch, source("edge/ill"), BAD, 30)
    for number in range(200):
        watch.record(answer(source(f"edge/{number}"), GOOD), 1000.0)
        watch.asked(f"edge/{number}", 1000.0)
    assert len(watch.sources) == 10
    assert source("edge/ill") in watch.sources and source("edge/199") in watch.sources
    assert repr(watch) == "<AgreementWatch 10 followed, 1 drifting>"


def test_what_is_followed_is_bounded_also_where_all_of_it_drifts() -> None:
    watch = AgreementWatch(most=3)
    for number in range(9):
        live(watch, source(f"edge/{number}", f"v{number}"), BAD, 30)
    assert len(watch.sources) == 3 and len(watch.drifting) == 3


def test_another_limit_in_the_manifest_begins_the_tests_anew() -> None:
    watch = AgreementWatch()
    wide = AgreementTerms("cosine", "embedding", 0.4)
    for _ in range(5):
        watch.record(answer(source(), 0.3), 0.0)
    evidence = watch.sources[source()].whole.evidence
    watch.record(answer(source(), 0.3, terms=wide), 0.0)
    assert watch.sources[source()].limit == 0.4
    assert watch.sources[source()].whole.evidence < evidence
    live(watch, source("edge/b"), BAD, 30)
    assert watch.record(answer(source("edge/b"), 0.3, terms=wide), 0.0) is None


RECORDED = AgreementTerms("cosine", "embedding", 0.02, 0.009)
CLASSES = AgreementTerms("top1", "classes", 0.05, 0.024)


def spread(
    of: AnswerSource, terms: AgreementTerms, watch: AgreementWatch, scores: list[tuple[float, float]], count: int
) -> list[AgreementTurn]:
    """Live through answers with these scores and distances in turn."""
    turns = []
    for number in range(count):
        score, apart = scores[number % len(scores)]
        found = ShadowedAnswer(of, "pool/main's fp32", score, terms, 2, "tokens", apart=apart)
        turns.append(watch.record(found, 10.0 * number))
    return [turn for turn in turns if turn is not None]


def test_a_fault_a_little_over_the_limit_is_found_by_the_devices_own_past() -> None:
    watch = AgreementWatch()
    assert spread(source(), RECORDED, watch, [(0.006, 0.006), (0.012, 0.012)], 4000) == []
    (turn,) = spread(source(), RECORDED, watch, [(0.021, 0.021)], 100)
    assert turn.turn == "demoted"
    assert "times as far from pool/main's fp32 as is usual of this device" in turn.evidence
    unlearned = AgreementWatch()
    assert spread(source(), RECORDED, unlearned, [(0.021, 0.021)], 100) == []


def test_a_classifier_is_found_by_its_probabilities_where_the_largest_class_says_little() -> None:
    usual = [(0.0, 0.01)] * 39 + [(1.0, 0.4)]
    faulty = [(0.0, 0.06)] * 12 + [(1.0, 0.4)]
    watch = AgreementWatch()
    assert spread(source(), CLASSES, watch, usual, 4000) == []
    (turn,) = spread(source(), CLASSES, watch, faulty, 150)
    assert turn.turn == "demoted" and "top1 of classes" in turn.evidence


def test_a_change_whose_answers_are_as_good_as_was_recorded_accuses_nobody() -> None:
    watch = AgreementWatch()
    spread(source(), CLASSES, watch, [(0.0, 0.01)], 4000)
    assert spread(source(), CLASSES, watch, [(0.0, 0.2)] * 39 + [(1.0, 0.4)], 2000) == []


@pytest.mark.slow
def test_a_device_that_changed_is_back_once_it_agrees_as_before() -> None:
    watch = AgreementWatch()
    spread(source(), RECORDED, watch, [(0.008, 0.008)], 4000)
    spread(source(), RECORDED, watch, [(0.021, 0.021)], 100)
    assert watch.drifting
    assert spread(source(), RECORDED, watch, [(0.021, 0.021)], 1000) == []  # which twice the limit would let back
    (turn,) = spread(source(), RECORDED, watch, [(0.008, 0.008)], 80)
    assert turn.turn == "returned"
    assert spread(source(), RECORDED, watch, [(0.014, 0.014)], 2000) == []  # other inputs, as good as was recorded


Answers = Callable[[Random], tuple[float, float]]  # score and distance


def vectors(mean: float) -> Answers:
    def answers(draw: Random) -> tuple[float, float]:
        score = mean * draw.uniform(0.5, 1.5)
        return score, score

    return answers


def classes(wrong: float, apart: float) -> Answers:
    """A classifier's: few of the largest classes differ, and then by much; of the others `apart` varies by itself."""

    def answers(draw: Random) -> tuple[float, float]:
        return (1.0, 0.4) if draw.random() < wrong else (0.0, apart * draw.expovariate(1.0))

    return answers


def lived(watch: AgreementWatch, terms: AgreementTerms, answers: Answers, count: int, draw: Random) -> list[str]:
    turns = (watch.record(answer_of(terms, *answers(draw)), 10.0 * number) for number in range(count))
    return [turn.turn for turn in turns if turn is not None]


def answer_of(terms: AgreementTerms, score: float, apart: float) -> ShadowedAnswer:
    return ShadowedAnswer(source(), "pool/main's fp32", score, terms, 2, "tokens", apart=apart)


@pytest.mark.slow
@pytest.mark.parametrize("stretch", [1400, 2000])
@pytest.mark.parametrize(
    ("terms", "usual", "others", "fault"),
    [
        (RECORDED, vectors(0.008), vectors(0.0135), vectors(0.021)),
        (CLASSES, classes(0.02, 0.01), classes(0.02, 0.02), classes(0.07, 0.07)),
    ],
)
def test_inputs_that_change_kind_for_a_day_and_come_back_accuse_nobody_and_hide_no_fault(
    terms: AgreementTerms, usual: Answers, others: Answers, fault: Answers, stretch: int
) -> None:
    for seed in range(3):
        watch, draw = AgreementWatch(), Random(f"{seed} {stretch}")
        for answers, count in ((usual, 12_000), (others, stretch), (usual, 4000), (others, stretch), (usual, 1000)):
            assert lived(watch, terms, answers, count, draw) == []
        assert lived(watch, terms, fault, 200, draw) == ["demoted"]


@pytest.mark.slow
def test_one_outlier_after_inputs_that_were_others_for_a_day_accuses_nobody() -> None:
    watch = AgreementWatch()
    calm = [(0.0, 0.0), (0.0, 0.02)]
    assert spread(source(), CLASSES, watch, calm, 20_000) == []
    assert spread(source(), CLASSES, watch, [(0.0, 0.0), (0.0, 0.045)], 1500) == []  # as good as was recorded
    assert spread(source(), CLASSES, watch, calm, 400) == []
    assert watch.sources[source()].change.evidence > watch.alarm_at  # a small stake is lost slowly
    assert spread(source(), CLASSES, watch, [(1.0, 0.4)], 1) == []
    assert spread(source(), CLASSES, watch, calm, 2000) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terms", "usual", "fault", "found_within", "back_within"),
    [
        (RECORDED, vectors(0.008), vectors(0.0175), 200, 100),
        (CLASSES, classes(0.022, 0.01), classes(0.044, 0.06), 2000, 1500),
    ],
)
def test_a_fault_below_the_limit_neither_comes_back_as_it_went_nor_becomes_usual(
    terms: AgreementTerms, usual: Answers, fault: Answers, found_within: int, back_within: int
) -> None:
    for seed in range(3):
        watch, draw = AgreementWatch(), Random(seed)
        assert lived(watch, terms, usual, 8000, draw) == []
        assert lived(watch, terms, fault, found_within, draw) == ["demoted"]
        assert lived(watch, terms, fault, 20_000, draw) == []
        assert lived(watch, terms, usual, back_within, draw) == ["returned"]
        assert lived(watch, terms, usual, 3000, draw) == []
        assert lived(watch, terms, fault, found_within, draw) == ["demoted"]


def test_another_limit_in_the_manifest_forgets_what_was_usual() -> None:
    watch, wide = AgreementWatch(), RECORDED._replace(limit=0.04)
    spread(source(), RECORDED, watch, [(0.008, 0.008)], 4000)
    spread(source(), RECORDED, watch, [(0.0175, 0.0175)], 200)
    assert watch.drifting
    assert [turn.turn for turn in spread(source(), wide, watch, [(0.0175, 0.0175)], 200)] == ["returned"]
    assert spread(source(), wide, watch, [(0.0175, 0.0175)], 2000) == []
