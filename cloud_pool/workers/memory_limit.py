"""How much memory this process may use: the machine's, or less where a container, a service manager or the
configuration says so.

The kernel ends a process that goes over its control group's limit without a word, and a container on a machine of
256 GB may have two; so the groups are read, this process's own and all above it, in either version of their file
system. A limit that is there and not readable is no limit: it is better to serve.

Source: Linux `Documentation/admin-guide/cgroup-v2.rst` (`memory.max`) and `cgroup-v1/memory.rst`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from cloud_pool.core.memory.device_memory import DEFAULT_SHARE


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What may be used of each device, by one of `sharing` servers. What is configured counts, whatever there is."""

    configured_bytes: float | None = None
    machine_bytes: float = inf
    sharing: int = 1

    def of(self, device_bytes: float | None) -> float:
        """Of a device with so much memory of its own, or of the machine's memory."""
        if self.configured_bytes is not None:
            return self.configured_bytes / self.sharing
        return DEFAULT_SHARE * (self.machine_bytes if device_bytes is None else device_bytes) / self.sharing


NO_LIMIT: Final = MemoryLimit()


def computes_on_cpu(device: str, root: Path = Path("/")) -> bool:
    """Whether a place of this name is on the machine's own memory for sure: "auto" is, where no CUDA driver is."""
    return device == "cpu" or (device == "auto" and not (root / "proc/driver/nvidia/version").exists())


_V1_UNLIMITED = 1 << 60  # version 1 has no word for none but a number near 2^63


def memory_bytes(root: Path = Path("/")) -> float:
    """Bytes that this process and its workers may use together; infinite where nobody says."""
    return min(_total_bytes(root), min(_group_limits(root), default=inf))


def _total_bytes(root: Path) -> float:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return float(line.split()[1]) * 1024
    return inf


def _group_limits(root: Path) -> Iterator[float]:
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _limits_up(mount, group, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_up(mount / "memory", group, "memory.limit_in_bytes")


def _limits_up(mount: Path, group: str, name: str) -> Iterator[float]:
    """Of a group and of those above it: the least counts. In a container the path is that of the host."""
    folder = mount / group.lstrip("/")
    while folder != mount.parent:
        for line in _lines(folder / name):
            if line.isdecimal() and int(line) < _V1_UNLIMITED:
                yield float(line)
        folder = folder.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
