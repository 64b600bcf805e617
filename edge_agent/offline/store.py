"""The offline store runs the ledger on its file, in its own thread, with both clocks.

Every call returns when the data is on the disk. What cannot be stored raises `DatabaseUnavailable` (or its subclass
`DatabaseFull`) with the reason in words, is counted, and costs nothing else: the agent answers its callers with a
broken disk as with none.

The powered time is noted with every change and once a minute, so a power cut forgets at most a minute of a lifetime of
hours. Whether the wall clock counts is decided by `edge_agent/core/wall_clock.py`.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from edge_agent.core.wall_clock import WallClock
from edge_agent.offline.queue_db import SCHEMA, BothClocks, OfflineLedger, OutgoingEntry, StoredItem, StoreUsage, Ticket
from tidegate import clock
from tidegate.fleet.stored import Receipt
from tidegate.storage.database import Database, DatabaseFull, DatabaseUnavailable

T = TypeVar("T")
FILE_NAME: Final = "store.db"
_PAGE_BYTES: Final = 4096
_OVERHEAD: Final = 3  # times `max_bytes`: what SQLite's pages, indices and free list may take at worst


class OfflineStore:
    """Open inside `async with`.

    Args:
        folder: the folder of `store.db`.
        max_bytes, max_rows: bounds of the store.
        on_lost: called, in the store's thread, with the path to which a corrupt file was moved aside.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, max_rows: int, on_lost: Callable[[Path], None] = lambda _: None
    ) -> None:
        self.wall = WallClock()
        self.ledger = OfflineLedger(max_bytes=max_bytes, max_rows=max_rows)
        self.refused: Counter[str] = Counter()  # items that could not be stored since the start, by reason
        self.backlog = 0  # entries that waited to be sent when the store was last used
        self._on_lost = on_lost
        self._former_s: float | None = None  # powered seconds before this start; None: not read yet
        self._started_at = clock.now()
        max_pages = max(64, _OVERHEAD * max_bytes // _PAGE_BYTES)
        self._database = Database(folder / FILE_NAME, SCHEMA, max_pages=max_pages, on_moved_aside=self._lost)

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._database.__aexit__()

    @property
    def unavailable(self) -> str:
        """Why nothing can be stored; "" while it can."""
        return self._database.unavailable

    @staticmethod
    def new_id() -> str:
        """An id that cannot be guessed, and that no other start of this device has given out."""
        return secrets.token_hex(16)

    async def put(self, item: StoredItem) -> None:
        """Store an item; on the disk when this returns. Raises DatabaseUnavailable."""
        try:
            await self._run(lambda db, now: self.ledger.put(db, item, now))
        except DatabaseFull:
            self.refused["full"] += 1
            raise
        except DatabaseUnavailable:
            self.refused["unavailable"] += 1
            raise

    async def waiting(self, limit: int, without: Collection[str] = ()) -> list[OutgoingEntry]:
        return await self._run(lambda db, now: self.ledger.waiting(db, now, limit, without))

    async def settle(self, receipt: Receipt) -> list[str]:
        """Apply a gateway's receipt; the ids that became dead letters by it."""

        def work(db: sqlite3.Connection, now: BothClocks) -> list[str]:
            self.ledger.took(db, receipt.taken, receipt.gateway, now)
            self.ledger.answered(db, receipt.answers, now)
            self.ledger.unknown(db, receipt.unknown, receipt.gateway, now)
            return self.ledger.refused(db, receipt.refused, now)

        return await self._run(work)

    async def unanswered(self, gateway: str | None, limit: int) -> Sequence[str]:
        return await self._run(lambda db, _: self.ledger.unanswered(db, gateway, limit))

    async def ticket(self, id: str) -> Ticket | None:
        return await self._run(lambda db, _: self.ledger.ticket(db, id))

    async def forget(self, id: str) -> bool:
        return await self._run(lambda db, _: self.ledger.forget(db, id))

    async def sweep(self) -> int:
        return await self._run(self.ledger.sweep)

    async def usage(self) -> StoreUsage:
        return await self._run(lambda db, _: self.ledger.usage(db))

    async def _run(self, work: Callable[[sqlite3.Connection, BothClocks], T]) -> T:
        def noted(db: sqlite3.Connection) -> T:
            done = work(db, self._moment(db))
            self.backlog = self.ledger.backlog(db)
            return done

        return await self._database.run(noted)

    def _moment(self, db: sqlite3.Connection) -> BothClocks:
        # Read in the thread and at the time of the work, since the file itself says how long the device was on before.
        if self._former_s is None:
            self._former_s = self.ledger.powered_s(db)
        now, utc_s = clock.now(), clock.utc_s()
        powered_s = self._former_s + now - self._started_at
        return BothClocks(powered_s, utc_s if self.wall.is_right(utc_s, now) else None)

    def _lost(self, aside: Path) -> None:
        self._former_s = None
        self._on_lost(aside)

    def state(self) -> dict[str, Any]:
        """The state as far as it is known without the disk."""
        is_right = self.wall.is_right(clock.utc_s(), clock.now())
        return {"unavailable": self.unavailable, "refused": dict(self.refused), "wall_clock_is_right": is_right}

    def __repr__(self) -> str:
        return f"<OfflineStore {self._database!r}>"
