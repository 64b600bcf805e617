"""A worker that loads beside workers that serve gets little of a busy core, so that their answers are not late by it.

Linux weighs threads by their nice value: at LOADING one gets a third of what another wants as well, and all of a core
that is idle. Threads keep what they began with, so each is set back once the model is warm. Setting it back takes a
right (root, CAP_SYS_NICE or RLIMIT_NICE); without it nothing is lowered, since the worker would stay slow for good.

What is measured while other models compute comes out higher than it is, and is corrected by every batch.

Source: sched(7), "The nice value"; setpriority(2), "C library/kernel differences".
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

LOADING: Final = 5
_NICE_OF_ZERO: Final = 20  # RLIMIT_NICE that allows a nice value of 0


def may_lower() -> bool:
    """Whether a lowered priority could be set back."""
    if os.geteuid() == 0:
        return True
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    except (ImportError, AttributeError, OSError):
        return False
    return limit == resource.RLIM_INFINITY or limit >= _NICE_OF_ZERO


def lower(pid: int | None) -> None:
    """Have a process give way from now on, if it may be set back."""
    if pid is not None and may_lower():
        _set(pid, LOADING)


def restore(pid: int | None) -> None:
    """Have a process count as much as others again."""
    if pid is not None and may_lower():
        _set(pid, 0)


def _set(pid: int, nice: int) -> None:
    with suppress(OSError):  # it has ended, or a container forbids it
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)
