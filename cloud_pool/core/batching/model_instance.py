"""A model instance holds what the pool keeps for one model variant on its device (metric label `lane`).

It holds the layout of the tensors, the cost of the work here (measured at warm-up, corrected by every batch), the queue
and the statistics. Model instances share the device but never a batch.

A request larger than a batch may be is cut into parts of whole rows, each of which waits and runs as an item of its
own; rows are independent of each other, so the caller sees no difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from math import inf

import msgspec

from cloud_pool.core.batching.batcher import Batcher
from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.latency_model import LatencyModel
from cloud_pool.core.batching.latency_targets import answer_target_s
from cloud_pool.core.batching.packing import layout_of
from cloud_pool.core.batching.padding import Arrays, Extent
from cloud_pool.core.batching.queue_policy import QueuePolicies
from cloud_pool.core.memory.device_memory import LaneMemory
from cloud_pool.core.memory.footprint import Footprint, expected_bytes_per_unit
from tidegate.models.manifest import Manifest, Variant
from tidegate.oip.host import ModelStatistics, TimedCount


class RequestSlice(msgspec.Struct, frozen=True):  # one a request, as a `QueueItem` is
    """One part of a request: its arrays, its extent in a batch, and its shape for grouping."""

    arrays: Arrays
    extent: Extent
    shape: WorkShape
    kind: Hashable


class ModelInstance:
    """Mutable through its parts: `batcher`, `service`, `memory` and `statistics`.

    Args:
        key: name under which the worker has the engine.
        cost: measured (work units, seconds) points of this device.
    """

    def __init__(self, key: str, manifest: Manifest, variant: Variant, cost: Sequence[tuple[float, float]]) -> None:
        batching = manifest.batching
        self.key = key
        self.manifest = manifest
        self.variant = variant
        self.cost = tuple(cost)
        self.layout = layout_of(manifest, variant)
        self.service = LatencyModel(cost)
        self.latency_target_s = answer_target_s(manifest.default_budget_s, self.cost)
        self.memory = LaneMemory(Footprint(expected_bytes_per_unit(manifest, variant)))
        self.statistics = ModelStatistics(manifest.name, manifest.version)
        self._max_rows = min(batching.max_batch_size, variant.max_batch or batching.max_batch_size)
        self._max_work = float(batching.max_work or inf)
        self._stretches = _cost_grows_with_padding(manifest)
        self._loners = itertools.count()
        self.batcher = self.new_batcher()

    def new_batcher(self) -> Batcher:
        """An empty queue under this instance's policy and limits; all workers feed from `batcher`."""
        batching = self.manifest.batching
        return Batcher(
            self.service,
            max_rows=self._max_rows,
            max_work=self._max_work,
            max_queue_size=batching.max_queue_size,
            max_queue_delay_s=batching.max_queue_delay_s,
            policy=batching.policy,
            preferred_batch_size=batching.preferred_batch_size,
            target_batch_s=batching.target_batch_s,
            queue_policies=QueuePolicies(batching.default_queue_policy, batching.priority_queue_policy),
        )

    def pieces(self, arrays: Arrays, units: float, most_units: float = inf) -> list[RequestSlice]:
        """A checked request in parts, each of which fits into a batch and into `most_units`, if a single row does."""
        extent, most = self.layout.extent(arrays), min(self._max_work, most_units)
        per_row = units / max(extent.rows, 1)
        fitting = int(most / per_row) if per_row > 0.0 and most < inf else self._max_rows
        most_rows = max(1, min(self._max_rows, fitting))
        if extent.rows <= most_rows:
            return [self._piece(arrays, extent, per_row)]
        parts = self.layout.split_rows(arrays, most_rows)
        return [self._piece(part, self.layout.extent(part), per_row) for part in parts]

    def alone_s(self, shape: WorkShape) -> float:
        """Predicted seconds of a request by itself."""
        return self.service.predict_s(shape.units, shape.length)

    def count(self, rows: int, compute_s: float, *, utc_s: float) -> None:
        """Count one more batch in the statistics."""
        self.statistics.execution_count += 1
        self.statistics.inference_count += rows
        self.statistics.last_inference_ms = int(utc_s * 1e3)
        self.statistics.batches.setdefault(rows, TimedCount()).add(compute_s)

    def _piece(self, arrays: Arrays, extent: Extent, units_per_row: float) -> RequestSlice:
        shape = self._shape(extent, units_per_row)
        kind = self.layout.kind(arrays) if self.layout.joins_rows else next(self._loners)
        return RequestSlice(arrays, extent, shape, kind)

    def _shape(self, extent: Extent, units_per_row: float) -> WorkShape:
        if extent.row_lengths and self._stretches:
            # Nothing is padded: a row weighs its real length, whatever its batch-mates are.
            return WorkShape(extent.rows, 1, units_per_row * sum(extent.row_lengths) / max(1, extent.length))
        length = max(1, extent.length) if self._stretches else 1
        return WorkShape(extent.rows, length, units_per_row * extent.rows)

    def __repr__(self) -> str:
        return f"<ModelInstance {self.key} {self.batcher!r} {self.service!r}>"


def _cost_grows_with_padding(manifest: Manifest) -> bool:
    """Whether a longer row is more work: not where work counts items, nor where the cost input is never padded."""
    spec = next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)
    return manifest.cost.feature != "items" and spec is not None and manifest.batching.pad_axis in spec.shape[1:]
