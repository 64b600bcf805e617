"""A wall clock that steps when the process gets SIGUSR2: an hour ahead, then an hour behind, then right again."""

from __future__ import annotations

import signal
from itertools import cycle

from tidegate import clock

_HOUR_S = 3600.0


def step_on_signal() -> None:
    right = clock.utc_s
    steps = cycle((_HOUR_S, -_HOUR_S, 0.0))
    off_s = 0.0

    def step(*_: object) -> None:
        nonlocal off_s
        off_s = next(steps)

    clock.utc_s = lambda: right() + off_s
    signal.signal(signal.SIGUSR2, step)
