"""Packing: rows of unequal length one after another, with their lengths beside them, in place of one padded rectangle.

A padded token costs what a real one does, and nearly all of a transformer (linear layers, normalisation) works on each
token by itself. A variant that takes its rows packed therefore computes no padding at all:

    plain    input_ids [rows, length], attention_mask [rows, length]
    packed   input_ids [tokens],       attention_mask [tokens],       lengths [rows]       tokens = Σ lengths

What a variant takes is said in its manifest (`Packed`): the axis that is packed, the name of the added input with the
lengths, and the input that says which positions are real. Zeros of that mask at the end of a row are padding and are
left out; other zeros stay, because what follows them has its position. A row without a single real token keeps its
first, so that no artefact ever meets an empty row. Tensors with the axis must have it second, behind the rows.

Packed outputs go the other way, and what was left out is zero there. Pure numpy, for both ends: the pool packs the rows
of all members of a batch, and an engine that was given a plain batch packs that (`engines/packed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.models.manifest import Manifest, Packed

Arrays = Mapping[str, NDArray[Any]]
Lengths = NDArray[np.int64]


class Packing(msgspec.Struct, frozen=True, array_like=True):
    """The packing of one variant: the inputs and outputs with the packed axis, and the inputs that describe it."""

    lengths: str
    mask: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def packing_of(manifest: Manifest, packed: Packed | None) -> Packing | None:
    """What `packed` means for the model's tensors; None for a variant that takes plain batches."""
    if packed is None:
        return None
    return Packing(
        packed.lengths,
        packed.mask,
        tuple(spec.name for spec in manifest.inputs if packed.axis in spec.shape),
        tuple(spec.name for spec in manifest.outputs if packed.axis in spec.shape),
    )


def row_lengths(packing: Packing, arrays: Arrays) -> Lengths:
    """The length of each row of a plain request or batch, without the padding that its mask shows."""
    mask = arrays.get(packing.mask)
    if mask is None:
        rows, length = next(arrays[name].shape[:2] for name in packing.inputs if name in arrays)
        return np.full(rows, length, np.int64)
    rows, length = mask.shape[:2]
    if mask[:, -1:].all():  # the usual case: callers do not pad a row that is by itself
        return np.full(rows, length, np.int64)
    real = mask[:, ::-1] != 0
    found = np.where(real.any(axis=1), length - real.argmax(axis=1), 1)
    return found.astype(np.int64)


def pack(packing: Packing, members: Sequence[Arrays], lengths: Sequence[Lengths]) -> dict[str, NDArray[Any]]:
    """One packed batch of all rows of all members; `lengths` as `row_lengths` found them."""
    parts = {name: [array] for name, array in members[0].items()}
    for member in members[1:]:
        for name, array in member.items():
            parts[name].append(array)
    batch = {
        name: np.concatenate(
            [_flat(array, own) for array, own in zip(arrays, lengths, strict=True)]
            if name in packing.inputs
            else arrays
        )
        for name, arrays in parts.items()
    }
    batch[packing.lengths] = np.concatenate(lengths)
    return batch


def unpack(array: NDArray[Any], lengths: Lengths, length: int) -> NDArray[Any]:
    """A packed output as rows of `length`, zero beyond each row's own."""
    if (lengths == length).all():
        return array.reshape(len(lengths), length, *array.shape[1:])
    rows = np.zeros((len(lengths), length, *array.shape[1:]), array.dtype)
    rows[np.arange(length) < lengths[:, None]] = array
    return rows


def _flat(array: NDArray[Any], lengths: Lengths) -> NDArray[Any]:
    rows, length = array.shape[:2]
    if (lengths == length).all():
        return array.reshape(rows * length, *array.shape[2:])
    return array[np.arange(length) < lengths[:, None]]
