"""Queue policies limit how many requests wait at each level of priority, and for how long.

The words are Triton's, so that a `config.pbtxt` carries over: `max_queue_size`, `default_timeout_microseconds` and
`timeout_action` (REJECT or DELAY), for all levels (`default_queue_policy`) or for one (`priority_queue_policy`). What
is different is what has hurt its users:

    time        a timeout is an instant at which something happens, whether a device is free or not; Triton looks when
                it next forms a batch (server#7512)
    the caller  its own timeout is its deadline and counts always, beside the level's: the smaller one counts.
                Triton silently ignores it where the level has none
    a full level   is refused, as in Triton; with `demote_when_full` the request waits at the next lower level that has
                room, whose place, worth and timeout it then has
    DELAY       a request that has waited too long goes behind every request that waits in that moment, and no further:
                a request that arrives later by more than the levels' head start goes behind it. In Triton a delayed
                request may wait for ever

A request that goes back into the queue because its batch failed was in time once, and has no timeout any more.

Source: Triton's `ModelQueuePolicy` (docs/design/batching.md, "Queue policies").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from cloud_pool.core.batching.queue_item import QueueItem
from tidegate.models.manifest import QueuePolicy
from tidegate.priority import LAST_LEVEL, level_of


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The policies of one queue: one for all levels, and others for some."""

    default: QueuePolicy = field(default_factory=QueuePolicy)
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether no level has a limit of its own, neither of requests nor of time."""
        every = (self.default, *self.by_level.values())
        return not any(policy.max_queue_size or policy.default_timeout_microseconds for policy in every)

    def of(self, priority: int) -> QueuePolicy:
        return self.by_level.get(level_of(priority), self.default)

    def room(self, priority: int) -> float:
        """How many requests may wait at this level; infinity for any number."""
        return self.of(priority).max_queue_size or inf

    def fallback_levels(self, priority: int) -> range:
        """The levels at which a request may wait instead when its own is full, the highest first."""
        level = level_of(priority)
        return range(level + 1, LAST_LEVEL + 1 if self.of(priority).demote_when_full else level + 1)

    def rejected_at(self, item: QueueItem) -> float:
        """When an item has waited too long to be computed at all; infinity for never."""
        return self._timeout_at(item, "REJECT")

    def delayed_at(self, item: QueueItem) -> float:
        """When an item has waited too long to keep its place; infinity for never."""
        return self._timeout_at(item, "DELAY")

    def _timeout_at(self, item: QueueItem, action: str) -> float:
        policy = self.of(item.priority)
        if policy.timeout_action != action or not policy.default_timeout_microseconds:
            return inf
        return item.arrived_at + policy.default_timeout_microseconds / 1e6
