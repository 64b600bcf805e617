"""A batch layout pads requests of unequal length into the arrays of one batch, and splits its outputs by caller.

Rows of all members are stacked along the first axis; along the manifest's `pad_axis` each is filled up with zeros to
the longest, ids and mask alike, so that a model with a mask does not see the filling. An output that has the pad axis
is cut back to its member's own length. Nothing else is touched: one member's content cannot reach another's rows.

Shapes alone decide which requests may share a batch: their `kind` holds every name, datatype and axis length that
must agree. A model joins rows only if the first axis of every input and output is one and the same named axis;
otherwise each request runs by itself. A model without `pad_axis` joins only equal shapes.

The number of rows that comes back is checked before anything is handed out: a model that drops or adds a row would
otherwise answer one caller with another's result.

Source: docs/design/batching.md, "Scheduler invariants" and "Padding and results": results cross-wired between callers
(MLServer#1306), wrong number of results.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.models.manifest import Manifest, TensorSpec

Arrays = Mapping[str, NDArray[Any]]
_MOST_KINDS: Final = 1024


class WrongResults(Exception):
    """The model's outputs do not match the batch that went in."""


class Extent(msgspec.Struct, frozen=True):  # one a request, as a `QueueItem` is
    """The part of a batch that is a member's: its rows, the length of its arrays, and real row lengths if known."""

    rows: int
    length: int
    row_lengths: tuple[int, ...] = ()  # where nothing is padded (`packing.py`)


class BatchLayout:
    """The place of rows and padding in a model's tensors, read from its manifest."""

    def __init__(self, manifest: Manifest) -> None:
        pad_axis = manifest.batching.pad_axis
        self._outputs = tuple(spec.name for spec in manifest.outputs)
        self._pad_dims = {spec.name: _dims(spec, pad_axis) for spec in manifest.inputs}
        self._lengths = [(name, dim) for name, dims in self._pad_dims.items() for dim in dims]
        self._output_pad_dims = {spec.name: _dims(spec, pad_axis) for spec in manifest.outputs}
        firsts = {spec.shape[0] if spec.shape else None for spec in (*manifest.inputs, *manifest.outputs)}
        self._kinds: dict[Hashable, Hashable] = {}  # by names, types and shapes, which most requests share with others
        self.joins_rows = len(firsts) == 1 and isinstance(next(iter(firsts)), str)

    def extent(self, arrays: Arrays) -> Extent:
        """The rows and the length of a checked request; 1 where the model has none."""
        rows = next(iter(arrays.values())).shape[0] if self.joins_rows and arrays else 1
        for name, dim in self._lengths:
            if name in arrays:
                return Extent(rows, arrays[name].shape[dim])
        return Extent(rows, 1)

    def kind(self, arrays: Arrays) -> Hashable:
        """A value that is equal for requests that may share a batch; meaningful only where `joins_rows`."""
        described = tuple([(name, array.dtype, array.shape) for name, array in arrays.items()])
        kind = self._kinds.get(described)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            kind = tuple(sorted((name, array.dtype.str, self._fixed(name, array)) for name, array in arrays.items()))
            self._kinds[described] = kind
        return kind

    def stack(self, members: Sequence[Arrays]) -> Arrays:
        """The arrays of one batch. Those of a single member are returned unchanged."""
        if len(members) == 1:
            return members[0]
        extents = [self.extent(member) for member in members]
        rows = sum(extent.rows for extent in extents)
        length = max(extent.length for extent in extents)
        return {name: self._stack_one(name, members, extents, rows, length) for name in members[0]}

    def split(self, outputs: Arrays, extents: Sequence[Extent]) -> list[dict[str, NDArray[Any]]]:
        """Each member's own outputs, as views of the batch's.

        Raises:
            WrongResults: an output is missing, or has another number of rows than went in.
        """
        missing = [name for name in self._outputs if name not in outputs]
        if missing:
            raise WrongResults(f"the model did not give {', '.join(missing)}")
        if not self.joins_rows:
            return [dict(outputs)]
        for name, array in outputs.items():
            entries = sum(self._entries(name, extent) for extent in extents)
            if array.ndim == 0 or array.shape[0] != entries:
                raise WrongResults(f"output {name!r} came with shape {list(array.shape)} for {entries} rows")
        return self._cut(outputs, extents)

    def split_rows(self, arrays: Arrays, max_rows: int) -> list[Arrays]:
        """A request in parts of at most `max_rows`, as views; in one part where rows cannot be separated."""
        rows = self.extent(arrays).rows
        if not self.joins_rows or rows <= max_rows:
            return [arrays]
        return [{name: array[at : at + max_rows] for name, array in arrays.items()} for at in range(0, rows, max_rows)]

    def join_rows(self, parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        """The outputs of a request from those of its parts, in order.

        Raises:
            WrongResults: an output is of another shape in each part, as one whose length depends on the values is.
        """
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, NDArray[Any]] = {}
        for name in parts[0]:
            try:
                joined[name] = np.concatenate([part[name] for part in parts])
            except ValueError as error:
                shapes = ", ".join(str(list(part[name].shape)) for part in parts[:3])
                raise WrongResults(f"the output {name!r} of its parts cannot be joined ({shapes})") from error
        return joined

    def __repr__(self) -> str:
        return f"<BatchLayout {'joins rows' if self.joins_rows else 'one request a call'}, pads {self._pad_dims}>"

    def _fixed(self, name: str, array: NDArray[Any]) -> tuple[int, ...]:
        free = self._free_dims(name)
        return tuple(-1 if dim in free else length for dim, length in enumerate(array.shape))

    def _free_dims(self, name: str) -> set[int]:
        """The dimensions whose length may differ between batch-mates."""
        return {0, *self._pad_dims.get(name, ())}

    def _stack_one(
        self, name: str, members: Sequence[Arrays], extents: Sequence[Extent], rows: int, length: int
    ) -> NDArray[Any]:
        first = members[0][name]
        shape = [rows, *first.shape[1:]]
        for dim in self._pad_dims.get(name, ()):
            shape[dim] = length
        stacked = np.full(shape, b"", object) if first.dtype.kind == "O" else np.zeros(shape, first.dtype)
        at = 0
        for member, extent in zip(members, extents, strict=True):
            array = member[name]
            inside = tuple(slice(size) for size in array.shape[1:])
            stacked[(slice(at, at + extent.rows), *inside)] = array
            at += extent.rows
        return stacked

    def _entries(self, name: str, extent: Extent) -> int:
        """The number of entries on the first axis of an output that are a member's."""
        return extent.rows

    def _cut(self, outputs: Arrays, extents: Sequence[Extent]) -> list[dict[str, NDArray[Any]]]:
        cut: list[dict[str, NDArray[Any]]] = [{} for _ in extents]
        for name, array in outputs.items():
            at = 0
            for own, extent in zip(cut, extents, strict=True):
                end = at + self._entries(name, extent)
                own[name] = self._trimmed(name, array[at:end], extent)
                at = end
        return cut

    def _trimmed(self, name: str, array: NDArray[Any], extent: Extent) -> NDArray[Any]:
        """A member's output, cut to the length of its inputs."""
        index = [slice(None)] * array.ndim
        for dim in self._output_pad_dims.get(name, ()):
            index[dim] = slice(extent.length)
        return array[tuple(index)]


def _dims(spec: TensorSpec, axis: str | None) -> tuple[int, ...]:
    """Every dimension of `spec` but the first that is `axis`."""
    return tuple(dim for dim, entry in enumerate(spec.shape) if dim > 0 and entry == axis)
