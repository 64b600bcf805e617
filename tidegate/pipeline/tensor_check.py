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


class TensorCheck:
    """The check of one declared tensor, laid out once for all requests.

    Args:
        axes: the axes that `spec` names, at least.
    """

    __slots__ = ("_bounds", "_dimensions", "_dtype", "name", "spec")

    def __init__(self, spec: TensorSpec, axes: Mapping[str, Axis]) -> None:
        self.spec = spec
        self.name = spec.name
        self._dtype = None if spec.datatype is Datatype.BYTES else np.dtype(spec.datatype.numpy_name)
        # Of each dimension the axis, "" for a fixed length, and the least and most that it may be.
        self._dimensions = tuple(
            ("", entry, entry) if isinstance(entry, int) else (entry, axes[entry].min, axes[entry].max)
            for entry in spec.shape
        )
        self._bounds = None if spec.datatype in (Datatype.BYTES, Datatype.BF16) else spec.bounds

    def problem(self, array: NDArray[Any], lengths: dict[str, int]) -> str:
        """Why the array is not the declared tensor, or "".

        `lengths` has the request's axes so far, and learns new ones.
        """
        if self._dtype is None:
            if array.dtype.kind not in "OSU":
                return f"{self.name!r} is {array.dtype}, not BYTES"
        elif array.dtype != self._dtype:
            return f"{self.name!r} is {array.dtype}, not {self.spec.datatype.value}"
        shape = array.shape
        if len(shape) != len(self._dimensions):
            return f"{self.name!r} has {len(shape)} dimensions, not those of {list(self.spec.shape)}"
        for length, (axis, least, most) in zip(shape, self._dimensions, strict=True):
            if not least <= length <= most:
                if not axis:
                    return f"{self.name!r} has shape {list(shape)}, not {list(self.spec.shape)}"
                return f"{self.name!r}: axis {axis!r} must be {least} to {most}, not {length}"
            if axis and lengths.setdefault(axis, length) != length:
                return f"{self.name!r}: axis {axis!r} is {length}, but {lengths[axis]} in another tensor"
        bounds = self._bounds
        if bounds is None or not array.size:
            return ""
        # NaN is outside: every comparison with it is false.
        inside = bool(array.min() >= bounds.min) and bool(array.max() <= bounds.max)
        return "" if inside else f"{self.name!r} has values outside of {bounds.min:g} to {bounds.max:g}"

    def __repr__(self) -> str:
        return f"<TensorCheck {self.name} {self.spec.datatype.value}{list(self.spec.shape)}>"
