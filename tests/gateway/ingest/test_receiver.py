"""The ingest receiver over a real database: neither a clock that is set nor a full disk changes what was promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.ingest import journal, receiver
from gateway.ingest.journal import SCHEMA, IngestJournal
from gateway.ingest.receiver import Ingest
from gateway.ingest.shared_items import SharedItem
from tidegate import clock
from tidegate.fleet.stored import Forwarded, Receipt, encode_stored
from tidegate.storage.database import DatabaseFull, DatabaseUnavailable, connect

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


class OneGatewaysStore:
    """A `SharedItems` in memory: items, and owners where that is another gateway."""

    def __init__(self) -> None:
        self.items: dict[str, SharedItem] = {}
        self.owners: dict[str, str] = {}
        self.marked = False

    async def claim(self, items: Sequence[SharedItem]) -> list[tuple[str, bool]]:
        for one in items:
            if one.item.id not in self.owners:
                self.items[one.item.id] = one
        return [(self.owners.get(one.item.id, ""), True) for one in items]

    async def release(self, items: Sequence[Forwarded]) -> None:
        for one in items:
            self.items.pop(one.id, None)

    async def beat(self, *, marked: bool) -> tuple[bool, list[str]]:
        was_marked, self.marked = self.marked, marked
        return was_marked, []

    async def page(self, cursor: int) -> tuple[int, list[SharedItem]]:
        return cursor, list(self.items.values())

    async def done(self, items: Sequence[tuple[str, str]]) -> None:
        for _, id in items:
            self.items.pop(id, None)


async def test_more_than_one_sweep_deletes_goes_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(connect(tmp_path / "ingest.db", SCHEMA)) as db:
        before = IngestJournal(max_bytes=2**24, max_seen=10_000)
        for number in range(2500):
            before.take(db, Forwarded("a", f"{number:032x}", "result", 0, b"x", model="m"), clock.utc_s())
    monkeypatch.setattr(journal, "WINDOW_S", -60.0)  # all are old
    async with Ingest(tmp_path / "ingest.db", "main", max_bytes=2**24, max_seen=10_000) as ingest:
        async with asyncio.timeout(60.0):
            while (await ingest.state())["remembered"]:
                await clock.sleep(0.1)


def sharing(folder: Path, store: OneGatewaysStore) -> Ingest:
    shared: Any = store  # as far as these tests go
    return Ingest(folder / "ingest.db", "main", max_bytes=2**20, max_seen=1000, shared=shared)


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not true():
            await clock.sleep(0.01)


async def deferred(ingest: Ingest) -> int:
    return int((await ingest.state())["deferred"])


async def test_a_duplicate_that_meets_a_full_disk_leaves_what_was_promised_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DatabaseFull("no room")

    store = OneGatewaysStore()
    async with sharing(tmp_path, store) as ingest:
        assert (await take(ingest, 1)).taken
        with monkeypatch.context() as patch:
            patch.setattr(receiver, "BUSY_S", 1e-9)  # the device may come again at once
            patch.setattr(ingest.journal, "_count", full)
            assert (await take(ingest, 1)).busy_s
            assert len(store.items) == 1
            assert not (await take(ingest, 2)).taken
            assert len(store.items) == 1, "of what was never taken nothing stays"


async def test_what_was_not_asked_of_the_store_since_the_disk_failed_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> set[tuple[str, str]]:
        raise DatabaseUnavailable("for a moment")

    monkeypatch.setattr(receiver, "BEAT_S", 0.02)
    store = OneGatewaysStore()
    async with sharing(tmp_path, store) as ingest:
        await eventually(lambda: store.marked)
        with monkeypatch.context() as patch:
            patch.setattr(ingest.journal, "known", broken)
            assert (await take(ingest, 1)).taken  # its disk works again
        await eventually(lambda: len(store.items) == 1)


async def test_an_item_that_went_to_another_gateway_and_came_back_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BEAT_S", 0.02)
    store = OneGatewaysStore()
    async with sharing(tmp_path, store) as ingest:
        assert (await take(ingest, 1)).taken
        ((id, item),) = store.items.items()
        del store.items[id]
        store.owners[id], store.marked = "other", False  # which took it over
        while await deferred(ingest):
            await clock.sleep(0.01)

        del store.owners[id]
        store.items[id], store.marked = item, False  # it came back, and then this gateway was interrupted
        async with asyncio.timeout(30.0):
            while not await deferred(ingest):
                await clock.sleep(0.01)
        assert id in store.items
