"""How long a process was kept from running: ready, and waiting for a core. It tells a starved worker from a stuck one.

The kernel counts it for every thread; here it is that of the main thread, which computes (`child.py`). Where it is not
known, it is 0: then every second counts as the process's own.

Source: Linux `Documentation/scheduler/sched-stats.rst`, /proc/<pid>/schedstat.
"""

from __future__ import annotations

from pathlib import Path


def starved_s(pid: int | None, proc: Path = Path("/proc")) -> float:
    """Seconds since its start."""
    try:
        return int((proc / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
