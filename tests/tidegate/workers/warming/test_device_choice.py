"""A device is taken where it is right and faster, and whatever else it is, the processor computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.workers.warming.device_choice import PROCESSOR, DeviceTrial, agreement, choose_device

HERE = ((0.010, 0.011, 0.010), (0.040, 0.041, 0.040))


def trial(device: str, times: float, agreement: float = 1.0, failed: str = "") -> DeviceTrial:
    there = tuple(tuple(one / times for one in size) for size in HERE)
    return DeviceTrial(device, failed, HERE, there, agreement)


def test_the_fastest_that_is_right_is_taken() -> None:
    choice = choose_device([trial("cuda", 4.0), trial("tensorrt", 9.0, 0.98), trial("openvino", 1.5)])
    assert choice.device == "cuda"
    assert choice.reasons == (
        "cuda: taken: 4.00 times as fast as the processor, answers agree to 1.00000",
        "tensorrt: left out: its answers are others than the processor's (0.9800 for 0.999)",
        "openvino: left out for a faster one: 1.50 times as fast as the processor, answers agree to 1.00000",
    )


@pytest.mark.parametrize(
    "against",
    [
        trial("a", 1.05),
        trial("a", 0.3),
        trial("a", 5.0, float("nan")),
        trial("a", 5.0, failed="it hung"),
        DeviceTrial("a"),
    ],
)
def test_what_is_not_worth_it_or_went_wrong_leaves_the_processor(against: DeviceTrial) -> None:
    choice = choose_device([against])
    assert choice.device == PROCESSOR
    assert choice.reasons[0].startswith("a: left out: ")


def test_nothing_to_try_is_the_processor() -> None:
    assert choose_device([]) == choose_device(()) and choose_device([]).device == PROCESSOR


def test_a_device_that_loses_at_small_sizes_and_wins_at_large_ones_is_judged_over_both() -> None:
    mixed = DeviceTrial("gpu", "", HERE, ((0.02,) * 3, (0.01,) * 3), 1.0)
    assert mixed.gain == pytest.approx(2**0.5, rel=0.02)


@given(st.lists(st.tuples(st.floats(0.1, 20), st.floats(0, 1), st.booleans()), max_size=5))
def test_whatever_is_taken_was_right_and_no_right_one_is_faster(found: list[tuple[float, float, bool]]) -> None:
    trials = [trial(str(n), times, agrees, "broke" if broke else "") for n, (times, agrees, broke) in enumerate(found)]
    choice = choose_device(trials)
    assert len(choice.reasons) == len(trials)
    right = {one.device: one.gain for one in trials if not one.failed and one.agreement >= 0.999 and one.gain >= 1.1}
    assert choice.device == (max(right, key=lambda device: right[device]) if right else PROCESSOR)


def test_answers_agree_by_direction_and_size_and_labels_by_count() -> None:
    one = {"y": np.array([[1.0, 2.0]], np.float32), "label": np.array([1, 2, 3, 4])}
    assert agreement(one, one) == pytest.approx(1.0)
    assert agreement(one, one | {"label": np.array([1, 2, 3, 5])}) == 0.75
    assert agreement(one, one | {"y": 2 * one["y"]}) == pytest.approx(0.5)
    assert agreement(one, one | {"y": np.array([[np.nan, 2.0]], np.float32)}) == 0.0
    assert agreement(one, one | {"y": np.array([[1.0, 2.0, 3.0]], np.float32)}) == 0.0
    assert agreement(one, {"y": one["y"]}) == 0.0
    assert agreement({"y": np.zeros(3)}, {"y": np.zeros(3)}) == 1.0
    assert agreement({"y": np.zeros(3)}, {"y": np.ones(3)}) == 0.0
