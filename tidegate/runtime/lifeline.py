"""`die_with_parent` and `die_with_pipe` end a child process when its parent ends, even by SIGKILL.

Linux can send a signal to a child when its parent thread ends (PR_SET_PDEATHSIG). The child requests it at its own
start, then checks that its parent did not end in between. Elsewhere the child's end of a pipe to the parent does the
same job; a process that has such a pipe watches it anyway, or has a thread watch it where it may be at work for long.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None, *, by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `by` to this process when its parent ends; exit at once if it already has.

    Args:
        parent_pid: the parent that started this process; by default, the parent that it has now.
        by: SIGTERM lets a process shut down its own children first; a plain worker takes SIGKILL.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != expected:
        os._exit(1)


def die_with_pipe(descriptor: int) -> None:
    """Have this process exit as soon as the other end of a pipe is closed, whatever it is at by then."""
    threading.Thread(target=_exit_with, args=(descriptor,), name="lifeline", daemon=True).start()


def _exit_with(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # that it hung up is told without being asked for
    poll.poll()
    os._exit(1)
