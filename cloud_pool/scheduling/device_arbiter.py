"""The device arbiter decides which model uses a device next, by its share and by the device's memory.

The scheduler queries the order of turns, and reports each batch that begins and ends; the batchers decide which
requests form a batch, under the limits that are set here. A batch is charged to its model's share when it is given to a
worker, as predicted, and corrected when it ends; its memory is reserved for as long.

The other models wait for a model whose share is overdue and whose batch finds no room now: otherwise smaller batches
could keep a large one out for ever.

`tidegate.models.fair_share.py` and `cloud_pool/core/memory/device_memory.py` decide; the arbiter maps workers,
devices and batches to them. It awaits nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import structlog

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.memory.device_memory import DeviceMemory, human_size
from cloud_pool.scheduling.job import Batch, InstanceQueue
from tidegate.models.fair_share import FairShare
from tidegate.outcome import OutOfMemory

RETRY_AFTER_S = 1.0  # for callers refused for memory: by then other batches have ended, or other requests arrive

log = structlog.get_logger("scheduler")


class DeviceArbiter:
    """Mutable: workers `join` and `leave`, batches `begin` and `end`."""

    def __init__(self, shares: FairShare | None = None) -> None:
        self._shares = shares or FairShare()
        self._devices: dict[str, DeviceMemory] = {}
        self._by_worker: dict[str, DeviceMemory] = {}
        self._given: dict[int, tuple[Batch, str, float]] = {}  # by id: the batch, its worker, and what was charged

    def join(self, worker: str, device: str, *, held_bytes: float, limit_bytes: float) -> None:
        """Add a worker that has all engines loaded; workers of one device share its memory."""
        memory = self._devices.setdefault(device, DeviceMemory(limit_bytes))
        memory.limit_bytes = limit_bytes
        memory.hold(worker, held_bytes)
        self._by_worker[worker] = memory

    def leave(self, worker: str) -> None:
        """Remove a worker that is gone."""
        if (memory := self._by_worker.pop(worker, None)) is not None:
            memory.leave(worker)

    @property
    def devices(self) -> Mapping[str, DeviceMemory]:
        """The memory of each device, by its name."""
        return self._devices

    def owed_s(self, lanes: Iterable[ModelInstance]) -> dict[str, float]:
        """Seconds that each share group should have had and has not."""
        return {group: self._shares.owed_s(group) for group in sorted({self._group(lane) for lane in lanes})}

    def most_units(self, lane: ModelInstance) -> float:
        """The largest batch of a model instance that any worker could ever run."""
        return max([lane.memory.most_units(memory) for memory in self._by_worker.values()], default=inf)

    def check(self, lane: ModelInstance, units: float) -> None:
        """Raise OutOfMemory for a request that no worker will ever have memory for."""
        footprint, rooms = lane.memory.footprint, [memory.room_bytes for memory in self._by_worker.values()]
        needed_bytes, room_bytes = footprint.predict_bytes(units), max(rooms, default=inf)
        if needed_bytes > room_bytes:
            raise OutOfMemory(
                f"{lane.key} should need {human_size(needed_bytes)} for a row of {units:g} units of work, "
                f"but there are {human_size(room_bytes)} beside the weights (key 'memory_limit_bytes'); "
                "send shorter rows",
                retry_after_s=RETRY_AFTER_S,
            )

    def in_turn(self, queues: Iterable[InstanceQueue], worker: str) -> list[InstanceQueue]:
        """The queues that a worker may feed from, in the order of turns, each limited to what fits now."""
        heads: dict[str, float] = {}
        for queue in (queues := list(queues)):
            group = self._group(queue.lane)
            heads[group] = min(queue.batcher.head_key, heads.get(group, inf))
        turns = {group: turn for turn, group in enumerate(self._shares.order(heads))}
        own = [queue for queue in queues if queue.worker in (None, worker) and queue.batcher.head_key < inf]
        for queue in own:
            queue.batcher.limit_work(self._fitting_units(queue.lane, worker), queue.lane.memory.footprint.predict_bytes)
        return sorted(own, key=lambda queue: (turns[self._group(queue.lane)], queue.batcher.head_key))

    def begin(self, worker: str, batch: Batch) -> bool:
        """Reserve memory for this batch and charge its model; False if there is not enough memory now."""
        memory = self._by_worker.get(worker)
        needed_bytes = batch.lane.memory.footprint.predict_bytes(batch.units)
        if memory is not None and not memory.reserve(worker, id(batch), needed_bytes):
            return False
        takes_s = batch.takes_s
        self._given[id(batch)] = batch, worker, takes_s
        self._shares.charge(self._group(batch.lane), takes_s)
        return True

    def must_wait_for(self, queue: InstanceQueue) -> bool:
        """Whether no other queue may go before this one, whose batch found no room."""
        return self._shares.is_owed(self._group(queue.lane))

    def passed(self, batch: Batch, peak_bytes: int | None) -> None:
        """Record that a batch succeeded."""
        batch.lane.memory.passed(batch.units, peak_bytes)

    def failed(self, batch: Batch, error: OutOfMemory) -> OutOfMemory:
        """Record that a batch had no memory in spite of its prediction, and lower the cap. The error in full words."""
        batch.lane.memory.cap.failed(batch.units)
        cap = batch.lane.memory.cap.units
        log.warning(
            "out of memory", lane=batch.lane.key, units=round(batch.units), cap=round(cap), reason=error.message
        )
        words = f"{batch.lane.key} had no memory for {batch.units:g} units of work: {error.message}"
        return OutOfMemory(words, retry_after_s=RETRY_AFTER_S)

    def end(self, batch: Batch, now: float) -> None:
        """End a batch, however it ended. A second call has no effect."""
        found = self._given.pop(id(batch), None)
        if found is None:
            return
        _, worker, charged_s = found
        took_s = now - batch.began_at if batch.has_begun else 0.0
        self._shares.charge(self._group(batch.lane), took_s - charged_s)
        if (memory := self._by_worker.get(worker)) is not None:
            memory.release(worker, id(batch))

    def _fitting_units(self, lane: ModelInstance, worker: str) -> float:
        memory = self._by_worker.get(worker)
        return lane.memory.cap.units if memory is None else lane.memory.fitting_units(memory, worker)

    def _group(self, lane: ModelInstance) -> str:
        return self._shares.group_of(lane.manifest)

    @property
    def under_way(self) -> int:
        """Batches that have begun and not ended."""
        return len(self._given)

    def __repr__(self) -> str:
        return f"<DeviceArbiter {self._shares!r} {self._devices}>"
