"""Tensors as a WebAssembly step sees them in its memory: a small binary header before each one's elements.

    message   u32 count, u32 zero, then `count` tensors in the order in which the step names them
    tensor    u32 datatype, u32 rank, u64 size in bytes, u64 length of each dimension, the elements, zeros up to 8

All numbers are little-endian, elements lie row by row, and a BYTES element is its length (u32) and its bytes, as in the
Open Inference Protocol. Each tensor begins at a multiple of 8 from the message's beginning.

What a module gives back is foreign input: nothing is believed before it was compared with the declaration. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.models.manifest import TensorSpec
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, Tensor

# The codes are part of the interface of modules: never changed, only added to.
DATATYPE_CODES: Final[Mapping[Datatype, int]] = {
    Datatype.BOOL: 1, Datatype.UINT8: 2, Datatype.UINT16: 3, Datatype.UINT32: 4, Datatype.UINT64: 5,
    Datatype.INT8: 6, Datatype.INT16: 7, Datatype.INT32: 8, Datatype.INT64: 9, Datatype.FP16: 10,
    Datatype.FP32: 11, Datatype.FP64: 12, Datatype.BYTES: 13, Datatype.BF16: 14,
}  # fmt: skip
_COUNT: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct("<IIQ")
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
Arrays = Sequence[NDArray[Any]]


class BadWasmMessage(Exception):
    """What a module gave back is not the message that it has to give; says what is wrong with it."""


def message_of(specs: Sequence[TensorSpec], arrays: Arrays) -> bytes:
    """The message with these tensors, which are as declared."""
    parts = [_COUNT.pack(len(specs), 0)]
    for spec, array in zip(specs, arrays, strict=True):
        if spec.datatype is Datatype.BYTES:
            raw = bytes(array_to_tensor(spec.name, array, Datatype.BYTES).raw)
        else:
            raw = array.tobytes()
        shape = array.shape
        parts += (
            _HEAD.pack(DATATYPE_CODES[spec.datatype], len(shape), len(raw)),
            struct.pack(f"<{len(shape)}Q", *shape),
            raw,
            bytes(-len(raw) % _ALIGNMENT),
        )
    return b"".join(parts)


def arrays_of(message: bytes, specs: Sequence[TensorSpec]) -> list[NDArray[Any]]:
    """The tensors of a message, of the declared datatypes and ranks; they alias it. Raises BadWasmMessage.

    Whether their lengths are the declared ones is the next one's to check, as of every step (`tensor_check.py`).
    """
    if len(message) < _COUNT.size:
        raise BadWasmMessage(f"it has {len(message)} bytes, fewer than a message begins with")
    count, _ = _COUNT.unpack_from(message)
    if count != len(specs):
        raise BadWasmMessage(f"it gave {count} tensors, not {len(specs)}")
    found: list[NDArray[Any]] = []  # an annotation: to subscript NDArray takes three times what a tensor does
    at = _COUNT.size
    for spec in specs:
        array, at = _tensor(message, at, spec)
        found.append(array)
    if at != len(message):
        raise BadWasmMessage(f"{len(message) - at} bytes follow its last tensor")
    return found


def _tensor(message: bytes, at: int, spec: TensorSpec) -> tuple[NDArray[Any], int]:
    """A tensor, and where the next one begins."""
    if at + _HEAD.size > len(message):
        raise BadWasmMessage(f"it ends before {spec.name!r}")
    code, rank, size_bytes = _HEAD.unpack_from(message, at)
    if code != DATATYPE_CODES[spec.datatype]:
        raise BadWasmMessage(f"{spec.name!r} has datatype {code}, not {DATATYPE_CODES[spec.datatype]}, {spec.datatype}")
    if rank != len(spec.shape):
        raise BadWasmMessage(f"{spec.name!r} has {rank} dimensions, not {len(spec.shape)}")
    at += _HEAD.size
    begins = at + _LENGTH_BYTES * rank
    ends = begins + size_bytes
    following = ends + -size_bytes % _ALIGNMENT
    if following > len(message):
        raise BadWasmMessage(f"it ends within {spec.name!r}")
    shape = struct.unpack_from(f"<{rank}Q", message, at)
    raw = memoryview(message)[begins:ends]
    elements = prod(shape)
    if spec.datatype is Datatype.BYTES:
        # An element takes four bytes at least: a shape that promises more is not looked at.
        if elements * 4 > size_bytes:
            raise BadWasmMessage(f"{spec.name!r} of {elements} elements has only {size_bytes} bytes")
        try:
            return tensor_to_array(Tensor(spec.name, spec.datatype, shape, raw)), following
        except InvalidRequest as error:
            raise BadWasmMessage(error.message) from error
        except (ValueError, OverflowError) as error:  # nothing, by as much as no array may have
            raise BadWasmMessage(f"{spec.name!r} cannot have shape {list(shape)}") from error
    if size_bytes != elements * spec.datatype.itemsize:
        raise BadWasmMessage(f"{spec.name!r} of shape {list(shape)} has {size_bytes} bytes")
    try:
        return np.frombuffer(raw, spec.datatype.numpy_name).reshape(shape), following
    except (ValueError, OverflowError) as error:
        raise BadWasmMessage(f"{spec.name!r} cannot have shape {list(shape)}") from error
