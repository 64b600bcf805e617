"""How far two answers disagree, and what a manifest promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gateway.core.agreement.disagreement import AnswerComparison, compared, row_disagreement
from gateway.core.agreement.expectation import (
    FLOOR,
    TOKEN_FLOOR,
    AgreementTerms,
    agreement_terms,
    promised_quality,
    slice_of,
    slice_words,
)
from tests.support.models.generative import TALKER
from tests.support.models.tiny_models import double_manifest
from tidegate.arrays import array_to_tensor
from tidegate.models.manifest import Confidence, Quality, Stateful
from tidegate.types import Datatype, Tensor

COSINE = AgreementTerms("cosine", "y", 0.02)
TOP1 = AgreementTerms("top1", "y", 0.02)


def tensor(*rows: list[float], name: str = "y") -> tuple[Tensor, ...]:
    return (array_to_tensor(name, np.array(rows, dtype=np.float32), Datatype.FP32),)


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ([1.0, 0.0], [1.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 1.0], 1.0),
        ([1.0, 0.0], [-1.0, 0.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [1.0, 0.0], 1.0),
        ([3.0, 0.0], [1.0, 0.0], 1.0 - 6.0 / 10.0),  # not normalised: the cosine alone would see nothing
        ([float("nan"), 0.0], [1.0, 0.0], 1.0),
    ],
)
def test_vectors_disagree_by_direction_and_by_length(one: list[float], other: list[float], wanted: float) -> None:
    found = compared(COSINE, tensor(one), tensor(other))
    assert found is not None and found.score == found.apart == pytest.approx(wanted, abs=1e-6)


def test_classes_disagree_where_the_largest_is_another_one() -> None:
    answer, truth = tensor([0.9, 0.1], [0.2, 0.8]), tensor([0.6, 0.4], [0.6, 0.4])
    found = compared(TOP1, answer, truth)
    assert found is not None and found.score == 0.5


def test_how_far_apart_classes_lie_says_more_than_which_one_is_the_largest() -> None:
    truth = tensor([0.6, 0.4])
    near, far = (compared(TOP1, tensor(row), truth) for row in ([0.61, 0.39], [0.98, 0.02]))
    assert near is not None and far is not None
    assert near.score == far.score == 0.0 and near.apart < 0.001 < 0.1 < far.apart


def test_an_answer_that_cannot_be_compared_disagrees_altogether() -> None:
    truth = tensor([1.0, 0.0])
    assert compared(COSINE, tensor([1.0, 0.0, 0.0]), truth) == AnswerComparison(1.0, 1.0)
    assert compared(COSINE, tensor([1.0, 0.0], name="z"), truth) == AnswerComparison(1.0, 1.0)
    broken = (Tensor("y", Datatype.FP32, (1, 2), b"\0" * 3),)
    assert compared(COSINE, broken, truth) == AnswerComparison(1.0, 1.0)
    whole = (array_to_tensor("y", np.array([[1, 0]]), Datatype.INT64),)
    assert compared(COSINE, whole, truth) == AnswerComparison(1.0, 1.0)


def test_a_reference_without_the_output_or_without_numbers_says_nothing() -> None:
    answer = tensor([1.0, 0.0])
    assert compared(COSINE, answer, tensor([1.0, 0.0], name="z")) is None
    assert compared(COSINE, answer, tensor([float("inf"), 0.0])) is None
    assert compared(COSINE, answer, (Tensor("y", Datatype.FP32, (0, 2), b""),)) is None


def test_a_vector_without_a_batch_is_one_row() -> None:
    one = (array_to_tensor("y", np.array([1.0, 2.0], dtype=np.float32), Datatype.FP32),)
    assert compared(COSINE, one, one) == pytest.approx(AnswerComparison(0.0, 0.0), abs=1e-6)
    assert row_disagreement("top1", np.eye(2), np.eye(2)) == 0.0


def with_quality(quality: Quality | None, **changes: Any) -> Any:
    manifest = double_manifest()
    return replace(manifest, variants=(replace(manifest.variants[0], name="int8", quality=quality),), **changes)


def test_the_limit_is_twice_what_the_manifest_recorded_and_a_little() -> None:
    terms = agreement_terms(with_quality(Quality("cosine", 0.99, 240)), "int8", 0.99, 1.0)
    assert terms is not None
    assert (terms.metric, terms.output) == ("cosine", "y")
    assert terms.limit == pytest.approx(2 * 0.01 + FLOOR)
    wide = agreement_terms(with_quality(Quality("top1", 0.9, 240)), "int8", 0.9, 0.95, 3.0)
    assert wide is not None and (wide.metric, wide.limit) == ("top1", pytest.approx(3 * 0.15 + FLOOR))


def test_a_device_cannot_widen_its_own_limit() -> None:
    manifest = with_quality(Quality("cosine", 0.99, 240))
    assert promised_quality(manifest, "int8", 0.5) == 0.99
    assert promised_quality(manifest, "int4", 0.5) == 0.5
    assert promised_quality(manifest, "int4", 7.0) == 1.0


def test_where_nothing_was_measured_a_classifier_is_known_by_its_confidence() -> None:
    unmeasured = agreement_terms(with_quality(None), "int8", 0.98, 1.0)
    assert unmeasured is not None and unmeasured.metric == "cosine"
    sure = with_quality(None, confidence=Confidence("y", "margin", 0.5))
    terms = agreement_terms(sure, "int8", 0.98, 1.0)
    assert terms is not None and (terms.metric, terms.output) == ("top1", "y")


def test_generations_are_compared_by_their_tokens_of_which_some_differ_on_any_other_processor() -> None:
    terms = agreement_terms(TALKER, "int4", 0.95, 0.99)
    assert terms is not None and (terms.metric, terms.output) == ("tokens", "output_ids")
    assert terms.recorded == pytest.approx(0.06)
    assert terms.limit == pytest.approx(2 * 0.06 + TOKEN_FLOOR)


def test_steps_of_sequences_and_models_without_numbers_are_not_compared() -> None:
    manifest = double_manifest()
    assert agreement_terms(replace(manifest, sequence=Stateful({"x": "y"})), "int8", 1.0, 1.0) is None
    words = replace(manifest.outputs[0], datatype=Datatype.INT64)
    assert agreement_terms(replace(manifest, outputs=(words,)), "int8", 1.0, 1.0) is None


@pytest.mark.parametrize(("units", "wanted"), [(0.0, 0), (3.9, 0), (4.0, 1), (16.0, 2), (64.0, 3), (1e9, 9)])
def test_slices_grow_by_four(units: float, wanted: int) -> None:
    assert slice_of(units) == wanted


def test_slices_have_words() -> None:
    assert slice_words(0, "tokens") == "rows of up to 3 tokens"
    assert slice_words(2, "tokens") == "rows of 16 to 63 tokens"
    assert slice_words(9, "pixels") == "rows of 262144 pixels and more"
