"""A lane: everything that the pool keeps for one model variant on its device.

How its tensors are laid out, what its work costs here (measured at warm-up, corrected by every batch), who waits for
it, and its statistics. Lanes share the device but never a batch.

A request larger than a batch may be is cut into parts of whole rows, each of which waits and runs as an item of its
own; rows are independent of each other, so the caller cannot tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from cloud_pool.core.batching import Batcher
from cloud_pool.core.grouping import Shape
from cloud_pool.core.padding import Arrays, Extent, Layout
from tidegate.estimate.service_time import ServiceTime
from tidegate.models.manifest import Manifest, Variant
from tidegate.oip.host import ModelStatistics


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a request: its arrays, its extent in a batch, and what grouping sees of it."""

    arrays: Arrays
    extent: Extent
    shape: Shape
    kind: Hashable


class Lane:
    """Mutable through its parts: `batcher`, `service` and `statistics`.

    Args:
        key: under which the worker has the engine.
        cost: measured (work units, seconds) points of this device.
    """

    def __init__(self, key: str, manifest: Manifest, variant: Variant, cost: Sequence[tuple[float, float]]) -> None:
        batching = manifest.batching
        self.key = key
        self.manifest = manifest
        self.variant = variant
        self.cost = tuple(cost)
        self.layout = Layout(manifest)
        self.service = ServiceTime(cost)
        self.statistics = ModelStatistics(manifest.name, manifest.version)
        self._max_rows = min(batching.max_batch_size, variant.max_batch or batching.max_batch_size)
        self._max_work = float(batching.max_work or inf)
        self._stretches = _cost_grows_with_padding(manifest)
        self._loners = itertools.count()
        self.batcher = Batcher(
            self.service.predict_s,
            max_rows=self._max_rows,
            max_work=self._max_work,
            max_queue_size=batching.max_queue_size,
            max_queue_delay_s=batching.max_queue_delay_s,
        )

    def pieces(self, arrays: Arrays, units: float) -> list[Piece]:
        """A checked request, in parts that each fit into a batch if a single row does."""
        rows = self.layout.extent(arrays).rows
        per_row = units / max(rows, 1)
        fitting = int(self._max_work / per_row) if per_row > 0.0 and self._max_work < inf else self._max_rows
        parts = self.layout.split_rows(arrays, max(1, min(self._max_rows, fitting)))
        return [self._piece(part, per_row) for part in parts]

    def _piece(self, arrays: Arrays, units_per_row: float) -> Piece:
        extent = self.layout.extent(arrays)
        length = max(1, extent.length) if self._stretches else 1
        shape = Shape(extent.rows, length, units_per_row * extent.rows)
        kind = self.layout.kind(arrays) if self.layout.joins_rows else next(self._loners)
        return Piece(arrays, extent, shape, kind)

    def __repr__(self) -> str:
        return f"<Lane {self.key} {self.batcher!r} {self.service!r}>"


def _cost_grows_with_padding(manifest: Manifest) -> bool:
    """Whether a longer row is more work: not where work counts items, nor where the cost input is never padded."""
    spec = next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)
    return manifest.cost.feature != "items" and spec is not None and manifest.batching.pad_axis in spec.shape[1:]
