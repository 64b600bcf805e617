"""The call watchdog ends a call to a worker process that neither answers nor dies.

`watchdog.py` says how long a call may take; this is the timer around one. Where this process stood still as well (a
frozen machine), the call gets its time anew: it was hardly given any.

    async with asyncio.timeout(None) as limit:
        watchdog = CallWatchdog(limit, patience_s, lambda: worker.starved_s)
        try:
            return await worker.infer(key, inputs)
        finally:
            watchdog.end()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidegate import clock
from tidegate.workers.watchdog import LONGEST, remaining_patience_s

_STANDSTILL_S: Final = 1.0  # late for its own timer by so much, a process did not run
_LEAST_WAIT_S: Final = 0.01  # less is not worth another look


class CallWatchdog:
    """Ends a call after so long; where this process stood still as well, the call gets its time anew.

    Seconds that are the worker's excuse do not count (`watchdog.py`). They are asked for from the first half of the
    patience on, which hardly any call comes to: asking costs a file.

    A timer and not a task around the call: every call has one, and a task would cost it two turns of the loop.
    """

    def __init__(
        self,
        limit: asyncio.Timeout,
        within_s: float,
        excused_s: Callable[[], float],
        *,
        most_s: float | None = None,
    ) -> None:
        """Args: most_s: of a worker that has an excuse all the time; None: `LONGEST` times the second half."""
        self._limit = limit
        self._longest = LONGEST if most_s is None else max(1.0, 2.0 * most_s / within_s - 1.0)
        self._within_s = within_s
        self._excused_s = excused_s
        self._loop = asyncio.get_running_loop()
        self._begin()

    def end(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        self._arm(0.5 * self._within_s, self._half)

    def _half(self) -> None:
        if self._stood_still():
            self._begin()
        else:
            self._half_at, self._excused_before_s = clock.now(), self._excused_s()
            self._arm(0.5 * self._within_s, self._look)

    def _look(self) -> None:
        if self._stood_still():
            self._begin()
            return
        excused_s = self._excused_s() - self._excused_before_s
        wait_s = remaining_patience_s(
            0.5 * self._within_s, elapsed_s=clock.now() - self._half_at, excused_s=excused_s, longest=self._longest
        )
        if wait_s > _LEAST_WAIT_S:
            self._arm(wait_s, self._look)
        else:
            self._limit.reschedule(self._loop.time())

    def _stood_still(self) -> bool:
        return clock.now() >= self._due_at + _STANDSTILL_S

    def _arm(self, wait_s: float, then: Callable[[], None]) -> None:
        self._due_at = clock.now() + wait_s
        self._timer = self._loop.call_later(wait_s, then)

    def __repr__(self) -> str:
        return f"<CallWatchdog {self._within_s:.3g} s, next look at {self._due_at:.3f}>"
