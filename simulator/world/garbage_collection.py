"""A context in which Python's garbage collector does not walk through a simulated world again and again.

A run of ten thousand devices makes some millions of objects before its first event and keeps them all; each full
collection walks through every one to free nothing, which took nearly half of a run's time. What is there at the
start is set aside, and the rest is looked at rarely. A run makes next to no cycles, so memory stays flat all the same
(`tests/bench/big_fleet.py` measures it). The collector is left as it was found.
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
    before, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not was_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not was_frozen:
            gc.unfreeze()
