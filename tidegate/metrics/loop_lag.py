"""The loop lag measures how late a process's event loop runs what is due, and how long garbage collections stop it.

Everything in a process waits for its loop: a computation or a blocking call on it delays each answer, heartbeat and
timer, and is seen in none of their own figures. One timer asks to be woken every `EVERY_S`, and what it is late by is
the lag; the collector tells when it begins and ends. Both cost less than a thousandth of a core.

    tidegate_loop_lag_seconds    histogram, one observation every EVERY_S
    tidegate_gc_pause_seconds    histogram, by generation
    tidegate_loop_stalls_total   wake-ups that were late by STALL_S or more

It can be wrong by a millisecond, the resolution of the loop's timers, and where a stall is shorter than EVERY_S and
falls between two wake-ups.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final, Self

from prometheus_client.metrics_core import Metric

from tidegate import clock
from tidegate.metrics.families import counter, histogram
from tidegate.metrics.histogram import DURATIONS_S, STAGES_S, Histogram
from tidegate.runtime.owned_task import OwnedTask

EVERY_S: Final = 0.2
STALL_S: Final = 0.1  # what answers and heartbeats notice


class LoopLag:
    """Mutable: counts inside `async with`, on the loop that entered it."""

    def __init__(self) -> None:
        self.lag = Histogram(DURATIONS_S)
        self.pauses: dict[int, Histogram] = {generation: Histogram(STAGES_S) for generation in range(3)}
        self.stalls = 0
        self._collection_began_at: float | None = None
        self._task = OwnedTask(self._watch, name="loop lag")

    async def __aenter__(self) -> Self:
        gc.callbacks.append(self._collected)
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)
        await self._task.aclose()

    def families(self) -> Iterator[Metric]:
        words = "How late the event loop ran a timer that was due."
        yield histogram("tidegate_loop_lag_seconds", words, (), [((), self.lag)])
        words = f"Timers that the event loop ran {STALL_S:g} s late or more."
        yield counter("tidegate_loop_stalls", words, (), [((), float(self.stalls))])
        rows = [((str(generation),), pauses) for generation, pauses in self.pauses.items()]
        yield histogram("tidegate_gc_pause_seconds", "How long a garbage collection took.", ("generation",), rows)

    async def _watch(self) -> None:
        while True:
            due_at = clock.now() + EVERY_S
            await clock.sleep(EVERY_S)
            late_s = max(0.0, clock.now() - due_at)
            self.lag.observe(late_s)
            self.stalls += late_s >= STALL_S

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began_at = clock.now()
        elif self._collection_began_at is not None:
            self.pauses[info["generation"]].observe(clock.now() - self._collection_began_at)
            self._collection_began_at = None

    def __repr__(self) -> str:
        return f"<LoopLag {self.stalls} stalls, {self.lag.count} looks>"
