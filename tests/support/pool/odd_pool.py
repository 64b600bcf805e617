"""A pool that refuses everything from one SIGUSR1 to the next, as a full one does; the rest is the real one.

SIGWINCH slows its workers (`tests/support/slow_worker.py`).
"""

from __future__ import annotations

import signal

from cloud_pool.__main__ import pool
from cloud_pool.serving.host import PoolHost
from tests.support.slow_worker import slow_workers_on_signal
from tidegate.outcome import Overloaded
from tidegate.types import Call, Reply

_RETRY_AFTER_S = 0.2


def refuse_on_signal() -> None:
    whole = PoolHost.infer
    refusing = False

    def turn(*_: object) -> None:
        nonlocal refusing
        refusing = not refusing

    async def infer(self: PoolHost, call: Call) -> Reply:
        if refusing:
            raise Overloaded("this pool is full on purpose", retry_after_s=_RETRY_AFTER_S)
        return await whole(self, call)

    PoolHost.infer = infer  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, turn)


if __name__ == "__main__":
    refuse_on_signal()
    slow_workers_on_signal()
    pool(prog_name="odd pool")
