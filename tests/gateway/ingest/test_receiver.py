"""The ingest receiver over a real database: a wall clock that is set changes nothing that was promised."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.ingest.receiver import Ingest
from tidegate import clock
from tidegate.fleet.stored import Forwarded, Receipt, encode_stored

DAY_S = 86_400.0


class WallClock:
    """The time of day, which an operator or a time server may set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        true = clock.utc_s
        monkeypatch.setattr(clock, "utc_s", lambda: true() + self.ahead_s)


def ingest_at(path: Path) -> Ingest:
    return Ingest(path, "main", max_bytes=2**20, max_seen=1000)


async def take(ingest: Ingest, number: int) -> Receipt:
    taken: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    ingest.send = lambda _device, receipt: taken.done() or taken.set_result(receipt) is None
    ingest.message("a", encode_stored(Forwarded("a", f"{number:032x}", "request", 0, b"x", model="m")))
    return await asyncio.wait_for(taken, 10.0)


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
async def test_a_wall_clock_that_is_set_moves_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    wall = WallClock(monkeypatch)
    async with ingest_at(tmp_path / "ingest.db") as ingest:
        assert (await take(ingest, 1)).taken
        (job,) = await ingest.jobs(5, frozenset())
        await ingest.postpone(job, 60.0)
        wall.ahead_s = ahead_s

        due_in_s = await ingest.due_in_s()
        assert due_in_s is not None and 50.0 < due_in_s <= 60.0
        assert (await take(ingest, 2)).taken, "and what is new is new"


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
async def test_a_wall_clock_that_was_set_between_two_runs_fails_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    wall = WallClock(monkeypatch)
    async with ingest_at(tmp_path / "ingest.db") as ingest:
        assert (await take(ingest, 1)).taken
    wall.ahead_s = ahead_s
    async with ingest_at(tmp_path / "ingest.db") as ingest:
        assert (await take(ingest, 2)).taken  # with the first batch the journal is swept
        assert (await take(ingest, 2)).taken
        state = await ingest.state()

    assert state["deferred"] == 2 and "failed" not in state["counters"]
