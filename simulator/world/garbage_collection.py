"""A context in which Python's garbage collector does not walk through a simulated world again and again.

A run of ten thousand devices makes some millions of objects before its first event and keeps them all; each full
collection walks through every one to free nothing, which took nearly half of a run's time. So the young are looked at
rarely, and all of them, with these thresholds, not before some billions of objects were made. A run makes next to no
cycles, so memory stays flat all the same (`tests/bench/big_fleet.py` measures it). The collector is left as it was
found. Nothing is frozen (`gc.freeze`): whether its caller had done that can only be asked by counting what is frozen,
one by one, which costs a short run more than it saves.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_RARELY: Final = (100_000, 50, 1000)


@contextmanager
def looking_rarely() -> Iterator[None]:
    """For the time of a run, whose world has been built."""
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
