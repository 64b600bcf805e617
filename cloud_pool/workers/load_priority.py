"""A worker that loads beside workers that serve runs on cores that nothing else wants, as long as it gets on that way.

Under SCHED_IDLE a thread gives its core up at once when another one wakes, and the kernel places what wakes there as
on an idle core. With a nice value it keeps the core until the end of its turn, and other models' answers are late by
that. Threads keep what they began with, so each is set back once the model is warm. That takes a right (CAP_SYS_NICE,
which containers take from root too, or RLIMIT_NICE); where a trial shows that there is none, nothing is lowered, since
the worker would stay slow for good.

Requests may wait for what loads, so no machine is too busy for it: a load that has waited for a core for PATIENCE_S
longer than it had one goes on at HURRIED, at which it gets a third of what another wants as well. It takes twice its
time and PATIENCE_S at most until then.

What is measured meanwhile is less the time for which the worker waited for a core (`tidegate/workers/warmup.py`), and
is corrected by every batch.

Source: sched(7), "SCHED_IDLE" and "The nice value"; setpriority(2), "C library/kernel differences".
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from tidegate.runtime.starvation import awake_s, starved_s

HURRIED: Final = 5  # a nice value
PATIENCE_S: Final = 1.0
_LOOK_S: Final = 0.2


@cache
def may_lower() -> bool:
    """Whether a lowered priority can be set back, which is tried with a thread."""
    if sys.platform != "linux":
        return False
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, name="priority trial", daemon=True)
    thread.start()
    try:
        assert thread.native_id is not None
        _set_thread(thread.native_id, os.SCHED_IDLE, 0)
        _set_thread(thread.native_id, os.SCHED_OTHER, HURRIED)
        _set_thread(thread.native_id, os.SCHED_OTHER, 0)
    except OSError:
        return False
    finally:
        ends.set()
    return True


class LoadPriority:
    """Mutable: `lower` each process that begins to load, and `restore` it once it is warm. For one event loop."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._looks: dict[int, asyncio.TimerHandle] = {}  # by pid
        self._hurried: set[int] = set()

    def lower(self, pid: int | None) -> None:
        """Have a process give way from now on, if it may be set back."""
        if pid is not None and pid not in self._looks and may_lower():
            _set(pid, os.SCHED_IDLE, 0)
            self._look(pid)

    def restore(self, pid: int | None) -> None:
        """Have a process count as much as others again, with all its threads."""
        if pid is not None and pid in self._looks:
            self._looks.pop(pid).cancel()
            self._hurried.discard(pid)
            _set(pid, os.SCHED_OTHER, 0)

    def _look(self, pid: int) -> None:
        """Hurry a process that gets too little, and forget one that has ended."""
        threads = _threads(pid)
        if not threads:
            self._looks.pop(pid, None)
            self._hurried.discard(pid)
            return
        if pid not in self._hurried and _is_starved(pid, threads, self._patience_s):
            _set(pid, os.SCHED_OTHER, HURRIED)
            self._hurried.add(pid)
        self._looks[pid] = asyncio.get_running_loop().call_later(_LOOK_S, self._look, pid)

    def __repr__(self) -> str:
        return f"<LoadPriority of {len(self._looks)} that load, {len(self._hurried)} hurried>"


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return []


def _is_starved(pid: int, threads: list[int], patience_s: float) -> bool:
    """By all of its threads: a runtime may load with others than the main one, which sleeps meanwhile."""
    folder = Path(f"/proc/{pid}/task")
    waited_s = sum([starved_s(one, folder) for one in threads])
    ran_s = sum([awake_s(one, folder) for one in threads]) - waited_s
    return waited_s > ran_s + patience_s


def _set(pid: int, policy: int, nice: int) -> None:
    for thread in _threads(pid):
        with suppress(OSError):  # it has ended
            _set_thread(thread, policy, nice)


def _set_thread(thread: int, policy: int, nice: int) -> None:
    os.sched_setscheduler(thread, policy, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, thread, nice)
