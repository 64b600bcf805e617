"""Hypothesis's idea of a tensor: any datatype, any small shape, any bytes that fit."""

from __future__ import annotations

import struct
from math import prod

from hypothesis import strategies as st

from tidegate.types import Datatype, Parameter, Tensor

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
PARAMETERS: st.SearchStrategy[dict[str, Parameter]] = st.dictionaries(
    st.sampled_from(["a", "sequence_id", "x-custom"]),
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5),
    ),
)


@st.composite
def tensors(draw: st.DrawFn, name: str = "x") -> Tensor:
    datatype = draw(st.sampled_from(list(Datatype)))
    shape = draw(SHAPES)
    count = prod(shape)
    if datatype is Datatype.BYTES:
        items = draw(st.lists(st.binary(max_size=6), min_size=count, max_size=count))
        raw = b"".join(struct.pack("<I", len(item)) + item for item in items)
    elif datatype is Datatype.BOOL:
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        size = count * datatype.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
    return Tensor(name, datatype, shape, raw)


def several() -> st.SearchStrategy[tuple[Tensor, ...]]:
    return st.integers(0, 3).flatmap(lambda count: st.tuples(*(tensors(name=f"t{index}") for index in range(count))))
