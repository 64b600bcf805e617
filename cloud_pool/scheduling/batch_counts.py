"""Batch counts record the computed batches: their rows, why they held no more, and how much padding they carried.

Each batch is counted once, by model instance (metric label `lane`). Waste is the share of a batch's work that is
padding: `padded_units` of `work_units`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from cloud_pool.scheduling.job import Batch
from tidegate.metrics.histogram import ROWS, STAGES_S, Histogram


class BatchCounts:
    """Mutable: `took` for each batch that came back with results."""

    def __init__(self) -> None:
        self.rows: dict[str, Histogram] = {}  # by lane
        self.dispatch_s: dict[str, Histogram] = {}  # by lane: from when a batch was due until its worker had it
        self.closes: Counter[tuple[str, str]] = Counter()  # (lane, why)
        self.work_units: defaultdict[str, float] = defaultdict(float)  # by lane, padding included
        self.padded_units: defaultdict[str, float] = defaultdict(float)  # of them: padding

    def dispatched(self, batch: Batch, delay_s: float) -> None:
        """Count a batch that a free worker was given so long after both were there."""
        lane = batch.lane.key
        if lane not in self.dispatch_s:
            self.dispatch_s[lane] = Histogram(STAGES_S)
        self.dispatch_s[lane].observe(delay_s)

    def took(self, batch: Batch) -> None:
        lane = batch.lane.key
        rows = self.rows.get(lane)
        if rows is None:
            rows = self.rows[lane] = Histogram(ROWS)
        rows.observe(batch.rows)
        self.closes[lane, batch.closed_by] += 1
        self.work_units[lane] += batch.units
        self.padded_units[lane] += max(0.0, batch.units - batch.own_units)

    def __repr__(self) -> str:
        return f"<BatchCounts {sum(self.closes.values())} batches>"
