"""The classification extension."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.arrays import array_to_tensor, split_bytes
from tidegate.oip.classify import MOST_CLASSES, wanted_classes, with_classes, without_classes, work_bytes
from tidegate.oip.offload import LARGE_BYTES
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, InferRequest, InferResponse, Parameter, RequestedOutput, Tensor


def asking(value: Parameter) -> InferRequest:
    outputs = (RequestedOutput("p", {"classification": value, "other": 1}), RequestedOutput("q"))
    return InferRequest("m", (), outputs=outputs)


def classes(array: object, count: int, datatype: Datatype = Datatype.FP32) -> tuple[tuple[int, ...], list[bytes]]:
    response = InferResponse("m", "1", (array_to_tensor("p", np.asarray(array), datatype),))
    (tensor,) = with_classes(response, {"p": count}).outputs
    assert tensor.datatype is Datatype.BYTES
    return tensor.shape, split_bytes(tensor.raw)


def test_it_is_asked_for_by_output_and_taken_off_what_is_passed_on() -> None:
    assert wanted_classes(asking(3)) == {"p": 3}
    assert wanted_classes(asking(0)) == {}
    assert [dict(output.parameters) for output in without_classes(asking(3)).outputs] == [{"other": 1}, {}]


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", MOST_CLASSES + 1])
def test_a_count_that_is_none_is_refused(value: Parameter) -> None:
    with pytest.raises(InvalidRequest, match="classification"):
        wanted_classes(asking(value))


def test_the_best_come_first_and_of_equals_the_first() -> None:
    assert classes([[0.1, 0.5, 0.4], [0.2, 0.2, 0.6]], 2) == (
        (2, 2),
        [b"0.500000:1", b"0.400000:2", b"0.600000:2", b"0.200000:0"],
    )


def test_more_than_there_are_gives_all_there_are() -> None:
    assert classes([3, 7], 5, Datatype.INT32) == ((2,), [b"7.000000:1", b"3.000000:0"])


def test_an_empty_output_has_no_classes() -> None:
    assert classes(np.zeros((0,)), 3) == ((0,), [])


def test_other_outputs_stay_as_they_are() -> None:
    tensor = array_to_tensor("q", np.ones(2), Datatype.FP32)
    assert with_classes(InferResponse("m", "1", (tensor,)), {"p": 1}).outputs == (tensor,)


def test_a_small_answer_whose_best_classes_are_wanted_is_worked_out_at_once() -> None:
    response = InferResponse("m", "1", (array_to_tensor("p", np.zeros((5, 1000)), Datatype.FP32),))
    assert work_bytes(response, {"p": 5}) < LARGE_BYTES < work_bytes(response, {"p": 1000})


def test_an_answer_of_many_rows_whose_classes_are_wanted_is_work_for_a_thread() -> None:
    """A quarter of a second of one core, which the event loop would stand still for."""
    response = InferResponse("m", "1", (array_to_tensor("p", np.zeros((20_000, 8)), Datatype.FP16),))
    assert work_bytes(response, {}) == response.size_bytes < LARGE_BYTES < work_bytes(response, {"p": 3})


def test_texts_have_no_classes() -> None:
    response = InferResponse("m", "1", (Tensor("p", Datatype.BYTES, (0,), b""),))
    with pytest.raises(InvalidRequest, match="BYTES"):
        with_classes(response, {"p": 1})
