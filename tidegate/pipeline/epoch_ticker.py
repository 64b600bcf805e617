"""The epoch ticker ends WebAssembly calls that take too long, by counting a runtime's epochs up in a thread.

Fuel bounds what a call may do and is the same on every machine, but some instructions do much at the price of one
(filling a memory). So a call also has a deadline in epochs, and traps at the end of a loop's turn once it is past. A
thread wakes every TICK_S for that, and only while there are calls: a device at rest is not woken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from tidegate import clock

TICK_S: Final = 0.01
_REST_AFTER_S: Final = 1.0  # without a call; waking the thread for each call costs more than some ticks


class EpochTicker:
    """Ticks from its first `awake` on. Its thread ends with the process.

    Args:
        tick: counts one epoch up; called in a thread of its own.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._wake = threading.Event()
        self._rests_at = 0.0
        self._thread: threading.Thread | None = None

    def awake(self, for_s: float) -> None:
        """Tick for so long at least, from now on."""
        self._rests_at = clock.now() + for_s + _REST_AFTER_S
        if not self._wake.is_set():
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="epoch ticker", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        idle = threading.Event()  # never set: a wait that ends by its time
        while True:
            self._wake.wait()
            while clock.now() < self._rests_at:
                idle.wait(TICK_S)
                self._tick()
            self._wake.clear()
            if clock.now() < self._rests_at:  # a call came between the look and the clearing
                self._wake.set()

    def __repr__(self) -> str:
        return f"<EpochTicker {'ticking' if self._wake.is_set() else 'at rest'}>"
