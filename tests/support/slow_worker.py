"""Workers that a signal makes twenty times slower, as their agents and pools see it; the next signal mends them.

SIGWINCH turns it. The worker answers late by nineteen times what it computed, so whoever waits for it sees a process
that is alive and slow, through every watchdog and every queue of the product.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Final

from tidegate import clock
from tidegate.workers.channel import Arrays
from tidegate.workers.process import ComputeResult, WorkerProcess

TIMES_SLOWER: Final = 20.0


def slow_workers_on_signal() -> None:
    """Patch `WorkerProcess` in this process, and turn its slowness with each SIGWINCH."""
    whole = WorkerProcess.infer
    slow = False

    def turn(*_: object) -> None:
        nonlocal slow
        slow = not slow

    async def infer(self: WorkerProcess, key: str, inputs: Arrays) -> ComputeResult:
        computed = await whole(self, key, inputs)
        if slow:
            await clock.sleep((TIMES_SLOWER - 1.0) * computed.compute_s)
            return replace(computed, compute_s=TIMES_SLOWER * computed.compute_s)
        return computed

    WorkerProcess.infer = infer  # type: ignore[method-assign]
    signal.signal(signal.SIGWINCH, turn)
