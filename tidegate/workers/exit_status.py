"""The exit status of a child process, in words."""

from __future__ import annotations

import signal


def describe_exit(status: int, *, exited: str = "exited with status", killed: str = "was killed by") -> str:
    """How a child ended: `exited` with its status, or `killed` with the signal's name.

    Args:
        status: as `Process.wait` returns it, negative for a signal.
    """
    if status >= 0:
        return f"{exited} {status}"
    try:
        return f"{killed} {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"{killed} signal {-status}"
