"""`die_with_parent` and `die_with_pipe` end a child process when its parent ends, even by SIGKILL.

`end_after_parent` is for a child that is asked by SIGTERM and is past hearing it: an event loop that hangs runs no
handler of signals, so a thread waits for the parent's end beside it.

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
import time

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0  # where the system does not tell of a process's end


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


def end_after_parent(parent_pid: int, *, after_s: float) -> None:
    """Have this process exit so long after its parent has ended, whatever it is at by then.

    It can do nothing about a process that is stopped, or that is in C code which never gives the interpreter back.
    """
    threading.Thread(target=_exit_after, args=(parent_pid, after_s), name="lifeline", daemon=True).start()


def _exit_after(parent_pid: int, after_s: float) -> None:
    _wait_for_end_of_parent(parent_pid)
    time.sleep(after_s)
    os._exit(1)


def _wait_for_end_of_parent(parent_pid: int) -> None:
    try:
        descriptor = os.pidfd_open(parent_pid)
    except (AttributeError, OSError):  # another system, or it has ended
        while os.getppid() == parent_pid:
            time.sleep(_LOOK_S)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if os.getppid() == parent_pid:  # or the descriptor is of whoever has its number now
        poll.poll()
    os.close(descriptor)


def _exit_with(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # that it hung up is told without being asked for
    poll.poll()
    os._exit(1)
