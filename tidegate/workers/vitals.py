"""Reads what the kernel knows of a worker, and how full the memory is that the pool may use.

Resident memory and CPU time come from Linux' /proc; memory in use is the machine's, or that of the control group where
one with a limit holds this process, without the file cache that the kernel drops first. What cannot be read is not
known, and no reason to do anything.

Source: proc_pid_stat(5), proc_pid_statm(5); `memory.stat` in Linux `Documentation/admin-guide/cgroup-v2.rst`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What one process holds now and has used so far."""

    rss_bytes: float
    cpu_s: float


def read_process(pid: int | None, root: Path = Path("/")) -> ProcessUsage | None:
    """None where there is no such process, or nobody who knows."""
    folder = root / "proc" / str(pid)
    try:
        pages = int((folder / "statm").read_text().split()[1])
        # The name, in brackets, may hold anything; user and system time are the 12th and 13th field after it.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return ProcessUsage(float(pages * _PAGE_BYTES), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    except (OSError, ValueError, IndexError):
        return None


def free_bytes(root: Path = Path("/")) -> tuple[float, float] | None:
    """What may still be taken and what there is altogether, of the narrowest limit; None where nobody knows."""
    found = [pair for pair in (_machine(root), _group(root)) if pair is not None]
    return min(found, default=None)


def _machine(root: Path) -> tuple[float, float] | None:
    lines = _table(root / "proc/meminfo", ":")
    if "MemAvailable" not in lines or "MemTotal" not in lines:
        return None
    return lines["MemAvailable"] * 1024, lines["MemTotal"] * 1024


def _group(root: Path) -> tuple[float, float] | None:
    """Of the control group that a container sees as its own (version 2); those above it are not ours to read."""
    folder = root / "sys/fs/cgroup"
    most, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if most is None or used is None or most >= _UNLIMITED:
        return None
    cache = _table(folder / "memory.stat", " ").get("inactive_file", 0.0)
    return max(0.0, most - used + cache), most


def _table(path: Path, separator: str) -> dict[str, float]:
    try:
        rows = [line.partition(separator) for line in path.read_text().splitlines()]
        return {key: float(value.split()[0]) for key, _, value in rows if value.strip()[:1].isdigit()}
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # "max" is no number, and no limit
        return None
