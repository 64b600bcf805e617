"""What the pool's queue sees of a request: when it came, by when it is due, what it weighs, and with whom it may share.

A file of its own because the batcher and everything that it is made of speak of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from cloud_pool.core.batching.grouping import WorkShape
from tidegate.priority import order_key

FAR_S: Final = 30.0  # deadlines that are farther than this are as good as this: nobody stands behind everybody for ever


@dataclass(frozen=True, slots=True)
class QueueItem:
    """One request, or one part of a large one, as the batcher sees it. Instants are of one monotonic clock."""

    id: int
    arrived_at: float
    deadline: float
    shape: WorkShape
    kind: Hashable = ()  # only equal kinds may share a batch: datatypes and axes that cannot be padded
    priority: int = 0
    cohort: int | None = None  # shares with those of the same number only: they were in a batch that failed

    @property
    def key(self) -> float:
        """Its place in the order; smaller goes first."""
        return order_key(min(self.deadline, self.arrived_at + FAR_S), self.priority)
