"""The sequence watchdog ends the generations of a worker that neither gives tokens nor dies.

A worker tells of its steps (`silence.py`), and how long it may be silent follows from what its steps have taken;
`limit_s` is the most, and holds alone while too little is known. As for single calls (`tidegate/workers/watchdog.py`),
seconds in which the worker got no core, or computed where a device says so, are its excuse, and where this process
stood still as well the worker gets its time anew.

    async with watchdog.watching():
        return await worker.generate(key, request, sink, ...)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from tidegate import clock
from tidegate.outcome import Unreachable
from tidegate.workers.watchdog import LONGEST, remaining_patience_s

_STANDSTILL_S: Final = 1.0  # late for its own timer by so much, a process did not run
_LEAST_LOOK_S: Final = 0.05
_MOST_LOOK_S: Final = 1.0  # what is known of its patience changes with every step


class SilentWorker(Protocol):
    """The part of a `WorkerProcess` that is watched."""

    @property
    def silent_s(self) -> float: ...

    @property
    def sequence_patience_s(self) -> float: ...


class SequenceWatchdog:
    """One worker's, for all of its generations. Looks for as long as there are any.

    Args:
        limit_s: the longest silence, whatever is known.
        excused_s: seconds so far in which the worker had an excuse.
        on_hung: called once with the silence, when the worker is given up; its generations have failed by then.
        excused_to_limit: whether a worker with an excuse all the time gets `limit_s`, and not `LONGEST` times its
            patience.
    """

    def __init__(
        self,
        worker: SilentWorker,
        *,
        limit_s: float,
        excused_s: Callable[[], float],
        on_hung: Callable[[float], None],
        excused_to_limit: bool = False,
    ) -> None:
        self._worker = worker
        self._limit_s = limit_s
        self._excused_s = excused_s
        self._excused_to_limit = excused_to_limit
        self._on_hung = on_hung
        self._limits: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._forgiven_s = 0.0  # of the present silence: this process stood still
        self._silent_s = 0.0  # at the last look
        self._excused_before_s: float | None = None  # at the first look of the present silence
        self.hung_s: float | None = None  # how long it was silent when it was given up

    @property
    def overdue_s(self) -> float:
        """How long the worker has been silent where half of the patience with it is over; 0 where it is not."""
        silent_s = max(0.0, self._worker.silent_s - self._forgiven_s) if self._limits else 0.0
        return silent_s if silent_s > 0.5 * self._patience_s() else 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch over one generation. Raises Unreachable where the worker has hung under it."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                if self._timer is None:
                    self._look()
                try:
                    yield
                finally:
                    self._limits.discard(limit)
                    if not self._limits and self._timer is not None:
                        self._timer.cancel()
                        self._timer = None
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unreachable(f"its worker hung for {self.hung_s or 0.0:.3g} s and is restarted") from None

    def _patience_s(self) -> float:
        return min(self._limit_s, self._worker.sequence_patience_s)

    def _look(self) -> None:
        now = clock.now()
        silent_s = self._worker.silent_s
        if silent_s < self._silent_s or silent_s == 0.0:  # there was a sign since
            self._forgiven_s, self._excused_before_s = 0.0, None
        if self._timer is not None and now >= self._due_at + _STANDSTILL_S:
            self._forgiven_s, self._excused_before_s = silent_s, None
        self._silent_s = silent_s
        left_s = self._left_s(silent_s - self._forgiven_s)
        if left_s > 0.0:
            self._due_at = now + min(_MOST_LOOK_S, max(_LEAST_LOOK_S, 0.5 * left_s))
            self._timer = asyncio.get_running_loop().call_at(self._due_at, self._look)
            return
        self._timer = None
        self.hung_s = silent_s
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
        self._on_hung(silent_s)

    def _left_s(self, silent_s: float) -> float:
        """Seconds that it still gets. Its excuse is asked for from half of the patience on: asking costs a file."""
        patience_s = self._patience_s()
        if silent_s <= 0.5 * patience_s:
            return patience_s - silent_s
        if self._excused_before_s is None:
            self._excused_before_s = self._excused_s()
        excused_s = self._excused_s() - self._excused_before_s
        longest = max(1.0, self._limit_s / patience_s) if self._excused_to_limit else LONGEST
        return remaining_patience_s(patience_s, elapsed_s=silent_s, excused_s=excused_s, longest=longest)

    def __repr__(self) -> str:
        return f"<SequenceWatchdog over {len(self._limits)} generations, silent for {self._silent_s:.3g} s>"
