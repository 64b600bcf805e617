"""Strict conversion between a tensor's JSON data and its bytes: a value that would not survive it is refused.

JSON numbers become bytes once. 1.5 is no INT64, 300 no UINT8, 1e39 no FP32: elements are read into a type that holds
whatever JSON may say and compared after they were narrowed, so that nothing is rounded, wrapped or cut to fit. Only a
float may lose digits on its way to FP32. FP16 and BF16 have no JSON form, nor have infinity and NaN, of which a reader
of `null` would make the same; BYTES are UTF-8 text.

Data is nested as its shape says or flat with as many elements. Which of the two is seen from its first brackets, and
then one typed decoder reads it all: a list of another depth or with another element in it is no list of this type. The
decoders are kept, one for each type and depth; the rank of a shape is bounded before
(`tidegate/oip/content_limits.py`), and with it how many there can be.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import split_bytes, tensor_to_array
from tidegate.oip.check import quoted_input
from tidegate.outcome import BadAnswer, InvalidRequest
from tidegate.types import Datatype, Tensor

_BINARY_ONLY: Final = frozenset({Datatype.FP16, Datatype.BF16})
_NESTED: Final = re.compile(rb"\s*\[\s*\[")
_ELEMENT: Final[Mapping[str, type]] = {"?": bool, "u": int, "i": int, "f": float, "O": str}
_decoders: dict[tuple[type, int], msgspec.json.Decoder[Any]] = {}


class InputJson(msgspec.Struct):
    """An input as a request's JSON has it; its `data` is left as text until its datatype is known."""

    name: str
    shape: tuple[int, ...]
    datatype: Datatype
    parameters: dict[str, bool | int | float | str] | None = None
    data: msgspec.Raw = msgspec.Raw()


def raw_of(entry: InputJson) -> bytes:
    """The tensor's bytes. Raises InvalidRequest if the data does not match its datatype and shape."""
    if entry.datatype in _BINARY_ONLY:
        raise InvalidRequest(
            f"input {quoted_input(entry.name)}: {entry.datatype.value} has no JSON form; send it as binary data"
        )
    if not len(entry.data):
        raise InvalidRequest(f"input {quoted_input(entry.name)} has no data")
    values = _values(entry)
    if entry.datatype is Datatype.BYTES:
        return _raw_from_strings(values, entry)
    return _raw_from_numbers(values, entry)


def _values(entry: InputJson) -> list[Any]:
    """The JSON data as lists of one Python type, nested as deep as the shape or not at all."""
    nested = _NESTED.match(entry.data) is not None
    element = _ELEMENT[entry.datatype.numpy_name.lstrip("<")[0]]
    try:
        values: list[Any] = _decoder(element, len(entry.shape) if nested else 1).decode(entry.data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"input {quoted_input(entry.name)}: its data is no {_form(entry)}: {error}") from error
    return values


def _decoder(element: type, depth: int) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get((element, depth))
    if decoder is None:
        kind: Any = element
        for _ in range(max(1, depth)):
            kind = list[kind]
        decoder = _decoders[element, depth] = msgspec.json.Decoder(kind)
    return decoder


def _raw_from_numbers(values: list[Any], entry: InputJson) -> bytes:
    datatype = entry.datatype
    try:
        array = np.array(values, dtype=_wide(datatype))
        _check_layout(array.shape, entry)
        with np.errstate(over="ignore"):
            narrow = array.astype(datatype.numpy_name)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"input {quoted_input(entry.name)}: its data is no {_form(entry)}") from error
    # A float loses digits on its way to FP32 but must stay a number; an integer must stay what it is.
    kept = np.isfinite(narrow).all() if narrow.dtype.kind == "f" else np.array_equal(narrow, array)
    if not kept:
        raise InvalidRequest(f"input {quoted_input(entry.name)}: an element does not fit into {datatype.value}")
    return narrow.tobytes()


def _wide(datatype: Datatype) -> str:
    """A dtype that holds whatever the JSON may say, so that what does not fit is seen and not wrapped."""
    kind = datatype.numpy_name.lstrip("<")[0]
    if kind == "u" and datatype is Datatype.UINT64:
        return "O"
    return {"?": "?", "u": "<i8", "i": "<i8", "f": "<f8"}[kind]


def _raw_from_strings(values: list[Any], entry: InputJson) -> bytes:
    array = np.array(values, dtype=object)
    items = [item.encode() if isinstance(item, str) else None for item in array.reshape(-1)]
    if None in items:
        raise InvalidRequest(f"input {quoted_input(entry.name)}: its data is no {_form(entry)}")
    _check_layout(array.shape, entry)
    return b"".join([struct.pack("<I", len(item)) + item for item in items if item is not None])


def _check_layout(layout: tuple[int, ...], entry: InputJson) -> None:
    """Data is nested exactly as its shape, or flat with as many elements; empty data shows no nesting."""
    loose = len(layout) <= 1 or 0 in layout
    if layout != entry.shape and not (loose and prod(layout) == prod(entry.shape)):
        came = f"nested as {list(layout)}" if len(layout) > 1 else f"{prod(layout)} elements"
        raise InvalidRequest(
            f"input {quoted_input(entry.name)}: its shape is {list(entry.shape)}, but its data is {came}"
        )


def _form(entry: InputJson) -> str:
    return f"flat or nested array of {entry.datatype.value} in shape {quoted_input(list(entry.shape))}"


def check_json_form(name: str, datatype: Datatype) -> None:
    """Raises InvalidRequest for an output whose datatype has no JSON form."""
    if datatype in _BINARY_ONLY:
        raise InvalidRequest(f"output {name!r} is {datatype.value}, which has no JSON form; ask for binary data")


def json_of(tensor: Tensor) -> list[Any]:
    """The flat list of an output's elements.

    Raises:
        InvalidRequest: it has no JSON form, so the caller must ask for it as binary.
        BadAnswer: its bytes do not fit its shape.
    """
    check_json_form(tensor.name, tensor.datatype)
    try:
        if tensor.datatype is Datatype.BYTES:
            return [item.decode() for item in split_bytes(tensor.raw, name=tensor.name)]
        array: NDArray[Any] = tensor_to_array(tensor)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"output {tensor.name!r} is no UTF-8 text; ask for binary data") from error
    except InvalidRequest as error:
        raise BadAnswer(error.message) from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRequest(
            f"output {tensor.name!r} holds infinity or NaN, which have no JSON form; ask for binary data"
        )
    values: list[Any] = array.reshape(-1).tolist()
    return values
