"""An edge agent with faults that a signal turns on; all else is the real one.

SIGUSR1 makes it fail every request in no time, as a device with a broken runtime does, and the next one mends it.
SIGURG makes every computation take three times as long, as on a device that got too hot, and the next one cools it.
SIGUSR2 steps its wall clock (`tests/support/odd_clock.py`).
SIGWINCH slows its workers (`tests/support/slow_worker.py`).
SIGPROF blocks its event loop for two seconds, as a library does that waits on a file or a lock.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

from numpy.typing import NDArray

from edge_agent.__main__ import edge
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import Runner
from tests.support.odd_clock import step_on_signal
from tests.support.slow_worker import slow_workers_on_signal
from tidegate import clock
from tidegate.outcome import InternalError
from tidegate.types import Call, Reply
from tidegate.workers.process import ComputeResult

TIMES_SLOWER: Final = 3.0
BLOCKED_S: Final = 2.0


def turned_by(number: signal.Signals) -> Callable[[], bool]:
    """Whether the fault is on; each signal turns it."""
    on = False

    def turn(*_: object) -> None:
        nonlocal on
        on = not on

    signal.signal(number, turn)
    return lambda: on


def fail_on_signal() -> None:
    whole = EdgeHost.infer
    failing = turned_by(signal.SIGUSR1)

    async def infer(self: EdgeHost, call: Call) -> Reply:
        if failing():
            raise InternalError("this device fails on purpose")
        return await whole(self, call)

    EdgeHost.infer = infer  # type: ignore[method-assign]


def slow_down_on_signal() -> None:
    whole = Runner.infer
    hot = turned_by(signal.SIGURG)

    async def infer(
        self: Runner,
        variant: str,
        inputs: Mapping[str, NDArray[Any]],
        patience_s: float = inf,
        *,
        budget_s: float | None = None,
    ) -> ComputeResult:
        computed = await whole(self, variant, inputs, patience_s, budget_s=budget_s)
        if hot():
            await clock.sleep((TIMES_SLOWER - 1.0) * computed.compute_s)
            computed = replace(computed, compute_s=TIMES_SLOWER * computed.compute_s)
        return computed

    Runner.infer = infer  # type: ignore[method-assign]


def block_on_signal() -> None:
    def block(*_: object) -> None:
        time.sleep(BLOCKED_S)  # in the main thread, and so in the loop

    signal.signal(signal.SIGPROF, block)


if __name__ == "__main__":
    block_on_signal()
    fail_on_signal()
    slow_down_on_signal()
    slow_workers_on_signal()
    step_on_signal()
    edge(prog_name="odd edge")
