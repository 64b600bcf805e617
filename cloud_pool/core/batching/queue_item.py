"""A queue item describes one request to the pool's queue: arrival, deadline, work, and which batch-mates it may have.

It has a file of its own because the batcher and all parts of the batcher use it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import msgspec

from cloud_pool.core.batching.grouping import WorkShape
from tidegate.priority import order_key

FAR_S: Final = 30.0  # a farther deadline counts as this one, so that no request is overtaken for ever


class QueueItem(msgspec.Struct, frozen=True):  # one a request: a frozen dataclass takes five times as long to make
    """One request, or one part of a large one, as the batcher sees it. Instants are of one monotonic clock."""

    id: int
    arrived_at: float
    deadline: float
    shape: WorkShape
    kind: Hashable = ()  # only equal kinds may share a batch: datatypes and axes that cannot be padded
    priority: int = 0
    cohort: int | None = None  # shares only with items of the same number, which were in a batch that failed

    @property
    def key(self) -> float:
        """The item's place in the order; a smaller key goes first."""
        return order_key(min(self.deadline, self.arrived_at + FAR_S), self.priority)
