"""Bytes become arrays and back without losing an element; bytes that do not fit their shape are the caller's fault."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tidegate.arrays import array_to_tensor, split_bytes, tensor_to_array
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, Tensor

NUMERIC = [datatype for datatype in Datatype if datatype is not Datatype.BYTES]


@pytest.mark.slow
@given(st.sampled_from(NUMERIC), st.data())
def test_a_numeric_array_survives_the_round_trip_bit_by_bit(datatype: Datatype, data: st.DataObject) -> None:
    dtype = np.dtype(datatype.numpy_name)
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
    tensor = array_to_tensor("x", array, datatype)
    assert tensor.elements * datatype.itemsize == len(tensor.raw)
    assert tensor_to_array(tensor).tobytes() == array.tobytes()


@pytest.mark.slow
@given(st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_elements_survive_the_round_trip(items: list[bytes]) -> None:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    tensor = array_to_tensor("x", array, Datatype.BYTES)
    assert list(tensor_to_array(tensor)) == items == split_bytes(tensor.raw)


def test_text_becomes_utf8_bytes() -> None:
    assert split_bytes(array_to_tensor("x", np.array(["é"], dtype=object), Datatype.BYTES).raw) == ["é".encode()]


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "words"),
    [
        (Datatype.FP32, (2, 2), b"\0" * 15, "needs 16 bytes, but 15 came"),
        (Datatype.INT64, (), b"", "needs 8 bytes, but 0 came"),
        (Datatype.BYTES, (1,), b"\x05\0\0\0abc", "runs past the end"),
        (Datatype.BYTES, (1,), b"\x05\0", "runs past the end"),
        (Datatype.BYTES, (2,), b"\x01\0\0\0a", "needs 2 elements, but 1 came"),
    ],
)
def test_bytes_that_do_not_fit_are_the_callers_fault(
    datatype: Datatype, shape: tuple[int, ...], raw: bytes, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        tensor_to_array(Tensor("x", datatype, shape, raw))
