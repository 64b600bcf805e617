"""Workers that a signal makes twenty times slower, as their agents and pools see it; the next signal mends them.

SIGWINCH turns it. The worker answers late by nineteen times what it computed, so whoever waits for it sees a process
that is alive and slow, through every watchdog and every queue of the product. A call that is under way when it is
mended does the rest at full speed, as on a processor that is throttled no more.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tidegate import clock
from tidegate.workers.channel import Arrays
from tidegate.workers.process import ComputeResult, WorkerProcess

TIMES_SLOWER: Final = 20.0
_SLICE_S: Final = 0.05


async def sleep_while(seconds: float, is_slow: Callable[[], bool]) -> None:
    """Sleep for so long, as far as it is slow meanwhile: from then on what is left passes as much quicker."""
    left_s = seconds
    while is_slow() and left_s > 0.0:
        await clock.sleep(min(_SLICE_S, left_s))
        left_s -= _SLICE_S
    if left_s < seconds:
        await clock.sleep(max(0.0, left_s) / TIMES_SLOWER)


def slow_workers_on_signal() -> None:
    """Patch `WorkerProcess` in this process, and turn its slowness with each SIGWINCH."""
    whole = WorkerProcess.infer
    slow = False

    def turn(*_: object) -> None:
        nonlocal slow
        slow = not slow

    async def infer(self: WorkerProcess, key: str, inputs: Arrays, *, budget_s: float | None = None) -> ComputeResult:
        computed = await whole(self, key, inputs, budget_s=budget_s)
        began_at = clock.now()
        await sleep_while((TIMES_SLOWER - 1.0) * computed.compute_s, lambda: slow)
        return replace(computed, compute_s=computed.compute_s + clock.now() - began_at)

    WorkerProcess.infer = infer  # type: ignore[method-assign]
    signal.signal(signal.SIGWINCH, turn)
