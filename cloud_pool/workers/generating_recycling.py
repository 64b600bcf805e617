"""Recycling for generating workers: one that leaks, or has given enough answers, is replaced by a fresh one.

As for the workers that compute batches (`health_controller.py`), by the same rules (`tidegate/workers/recycling.py`);
what differs is how a generating worker ends: nothing more begins on it, and what has begun is answered. Its drift is
not looked at: how long a step takes follows from how many sequences are in it.

A worker leaks where its resident memory surely grows and would be all that there is within `horizon_s`. Caches that an
engine fills for the first time grow as well, and stop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import structlog

from cloud_pool.workers.device_worker import DeviceWorker
from cloud_pool.workers.generating_replica import GeneratingReplica
from tidegate import clock
from tidegate.estimate.trend import Leak
from tidegate.runtime.owned_task import OwnedTask, cancel_and_wait
from tidegate.workers.recycling import Recycling, RecyclingCandidate
from tidegate.workers.vitals import ProcessUsage, free_bytes, read_process

_ROOM_RATIO: Final = 1.2  # of what a worker holds: so much must be free to start its successor beside it
log = structlog.get_logger("steward")


@dataclass(slots=True)
class _Watched:
    """One worker that serves, with what its looks have shown."""

    replica: GeneratingReplica
    worker: DeviceWorker
    leak: Leak
    served_most: float
    rss_bytes: float = 0.0
    complaint: str | None = None


class GeneratingRecycling:
    """Looks inside `async with`.

    Args:
        replicas: those to look after, or what finds them, where they come and go.
        recycles: counts them, by the sign that led to each.
        waiting: whether generations wait for a slot: no worker can be spared then.
        horizon_s: in which a leak would take all memory; 0: leaks are no reason.
    """

    def __init__(
        self,
        replicas: Sequence[GeneratingReplica] | Callable[[], Sequence[GeneratingReplica]],
        recycling: Recycling,
        recycles: Counter[str],
        *,
        waiting: Callable[[], bool],
        horizon_s: float,
        every_s: float = 10.0,
        read: Callable[[int | None], ProcessUsage | None] = read_process,
        free: Callable[[], tuple[float, float] | None] = free_bytes,
    ) -> None:
        self._recycles = recycles
        self._replicas = replicas
        self._recycling = recycling
        self._waiting = waiting
        self._horizon_s = horizon_s
        self._every_s = every_s
        self._read = read
        self._free = free
        self._watched: dict[str, _Watched] = {}
        self._looked_at = clock.now()
        self._looking = OwnedTask(self._look_again, name="generating workers")
        self._replacing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._looked_at = clock.now()
        if callable(self._replicas) or self._replicas:
            self._looking.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._looking.aclose()
        if self._replacing is not None:
            await cancel_and_wait(self._replacing)

    def _found(self) -> Sequence[GeneratingReplica]:
        return self._replicas() if callable(self._replicas) else self._replicas

    def look(self) -> None:
        """Look once, and replace one worker if there is a reason."""
        now = clock.now()
        elapsed_s, self._looked_at = now - self._looked_at, now
        serving = {name: (one, worker) for one in self._found() for name, worker in one.workers.items()}
        self._watched = {
            name: self._watched.get(name) or _Watched(*there, Leak(), self._recycling.served_most())
            for name, there in serving.items()
        }
        for one in self._watched.values():
            self._examine(one, elapsed_s)
        candidates = [
            RecyclingCandidate(name, one.complaint, one.worker.generated, one.served_most)
            for name, one in self._watched.items()
        ]
        everyone = all(one.state == "ready" for one in self._found())
        chosen = self._recycling.decide(candidates, now, all_there=everyone, overloaded=self._waiting())
        if chosen is not None:
            self._replacing = asyncio.create_task(self._replace(chosen), name=f"recycle {chosen.worker}")

    def _examine(self, one: _Watched, elapsed_s: float) -> None:
        usage, free = self._read(one.worker.pid), self._free()
        if usage is None:
            return
        one.rss_bytes = usage.rss_bytes
        if self._horizon_s <= 0.0 or free is None or not one.leak.record(elapsed_s, usage.rss_bytes):
            return
        full_in_s = one.leak.limit_in_s(usage.rss_bytes + free[0])
        one.complaint = f"leak: memory is full in {full_in_s / 3600:.1f} h" if full_in_s < self._horizon_s else None

    async def _replace(self, chosen: RecyclingCandidate) -> None:
        one, reason = self._watched[chosen.worker], chosen.reason or ""
        first = one.replica.successor_beside and self._has_room_for_another(one)
        self._recycles[reason.partition(":")[0]] += 1
        log.warning("worker recycled", worker=chosen.worker, reason=reason, successor_first=first)
        try:
            if not await one.replica.recycle(successor_first=first):
                log.warning("worker not recycled: its successor did not come up", worker=chosen.worker)
        finally:
            self._recycling.ended(clock.now())

    def _has_room_for_another(self, one: _Watched) -> bool:
        """Whether a second worker fits beside this one for as long as its generations take to end."""
        device = one.worker.on_device
        if device is not None:
            held_bytes, device_bytes = device
            return _ROOM_RATIO * held_bytes < device_bytes - held_bytes
        free = self._free()
        return free is not None and _ROOM_RATIO * one.rss_bytes < free[0]

    async def _look_again(self) -> None:
        while True:
            await clock.sleep(self._every_s)
            try:
                self.look()
            except Exception:  # a defect of ours here must not end the looking
                log.exception("the generating workers could not be looked after")

    def __repr__(self) -> str:
        return f"<GeneratingRecycling of {len(self._watched)} workers>"
