"""Conversion between tensors and numpy arrays, for code that needs the elements: engines, checks, JSON.

Reading is a view where it can be (no copy); BYTES tensors become object arrays of `bytes`. BF16 reads as its uint16
bits, because numpy has no bfloat16.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.outcome import InvalidRequest
from tidegate.types import Buffer, Datatype, Tensor

# By datatype: numpy takes as long to read a type's name as to make the view.
_DTYPES: Final = {datatype: np.dtype(datatype.numpy_name) for datatype in Datatype}


def tensor_to_array(tensor: Tensor) -> NDArray[Any]:
    """A read-only view of the tensor's elements in its shape.

    Raises:
        InvalidRequest: the bytes do not match the shape and datatype.
    """
    if tensor.datatype is Datatype.BYTES:
        return _bytes_array(tensor)
    expected = tensor.elements * tensor.datatype.itemsize
    if len(tensor.raw) != expected:
        raise InvalidRequest(
            f"tensor {tensor.name!r}: {tensor.datatype.value}{list(tensor.shape)} needs {expected} bytes, "
            f"but {len(tensor.raw)} came"
        )
    array: NDArray[Any] = np.frombuffer(tensor.raw, _DTYPES[tensor.datatype]).reshape(tensor.shape)
    return array


def array_to_tensor(name: str, array: NDArray[Any], datatype: Datatype) -> Tensor:
    """The tensor with the elements of `array`, converted to `datatype` if they have another type."""
    if datatype is Datatype.BYTES:
        raw = b"".join(struct.pack("<I", len(item)) + item for item in map(_as_bytes, array.reshape(-1)))
    else:
        raw = np.ascontiguousarray(array, _DTYPES[datatype]).tobytes()
    return Tensor(name, datatype, array.shape, raw)


def split_bytes(raw: Buffer, *, name: str = "") -> list[bytes]:
    """The elements of a raw BYTES tensor. Raises InvalidRequest when a length runs past the end."""
    view, items, at = memoryview(raw), [], 4
    for size_bytes in walk_bytes(raw, name=name):
        items.append(bytes(view[at : at + size_bytes]))
        at += size_bytes + 4
    return items


def walk_bytes(raw: Buffer, *, name: str = "") -> Iterator[int]:
    """The lengths of a raw BYTES tensor's elements, one by one; nothing is made of them. Raises as `split_bytes`."""
    view, at = memoryview(raw), 0
    while at < len(view):
        size_bytes = int.from_bytes(view[at : at + 4], "little")
        if at + 4 + size_bytes > len(view):
            raise InvalidRequest(f"tensor {name!r}: a BYTES element at offset {at} runs past the end of the data")
        yield size_bytes
        at += 4 + size_bytes


def _bytes_array(tensor: Tensor) -> NDArray[Any]:
    items = split_bytes(tensor.raw, name=tensor.name)
    if len(items) != tensor.elements:
        raise InvalidRequest(
            f"tensor {tensor.name!r}: BYTES{list(tensor.shape)} needs {tensor.elements} elements, but {len(items)} came"
        )
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(tensor.shape)


def _as_bytes(item: Any) -> bytes:
    return item.encode() if isinstance(item, str) else bytes(item)
