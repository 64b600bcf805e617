"""The processes of one session, and how they are all ended without leaving shared memory behind.

vLLM's processes share segments that outlive them. Python has a tracker beside them, which removes the segments when the
last of those that use it has ended, and then ends; so it is killed last, if it is still there.

Source: proc_pid_stat(5); Python's `multiprocessing.resource_tracker`.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

_TRACKER: Final = b"multiprocessing.resource_tracker"


def session_members(leader: int) -> list[int]:
    """Ids of its processes that are still running, with the leader's own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            # The name, in brackets, may hold anything; state, parent, group and session follow it.
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if session == str(leader) and state != "Z":
                found.append(int(stat.parent.name))
    return found


def descendants(leader: int) -> list[int]:
    """Ids of a process and of those that it has started, and so on: cheap, whatever else runs on the machine."""
    found, at = [leader], 0
    while at < len(found):
        with suppress(OSError, ValueError):
            for children in Path(f"/proc/{found[at]}/task").glob("*/children"):
                found += [int(one) for one in children.read_text().split()]
        at += 1
    return found


def kill_session(leader: int, *, trackers: bool) -> bool:
    """Kill its processes but the leader, and but the trackers unless told; whether there were any to kill."""
    members = [pid for pid in session_members(leader) if pid != leader and (trackers or not _is_tracker(pid))]
    for pid in members:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(members)


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
