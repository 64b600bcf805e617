"""The instance queues: each model instance has one that all workers feed from, and one for each bound worker.

A job that is bound to a worker, because its state lives there, waits in a queue of that worker's own, so that it never
blocks those that could run elsewhere. Such a queue lives as long as its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from math import inf

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.batching.queue_item import QueueItem
from cloud_pool.scheduling.job import InstanceQueue


class InstanceQueues:
    """Mutable: `open` model instances, `drop` the queues that were bound to a worker that is gone."""

    def __init__(self) -> None:
        self._shared: dict[str, InstanceQueue] = {}  # by model instance
        self._bound: dict[tuple[str, str], InstanceQueue] = {}  # by model instance and worker
        self._cap_ratio = 1.0

    def open(self, lane: ModelInstance) -> None:
        self._shared[lane.key] = self._capped(InstanceQueue(lane, lane.batcher))

    def close(self, key: str) -> list[QueueItem]:
        """Take no more for a model instance; returns the items that waited."""
        bound = [self._bound.pop(one) for one in [one for one in self._bound if one[0] == key]]
        closed = [*bound, *([self._shared.pop(key)] if key in self._shared else [])]
        for queue in closed:
            queue.closed = True
        return [item for queue in closed for item in queue.batcher.waiting()]

    def of(self, key: str, worker: str | None) -> InstanceQueue:
        """The queue of an open model instance, for any worker or for this one."""
        if worker is None:
            return self._shared[key]
        if (key, worker) not in self._bound:
            lane = self._shared[key].lane
            self._bound[key, worker] = self._capped(InstanceQueue(lane, lane.new_batcher(), worker))
        return self._bound[key, worker]

    def drop(self, worker: str) -> list[QueueItem]:
        """Forget the queues of a worker that is gone; returns the items that waited there."""
        dropped = [self._bound.pop(key) for key in [key for key in self._bound if key[1] == worker]]
        return [item for queue in dropped for item in queue.batcher.waiting()]

    def next_wake(
        self, now: float, *, worker_free: bool, free_for: Callable[[str], bool] = lambda _lane: True
    ) -> float:
        """When to look again; infinity while the queues are empty.

        Args:
            free_for: whether a worker that is free holds the model instance of a key.
        """
        wakes = [queue.batcher.next_wake(now, worker_free=worker_free and free_for(queue.lane.key)) for queue in self]
        return min((wake for wake in wakes if wake is not None), default=inf)

    def ahead(self, key: float) -> tuple[int, float]:
        """How many items for any worker wait before an order key, and the seconds that they should take."""
        total, total_s = 0, 0.0
        for queue in self._shared.values():
            count, seconds = queue.batcher.ahead(key)
            total, total_s = total + count, total_s + seconds
        return total, total_s

    def drain_s(self) -> float:
        """Seconds of one worker that all items for any worker should take."""
        return sum([queue.batcher.drain_s() for queue in self._shared.values()])

    def shared_by(self, workers: int) -> None:
        """Set how many workers feed from the queues that are not bound to one of them."""
        for queue in self._shared.values():
            queue.batcher.shared_by(workers)

    def cap_batches(self, ratio: float) -> None:
        """Limit batches from now on to this part of the rows that their model's manifest allows."""
        self._cap_ratio = ratio
        for queue in self:
            self._capped(queue)

    def _capped(self, queue: InstanceQueue) -> InstanceQueue:
        queue.batcher.cap_rows(self._cap_ratio)
        return queue

    def __iter__(self) -> Iterator[InstanceQueue]:
        return chain(self._shared.values(), self._bound.values())

    def __contains__(self, key: object) -> bool:
        """Whether a model instance is open."""
        return key in self._shared

    def __repr__(self) -> str:
        return f"<InstanceQueues of {len(self._shared)} lanes, {len(self._bound)} bound>"
