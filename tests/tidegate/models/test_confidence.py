"""The confidence of a classifier: three measures by example, and any output that is no distribution counts as hard."""

from __future__ import annotations

from math import inf, log, nan
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.tidegate.models.test_validate import MANIFEST, VARIANT
from tidegate.arrays import array_to_tensor
from tidegate.models.confidence import ConfidenceMeasure, confidence
from tidegate.models.manifest import Axis, Confidence, Manifest, Measure, Quality, TensorSpec
from tidegate.models.validate import problems
from tidegate.types import Datatype, RequestedOutput, Tensor

MARGIN = Confidence("scores", "margin", threshold=0.5)
SCORES = Confidence("scores", "margin", threshold=0.5, softmax=True)
EDGE = msgspec.structs.replace(VARIANT, quality=Quality("top1", 0.97, 100))
POOL = msgspec.structs.replace(
    VARIANT, name="fp32", precision="fp32", where=("pool",), quality=Quality("top1", 0.99, 100)
)


def manifest(how: Confidence = MARGIN, **changes: Any) -> Manifest:
    outputs = (TensorSpec("scores", Datatype.FP32, ("batch", 4)), TensorSpec("other", Datatype.INT64, ("batch", 4)))
    changes = {"outputs": outputs, "variants": (POOL, EDGE), "text": None, "confidence": how, **changes}
    return msgspec.structs.replace(MANIFEST, **changes)


def scores(*rows: list[float], datatype: Datatype = Datatype.FP32) -> Tensor:
    return array_to_tensor("scores", np.array(rows), datatype)


def of(*rows: list[float], how: Confidence = MARGIN) -> float:
    return ConfidenceMeasure(manifest(how), how).of(scores(*rows))


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("margin", 0.5),
        ("top1", 0.7),
        ("entropy", 1.0 + (0.7 * log(0.7) + 0.2 * log(0.2) + 2 * 0.05 * log(0.05)) / log(4)),
    ],
)
def test_each_measure_by_example(measure: Measure, expected: float) -> None:
    assert of([0.05, 0.7, 0.2, 0.05], how=Confidence("scores", measure, 0.5)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("measure", ["margin", "top1", "entropy"])
def test_a_certain_answer_has_confidence_1_by_any_measure(measure: Measure) -> None:
    assert of([0.0, 1.0, 0.0, 0.0], how=Confidence("scores", measure, 0.5)) == 1.0


def test_a_request_is_as_sure_as_its_least_sure_row() -> None:
    assert of([1.0, 0, 0, 0], [0.6, 0.4, 0, 0]) == pytest.approx(0.2)


def test_scores_become_probabilities_first_where_the_manifest_says_so() -> None:
    shares = np.exp([2.0, 1.0, 0.0, -1.0])
    shares /= shares.sum()
    assert of([2.0, 1.0, 0.0, -1.0], how=SCORES) == pytest.approx(shares[0] - shares[1])
    huge = np.array([[1.7e308, -1.7e308, 0.0, 0.0]])  # their distance is no float any more
    assert ConfidenceMeasure(manifest(SCORES), SCORES).of(array_to_tensor("scores", huge, Datatype.FP64)) == 1.0


@pytest.mark.parametrize("measure", ["margin", "top1", "entropy"])
@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("scores", Datatype.FP32, (0, 4), b""),
        Tensor("scores", Datatype.FP32, (1, 4), bytes(15)),
        Tensor("scores", Datatype.FP32, (), bytes(4)),
        Tensor("scores", Datatype.INT32, (1, 4), bytes(16)),
        scores([0.25, 0.25, 0.25, 0.25]),
        scores([1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        scores([nan, 1.0, 0.0, 0.0]),
        scores([inf, 0.0, 0.0, 0.0]),
        scores([1.0, 0.0]),
        scores([9.0, 0.0, -3.0, 1.0]),
        scores([1.5, -0.5, 0.0, 0.0]),
        scores([0.5, 0.0, 0.0, 0.0]),
    ],
    ids=["no-rows", "cut", "scalar", "integers", "flat", "one-flat", "nan", "inf", "few", "logits", "negative", "half"],
)
def test_what_is_no_distribution_over_the_classes_is_hard_and_never_easy(measure: Measure, tensor: Tensor) -> None:
    how = Confidence("scores", measure, 0.5)
    assert ConfidenceMeasure(manifest(how), how).of(tensor) == 0.0


def test_a_single_class_is_no_choice() -> None:
    assert confidence(np.ones((2, 1)), MARGIN) == 0.0


def test_half_floats_that_nearly_add_up_are_probabilities() -> None:
    tensor = scores([0.9, 0.06, 0.03, 0.005], datatype=Datatype.FP16)
    assert ConfidenceMeasure(manifest(), MARGIN).of(tensor) == pytest.approx(0.84, abs=0.01)


@pytest.mark.slow
@given(
    arrays.arrays(np.float64, arrays.array_shapes(max_dims=3, max_side=5), elements=st.floats(width=64)),
    st.sampled_from(["margin", "entropy", "top1"]),
    st.booleans(),
)
def test_whatever_comes_is_a_number_from_0_to_1(rows: Any, measure: Measure, softmax: bool) -> None:
    assert 0.0 <= confidence(rows, Confidence("scores", measure, 0.5, softmax)) <= 1.0


def test_only_answers_that_a_better_variant_could_outdo_are_judged() -> None:
    judge = ConfidenceMeasure(manifest(), MARGIN)
    answer = [scores([0.6, 0.4, 0.0, 0.0])]
    assert judge.confidence("int8", (), answer) == pytest.approx(0.2)
    assert judge.confidence("fp32", (), answer) is None
    assert judge.confidence("unknown", (), answer) is None
    assert repr(judge) == "<ConfidenceMeasure by margin of scores, of int8>"


def test_an_answer_without_the_output_is_hard_unless_it_was_not_requested() -> None:
    judge = ConfidenceMeasure(manifest(), MARGIN)
    assert judge.confidence("int8", (), []) == 0.0
    assert judge.confidence("int8", (RequestedOutput("scores"),), []) == 0.0
    assert judge.confidence("int8", (RequestedOutput("other"),), []) is None


def test_a_right_section_has_no_problems() -> None:
    assert problems(manifest()) == ()
    assert manifest().improvable == {"int8"}
    assert msgspec.structs.replace(manifest(), variants=(EDGE, VARIANT)).improvable == frozenset()


def changed(**changes: Any) -> Confidence:
    return msgspec.structs.replace(MARGIN, **changes)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (manifest(changed(output="score")), "confidence.output: 'score' is not an output (outputs: scores, other)"),
        (manifest(changed(output="other")), "confidence.output: 'other' is INT64; class probabilities are FP16"),
        (manifest(changed(threshold=0.0)), "confidence.threshold: 0 must be above 0 and at most 1"),
        (manifest(changed(threshold=nan)), "confidence.threshold: nan must be above 0"),
        (manifest(changed(max_share=1.5)), "confidence.max_share: 1.5 must be above 0 and at most 1"),
        (
            manifest(variants=(msgspec.structs.replace(POOL, quality=None), EDGE)),
            "confidence: no variant of the edge is outdone by another in measured quality "
            "(fp32 not measured, int8 top1 0.97)",
        ),
        (
            manifest(outputs=(TensorSpec("scores", Datatype.FP32, ("batch", 1)),)),
            "confidence.output: 'scores' of shape ['batch', 1] has no last axis of two classes or more",
        ),
        (
            manifest(
                outputs=(TensorSpec("scores", Datatype.FP32, ("one",)),),
                axes={**MANIFEST.axes, "one": Axis(1, 1)},
            ),
            "confidence.output: 'scores' of shape ['one'] has no last axis of two classes or more",
        ),
        (
            manifest(outputs=(TensorSpec("scores", Datatype.FP32, ()),)),
            "confidence.output: 'scores' of shape [] has no last axis",
        ),
    ],
)
def test_a_section_that_could_not_work_is_refused_by_key_and_value(wrong: Manifest, problem: str) -> None:
    (found,) = problems(wrong)
    assert found.startswith(problem)
