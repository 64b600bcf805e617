"""What the kernel says of a process and of memory, and what is made of it when it says something odd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.workers.vitals import free_bytes, read_process

MEMINFO = "MemTotal:       16000 kB\nMemFree:  1000 kB\nMemAvailable:    8000 kB\nHugePages_Total: 0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def test_this_process_holds_something_and_has_computed() -> None:
    own = read_process(os.getpid())
    assert own is not None
    assert own.rss_bytes > 1e6
    assert own.cpu_s > 0.0


def test_a_name_with_brackets_and_spaces_does_not_confuse(root: Path) -> None:
    (root / "proc/7/statm").write_text("900 100 50 1 0 700 0\n")
    (root / "proc/7/stat").write_text("7 (odd) name (x) S 1 7 7 0 -1 0 5 0 0 0 300 200 0 0 20 0\n")
    seen = read_process(7, root)
    assert seen is not None
    assert seen.rss_bytes == 100 * os.sysconf("SC_PAGE_SIZE")
    assert seen.cpu_s == 500 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("statm", [None, "", "x y"])
def test_who_is_gone_or_odd_is_not_known(root: Path, statm: str | None) -> None:
    if statm is not None:
        (root / "proc/7/statm").write_text(statm)
    assert read_process(7, root) is None
    assert read_process(None, root) is None


def test_without_a_group_the_machines_memory_counts(root: Path) -> None:
    assert free_bytes(root) == (8000 * 1024, 16000 * 1024)


def test_a_narrower_group_counts_and_its_file_cache_is_free(root: Path) -> None:
    group = root / "sys/fs/cgroup"
    (group / "memory.max").write_text("4000000\n")
    (group / "memory.current").write_text("3500000\n")
    (group / "memory.stat").write_text("anon 3000000\ninactive_file 200000\n")
    assert free_bytes(root) == (700000.0, 4000000.0)


def test_a_group_without_a_limit_is_none(root: Path) -> None:
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    (root / "sys/fs/cgroup/memory.current").write_text("3500000\n")
    assert free_bytes(root) == (8000 * 1024, 16000 * 1024)


def test_nothing_known_is_nothing(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
