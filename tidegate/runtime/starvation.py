"""How long a process was kept from running: ready, and waiting for a core. It tells a starved worker from a stuck one.

The kernel counts it for every thread; here it is that of the main thread, which computes (`child.py`). Where it is not
known, it is 0: then every second counts as the process's own.

Source: Linux `Documentation/scheduler/sched-stats.rst`, /proc/<pid>/schedstat.
"""

from __future__ import annotations

from pathlib import Path


def starved_s(pid: int | None, proc: Path = Path("/proc")) -> float:
    """Seconds since its start."""
    return _scheduled_s(pid, proc)[1]


def awake_s(pid: int | None, proc: Path = Path("/proc")) -> float:
    """Seconds since its start in which it computed, or was starved: all but those in which it slept or was stopped."""
    return sum(_scheduled_s(pid, proc))


def _scheduled_s(pid: int | None, proc: Path) -> tuple[float, float]:
    try:
        ran_ns, waited_ns = (proc / str(pid) / "schedstat").read_text().split()[:2]
        return int(ran_ns) / 1e9, int(waited_ns) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0
