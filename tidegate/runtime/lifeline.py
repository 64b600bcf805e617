"""`die_with_parent` ends a child process when its parent ends, even when the parent is killed with SIGKILL.

Linux can send a signal to a child when its parent thread ends (PR_SET_PDEATHSIG). The child requests it at its own
start, then checks that its parent did not end in between. Elsewhere the child's end of a pipe to the parent does the
same job; a process that has such a pipe watches it anyway.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
