"""A store that was killed or whose disk failed has every acknowledged entry, and sends it once."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from edge_agent.offline.queue_db import StoredItem
from edge_agent.offline.store import OfflineStore
from tidegate import clock
from tidegate.storage.database import Database, DatabaseFull, DatabaseUnavailable

pytestmark = pytest.mark.slow


def lives(folder: Path, seed: int, hours: float, a_hour: int, killed: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tests.support.edge.keeping",
        str(folder),
        str(seed),
        str(hours),
        str(a_hour),
        killed,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_killed_at_any_statement_nothing_that_was_told_is_lost_and_nothing_is_taken_twice(tmp_path: Path) -> None:
    told = lives(tmp_path, 1, 1.0, 80, "all")

    assert told["lives"] > 10
    assert (told["done"], told["lost"], told["twice"], told["left"]) == (True, 0, 0, 0)
    assert told["told"] >= 60  # a life that was killed between the disk and its note told nobody


def test_ten_hours_offline_with_kills_then_a_paced_drain(tmp_path: Path) -> None:
    told = lives(tmp_path, 3, 10.0, 20, "storing")

    assert told["lives"] > 5
    assert (told["done"], told["lost"], told["twice"], told["left"]) == (True, 0, 0, 0)
    assert told["busy_s"] <= 0.6 * told["drain_s"]  # half, and the last train has no pause after it


def item(number: int, size: int = 100) -> StoredItem:
    return StoredItem(f"{number:032x}", "request", bytes(size), promised=True)


def store(folder: Path, **lost: Any) -> OfflineStore:
    return OfflineStore(folder, max_bytes=10**6, max_rows=1000, **lost)


async def test_a_wall_clock_that_is_set_forward_ends_nothing_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(tmp_path) as one:
        utc_s = clock.utc_s()
        one.wall.heard(utc_s, utc_s, clock.now())  # and then the device is alone
        await one.put(item(1))
        assert one.state()["wall_clock_is_right"]
        monkeypatch.setattr(clock, "utc_s", lambda: utc_s + 30 * 86_400.0)
        assert await one.sweep() == 0
        assert [entry.id for entry in await one.waiting(10)] == [item(1).id]
        assert not one.state()["wall_clock_is_right"]


async def test_a_corrupt_file_is_moved_aside_and_said_and_the_store_lives_on(tmp_path: Path) -> None:
    async with store(tmp_path) as one:
        await one.put(item(1))
    (tmp_path / "store.db").write_bytes(b"this is no database at all" * 1000)
    lost: list[Path] = []

    with capture_logs() as logs:
        async with store(tmp_path, on_lost=lost.append) as one:
            await one.put(item(2))
            assert [entry.id for entry in await one.waiting(10)] == [item(2).id]

    assert lost == [tmp_path / "store.db.corrupt-1"]
    assert lost[0].read_bytes().startswith(b"this is no database")
    assert [line["event"] for line in logs] == ["a database was corrupt: moved aside, and begun anew"]


async def test_a_file_that_becomes_corrupt_costs_the_work_at_hand_and_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(tmp_path) as one:
        for number in range(200):
            await one.put(item(number, 1000))

        def finds_it_corrupt(*_: object) -> int:
            raise _corrupt()

        with monkeypatch.context() as patch:
            patch.setattr(one.ledger, "sweep", finds_it_corrupt)
            with pytest.raises(DatabaseUnavailable, match="malformed"):
                await one.sweep()
        await one.put(item(999))

        assert [entry.id for entry in await one.waiting(10)] == [item(999).id]
    assert (tmp_path / "store.db.corrupt-1").exists()


async def test_a_full_store_refuses_in_words_and_takes_again_when_there_is_room(tmp_path: Path) -> None:
    async with OfflineStore(tmp_path, max_bytes=65_536, max_rows=1000) as one:
        for number in range(6):
            await one.put(item(number, 10_000))

        with pytest.raises(DatabaseFull, match="of 65536 bytes"):
            await one.put(item(7, 10_000))

        assert one.refused == {"full": 1}
        assert one.unavailable == ""
        await one.forget(item(0).id)
        await one.put(item(7, 10_000))


async def test_a_disk_without_room_refuses_and_works_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.storage.database.RETRY_S", 0.0)  # else it looks again every few seconds only
    # The soft limit of a file's size stands for a full disk: writes fail, with another error, and come back.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    async with store(tmp_path) as one:
        await one.put(item(1))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
            with pytest.raises(DatabaseUnavailable):
                for number in range(2, 100):
                    await one.put(item(number, 9000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        kept = {entry.id for entry in await one.waiting(200)}
        assert item(1).id in kept
        await one.put(item(500, 9000))


async def test_it_is_said_when_things_can_be_stored_again_and_at_no_other_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.storage.database.RETRY_S", 0.0)
    (tmp_path / "state").write_text("in the way")
    with capture_logs() as lines:
        async with store(tmp_path / "state") as one:
            with pytest.raises(DatabaseUnavailable):
                await one.put(item(1))
            (tmp_path / "state").unlink()
            await one.put(item(1))
            await one.put(item(2))
        async with store(tmp_path / "state"):
            pass
    assert [line["event"] for line in lines] == ["nothing can be stored", "it can be stored again"]


async def test_a_place_that_is_no_folder_is_said_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with store(tmp_path / "file" / "state") as one:
        with pytest.raises(DatabaseUnavailable, match="Not a directory"):
            await one.put(item(1))
        assert "Not a directory" in one.unavailable
        assert one.refused == {"unavailable": 1}


async def test_work_that_raises_undoes_itself_and_nothing_of_its_neighbours(tmp_path: Path) -> None:
    database = Database(tmp_path / "x.db", ["CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)"])

    def add(number: int, fails: bool = False) -> Any:
        def work(db: sqlite3.Connection) -> int:
            db.execute("INSERT INTO t VALUES (?)", (number,))
            if fails:
                raise KeyError(number)
            return number

        return work

    async with database:
        works = [add(1), add(2, fails=True), add(3), add(3)]
        found = await asyncio.gather(*(database.run(work) for work in works), return_exceptions=True)
        rows = await database.run(lambda db: [row[0] for row in db.execute("SELECT n FROM t")])

    assert found[0] == 1
    assert isinstance(found[1], KeyError)
    assert found[2] == 3
    assert isinstance(found[3], sqlite3.IntegrityError)
    assert rows == [1, 3]


def _corrupt() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
