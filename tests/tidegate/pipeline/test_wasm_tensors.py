"""The messages between a worker and its modules: what is written reads as it was, and nothing else is believed."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.models.manifest import Axis, TensorSpec
from tidegate.pipeline.tensor_check import TensorCheck
from tidegate.pipeline.wasm_tensors import DATATYPE_CODES, BadWasmMessage, arrays_of, message_of
from tidegate.types import Datatype

AXES = {"batch": Axis(1, 4), "width": Axis(0, 8)}
SPECS = (
    TensorSpec("text", Datatype.BYTES, ("batch",)),
    TensorSpec("values", Datatype.FP32, ("batch", "width")),
    TensorSpec("flag", Datatype.BOOL, (1,)),
)


def tensors(rows: int, width: int, seed: int) -> list[NDArray[Any]]:
    random = np.random.default_rng(seed)
    text = np.empty(rows, object)
    text[:] = [random.bytes(int(random.integers(0, 9))) for _ in range(rows)]
    return [text, random.standard_normal((rows, width)).astype(np.float32), np.array([True])]


def test_a_code_stands_for_each_datatype() -> None:
    assert set(DATATYPE_CODES) == set(Datatype)
    assert sorted(DATATYPE_CODES.values()) == list(range(1, 15))


def test_a_message_begins_with_its_tensors_head() -> None:
    message = message_of(SPECS[1:2], [np.array([[1.0, 2.0]], np.float32)])
    assert message == (
        b"\1\0\0\0\0\0\0\0\x0b\0\0\0\2\0\0\0\x08\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\x40"
    )


@given(st.integers(1, 4), st.integers(0, 8), st.integers(0, 99))
def test_what_is_written_reads_as_it_was(rows: int, width: int, seed: int) -> None:
    arrays = tensors(rows, width, seed)
    message = message_of(SPECS, arrays)
    assert len(message) % 8 == 0
    found = arrays_of(message, SPECS)
    for one, other in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.integers(0, 99), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), st.data())
def test_a_message_that_was_tampered_with_is_refused_or_has_the_declared_datatypes_and_ranks(
    seed: int, edits: list[tuple[int, int]], data: st.DataObject
) -> None:
    message = bytearray(message_of(SPECS, tensors(2, 3, seed)))
    for at, value in edits:
        message[at % len(message)] = value
    cut = data.draw(st.integers(0, len(message)))
    try:
        found = arrays_of(bytes(message[:cut]), SPECS)
    except BadWasmMessage:
        return
    lengths: dict[str, int] = {}
    for spec, array in zip(SPECS, found, strict=True):
        problem = TensorCheck(spec, AXES).problem(array, lengths)
        assert problem == "" or "axis" in problem or "has shape" in problem, "of lengths only"


@pytest.mark.parametrize("shape", [(0, 2**63), (2**63, 0), (0, 2**64 - 1)])
@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES])
def test_nothing_by_more_than_an_array_may_have_is_refused(shape: tuple[int, int], datatype: Datatype) -> None:
    spec = TensorSpec("values", datatype, ("batch", "width"))
    message = struct.pack("<IIIIQQQ", 1, 0, DATATYPE_CODES[datatype], 2, 0, *shape)
    with pytest.raises(BadWasmMessage, match="cannot have shape"):
        arrays_of(message, [spec])


@pytest.mark.parametrize(
    ("spec", "array", "words"),
    [
        (SPECS[1], np.zeros((2, 9), np.float32), "axis 'width' must be 0 to 8, not 9"),
        (SPECS[1], np.zeros((3, 1), np.float32), "axis 'batch' is 3, but 2 in another tensor"),
        (SPECS[1], np.zeros((2, 1), np.float64), "'values' is float64, not FP32"),
        (SPECS[1], np.zeros(2, np.float32), "'values' has 1 dimensions"),
        (SPECS[0], np.zeros(2, np.float32), "'text' is float32, not BYTES"),
        (SPECS[2], np.zeros(2, bool), "'flag' has shape [2], not [1]"),
    ],
)
def test_what_is_not_declared_is_told(spec: TensorSpec, array: NDArray[Any], words: str) -> None:
    check = TensorCheck(spec, AXES)
    assert words in check.problem(array, {"batch": 2})
    assert repr(check) == f"<TensorCheck {spec.name} {spec.datatype.value}{list(spec.shape)}>"
