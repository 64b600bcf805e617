"""Checks what a step or a model gave against what the manifest declares, so that nothing undeclared goes on.

A step may be anybody's program, and a model kills its worker when an id is beyond its table. So datatype, rank,
lengths, axes that tensors share within one request, and bounds are checked wherever a tensor comes into being.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.models.manifest import Axis, TensorSpec
from tidegate.types import Datatype


def shape_problem(spec: TensorSpec, shape: tuple[int, ...], axes: Mapping[str, Axis], lengths: dict[str, int]) -> str:
    """Why the shape is not the declared one, or "". `lengths` has the request's axes so far, and learns new ones."""
    if len(shape) != len(spec.shape):
        return f"{spec.name!r} has {len(shape)} dimensions, not those of {list(spec.shape)}"
    for length, entry in zip(shape, spec.shape, strict=True):
        if isinstance(entry, int):
            if length != entry:
                return f"{spec.name!r} has shape {list(shape)}, not {list(spec.shape)}"
            continue
        axis = axes[entry]
        if not axis.min <= length <= axis.max:
            return f"{spec.name!r}: axis {entry!r} must be {axis.min} to {axis.max}, not {length}"
        if lengths.setdefault(entry, length) != length:
            return f"{spec.name!r}: axis {entry!r} is {length}, but {lengths[entry]} in another tensor"
    return ""


def array_problem(spec: TensorSpec, array: NDArray[Any], axes: Mapping[str, Axis], lengths: dict[str, int]) -> str:
    """Why the array is not the declared tensor, or ""."""
    if spec.datatype is Datatype.BYTES:
        if array.dtype.kind not in "OSU":
            return f"{spec.name!r} is {array.dtype}, not BYTES"
    elif array.dtype != np.dtype(spec.datatype.numpy_name):
        return f"{spec.name!r} is {array.dtype}, not {spec.datatype.value}"
    if problem := shape_problem(spec, array.shape, axes, lengths):
        return problem
    bounds = spec.bounds
    if bounds is None or not array.size or spec.datatype in (Datatype.BYTES, Datatype.BF16):
        return ""
    # NaN is outside: every comparison with it is false.
    inside = bool(array.min() >= bounds.min) and bool(array.max() <= bounds.max)
    return "" if inside else f"{spec.name!r} has values outside of {bounds.min:g} to {bounds.max:g}"
