"""Ports for tests: each worker of pytest-xdist takes its own, and no port is given out twice in a row."""

from __future__ import annotations

import pytest

from tidegate.testing.ports import free_ports, worker_ports


@pytest.mark.parametrize("workers", [1, 2, 7, 60])
def test_workers_share_no_port_and_each_has_room_for_a_large_system(workers: int) -> None:
    parts = [worker_ports(f"gw{number}", str(workers)) for number in range(workers)]
    assert len(set().union(*parts)) == sum(map(len, parts))
    assert all(len(part) > 100 for part in parts)
    assert all(part.start >= 20_000 and part.stop <= 32_000 for part in parts)


@pytest.mark.parametrize(("worker", "workers"), [("", ""), ("master", "2"), ("gw0", "0"), ("gw1", "many")])
def test_without_workers_there_are_all_ports(worker: str, workers: str) -> None:
    assert worker_ports(worker, workers) == range(20_000, 32_000)


def test_a_worker_gets_ports_of_its_own_part_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw59")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "60")
    first = [free_ports(1) for _ in range(20)]
    assert set(first) <= set(worker_ports("gw59", "60"))
    assert len(set(first)) == len(first)
    assert free_ports(16) + 16 <= worker_ports("gw59", "60").stop
