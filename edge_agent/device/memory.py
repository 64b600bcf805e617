"""The memory watch reports the memory of the agent and its workers, and replaces a worker that leaks.

Native code leaks, and a device has no swap to hide it: a process that grows for hours ends with the kernel's
out-of-memory kill, mostly in the middle of a request. Every `LOOK_S` the resident memory of the agent and of each
worker is read (in a thread). A worker whose memory surely grows (Mann-Kendall) and would take all that is free within
`HORIZON_S` (Sen's slope) is ended at a moment when nothing waits, and its runner starts another: one at a time, none
while another model is not ready, and at least five minutes apart (`tidegate/workers/recycling.py`, as in a pool).

The readings go out with every heartbeat, rounded to MiB, so that a gateway sees a leak that no restart cures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, Protocol, Self

import structlog
from msgspec.structs import replace

from tidegate import clock
from tidegate.estimate.trend import Leak
from tidegate.fleet.conditions import DeviceConditions
from tidegate.runtime.owned_task import OwnedTask
from tidegate.workers.recycling import Recycling, RecyclingCandidate
from tidegate.workers.vitals import ProcessUsage, free_bytes, read_process

LOOK_S: Final = 10.0
HORIZON_S: Final = 2 * 3600.0
_SIGMAS: Final = 4.0  # of the trend: a device has one worker for a model, and ending it costs seconds of service
_MIB: Final = 2**20
log = structlog.get_logger(__name__)


class Recyclable(Protocol):
    """The part of a `Runner` that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def ready(self) -> bool: ...
    def recycle(self, reason: str) -> None: ...


class MemoryWatch:
    """Looks inside `async with`.

    Args:
        runners: the models' runners, as they are now.
        busy: whether requests wait: no worker is ended then.
        process, free: read a process's memory, and the device's (available, total) bytes.
    """

    def __init__(
        self,
        runners: Callable[[], Sequence[Recyclable]],
        draw: Callable[[], float],
        *,
        busy: Callable[[], bool] = lambda: False,
        process: Callable[[int | None], ProcessUsage | None] = read_process,
        free: Callable[[], tuple[float, float] | None] = free_bytes,
    ) -> None:
        self.recycled = 0
        self._runners = runners
        self._recycling = Recycling(draw)
        self._busy = busy
        self._process = process
        self._free = free
        self._leaks: dict[int, Leak] = {}  # by worker's process
        self._complaints: dict[int, str | None] = {}
        self._ending: int | None = None  # the process that is being replaced
        self._held_bytes: float | None = None
        self._free_bytes = inf
        self._looked_at: float | None = None
        self._task = OwnedTask(self._watch, name="memory")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    def told(self, conditions: DeviceConditions) -> DeviceConditions:
        """The device's conditions, with the last readings of its memory."""
        held, free = self._held_bytes, self._free_bytes
        if held is None or free == inf:
            return conditions
        mib, limit_mib = round(held / _MIB), round((held + free) / _MIB)
        return replace(conditions, memory_bytes=mib * _MIB, memory_limit_bytes=limit_mib * _MIB)

    def survey(self, now: float) -> dict[int, str | None]:
        """Read the memory of all processes, and return the complaint of each worker by its process id. Blocks."""
        elapsed_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        pids = [pid for one in self._runners() if (pid := one.pid) is not None]
        seen = {pid: process for pid in pids if (process := self._process(pid)) is not None}
        own, free = self._process(os.getpid()), self._free()
        self._held_bytes = sum(one.rss_bytes for one in (own, *seen.values()) if one is not None) or None
        self._free_bytes = free[0] if free is not None else inf
        self._leaks = {pid: self._leaks.get(pid, Leak(_SIGMAS)) for pid in seen}
        self._complaints = {pid: self._complaints.get(pid) for pid in seen}
        for pid, leak in self._leaks.items():
            if leak.record(elapsed_s, seen[pid].rss_bytes):
                self._complaints[pid] = self._complaint(leak, seen[pid])
        return self._complaints

    def replace_one(self, complaints: Mapping[int, str | None], now: float) -> None:
        """End at most one worker with a complaint, if no request waits."""
        if self._ending is not None and self._ending not in complaints:
            self._ending = None
            self._recycling.ended(now)
        runners = self._runners()
        candidates = [RecyclingCandidate(str(pid), complaint, 0, inf) for pid, complaint in complaints.items()]
        everyone = all(one.ready for one in runners)
        chosen = self._recycling.decide(candidates, now, all_there=everyone, overloaded=self._busy())
        for one in runners:
            if chosen is not None and str(one.pid) == chosen.worker:
                self._ending = one.pid
                self.recycled += 1
                one.recycle(chosen.reason or "")

    def _complaint(self, leak: Leak, process: ProcessUsage) -> str | None:
        full_in_s = leak.limit_in_s(process.rss_bytes + self._free_bytes)
        if full_in_s >= HORIZON_S:
            return None
        return f"leak: it holds {process.rss_bytes / _MIB:.0f} MiB, and takes what is free in {full_in_s / 3600:.1f} h"

    async def _watch(self) -> None:
        while True:
            try:
                self.replace_one(await asyncio.to_thread(self.survey, clock.now()), clock.now())
            except Exception:
                log.exception("memory cannot be read")  # a defect must not end the watch for good
            await clock.sleep_until_tick(LOOK_S)

    def __repr__(self) -> str:
        return f"<MemoryWatch of {len(self._leaks)} workers, {self.recycled} replaced>"
