"""The loop lag measures how late a process's event loop runs what is due, and how long garbage collections stop it.

Everything in a process waits for its loop: a computation or a blocking call on it delays each answer, heartbeat and
timer, and is seen in none of their own figures. One timer asks to be woken every `EVERY_S`, and what it is late by is
the lag; the collector tells when it begins and ends. Both cost less than a thousandth of a core. Every process
measures, also one without a metrics port: whether it cost deadlines is decided in `tidegate/estimate/stall_cost.py`.

As metrics: `loop_families.py`. It can be wrong by a millisecond, the resolution of the loop's timers, and where a stall
is shorter than EVERY_S and falls between two wake-ups.
"""

from __future__ import annotations

import gc
from typing import Final, Self

import structlog

from tidegate import clock
from tidegate.estimate.stall_cost import LoopStall, StallCost
from tidegate.metrics.histogram import DURATIONS_S, STAGES_S, Histogram
from tidegate.runtime.owned_task import OwnedTask

EVERY_S: Final = 0.2
STALL_S: Final = 0.1  # what answers and heartbeats notice
log = structlog.get_logger(__name__)


class LoopLag:
    """Mutable: counts inside `async with`, on the loop that entered it."""

    def __init__(self) -> None:
        self.lag = Histogram(DURATIONS_S)
        self.pauses: dict[int, Histogram] = {generation: Histogram(STAGES_S) for generation in range(3)}
        self.stalls = 0
        self.cost = StallCost()
        self._collected_s = 0.0  # since the last wake-up
        self._collection_began_at: float | None = None
        self._task = OwnedTask(self._watch, name="loop lag")

    async def __aenter__(self) -> Self:
        gc.callbacks.append(self._collected)
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)
        await self._task.aclose()

    async def _watch(self) -> None:
        while True:
            due_at = clock.now() + EVERY_S
            await clock.sleep(EVERY_S)
            self._woke(due_at, clock.now())

    def _woke(self, due_at: float, now: float) -> None:
        late_s = max(0.0, now - due_at)
        self.lag.observe(late_s)
        collected_s, self._collected_s = self._collected_s, 0.0
        if late_s >= STALL_S:
            self.stalls += 1
            self.cost.stalled(LoopStall(due_at, now, min(late_s, collected_s)))
        if self.cost.look(now):
            condition = self.cost.evidence
            log.warning("the event loop is held up" if condition else "the event loop is in time", evidence=condition)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began_at = clock.now()
        elif self._collection_began_at is not None:
            took_s = clock.now() - self._collection_began_at
            self.pauses[info["generation"]].observe(took_s)
            self._collected_s += took_s
            self._collection_began_at = None

    def __repr__(self) -> str:
        return f"<LoopLag {self.stalls} stalls, {self.lag.count} looks>"
