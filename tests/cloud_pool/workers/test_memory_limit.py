"""How much memory there is: the machine's, or what a control group leaves of it."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from cloud_pool.workers.memory_limit import memory_bytes

TOTAL = 64 * 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal:       {TOTAL // 1024} kB\nMemFree:         1 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_a_group_it_is_the_machines(root: Path) -> None:
    assert memory_bytes(root) == TOTAL


def test_the_least_limit_on_the_way_up_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/machine.slice/pod/app\n")
    write(root / "sys/fs/cgroup/machine.slice/pod/app/memory.max", "max\n")
    write(root / "sys/fs/cgroup/machine.slice/pod/memory.max", "2147483648\n")
    write(root / "sys/fs/cgroup/machine.slice/memory.max", "8589934592\n")
    assert memory_bytes(root) == 2 * 2**30


def test_inside_of_a_container_the_limit_is_that_of_the_mounts_root(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/memory.max", "1073741824\n")
    assert memory_bytes(root) == 2**30


def test_groups_of_version_one(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    write(root / "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "536870912\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_bytes(root) == 512 * 2**20


def test_where_nobody_says_it_is_unlimited(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == inf


def test_a_group_with_more_than_the_machine_has_changes_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a\n")
    write(root / "sys/fs/cgroup/a/memory.max", str(2 * TOTAL))
    assert memory_bytes(root) == TOTAL
