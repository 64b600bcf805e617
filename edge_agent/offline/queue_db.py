"""The offline ledger stores entries to be sent and the callers' tickets in SQL, within bounds of bytes and rows.

Two tables. `entries` are to be sent: a deferred request, a result, an event. `tickets` are what callers hold: made with
the deferred request in one transaction, and kept with their state until long after.

    entry    waiting ──taken by a gateway──▶ gone      └─ refused five times, or for good ──▶ dead ──retry──▶ waiting
    ticket   waiting ──────▶ taken ──answer──▶ done    └─ dead, expired, or unknown to the gateway ──▶ failed

Room is bounded in bytes and rows. Entries without a ticket (results, events, dead letters) are evicted, the lowest
priority first and the oldest of it first, but never for a less important entry. An entry with a ticket is never
evicted: it leaves when a gateway has taken it, when its time is over, or by an operator's command. So a full store
refuses a new ticket instead of breaking an old one.

Time is powered time: seconds that this device was on, summed over its starts (`meta`). Entries do not age while the
device is off for a week, and age right on a device whose clock starts in 1970. Where the wall clock is known to be
right, both when an entry was stored and now, the greater of both ages counts.

Every function takes the connection and the time; transactions are the caller's (`tidegate/storage/database.py`).
Source: docs/design/edge-state.md, "Store and forward"; Greengrass #852 (a message that is always refused blocks the
rest).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from tidegate.fleet.stored import MAX_WORDS, DeferredAnswer, ItemRefusal, Kind
from tidegate.storage.database import DatabaseFull

MOST_REFUSALS: Final = 5
ROW_BYTES: Final = 256  # what a row takes beside its body, indices included
ANSWERS_KEPT_S: Final = 86_400.0  # done and failed tickets, in powered time
SWEEP_ROWS: Final = 256  # of each table that one sweep ends at most, so that no caller waits for more

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS counters (reason TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS usage (one INTEGER PRIMARY KEY CHECK (one = 1), rows INTEGER, bytes INTEGER)",
    "INSERT OR IGNORE INTO usage VALUES (1, 0, 0)",
    """CREATE TABLE IF NOT EXISTS entries (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, key TEXT NOT NULL,
        priority INTEGER NOT NULL, promised INTEGER NOT NULL, born_s REAL NOT NULL, born_utc_s REAL,
        ttl_s REAL NOT NULL, bytes INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL DEFAULT 'waiting',
        why TEXT NOT NULL DEFAULT '', model TEXT NOT NULL, version TEXT NOT NULL, variant TEXT NOT NULL,
        body BLOB NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS sending ON entries (state, key, priority DESC, seq)",
    "CREATE INDEX IF NOT EXISTS giving_way ON entries (promised, priority, seq)",
    """CREATE TABLE IF NOT EXISTS tickets (
        id TEXT PRIMARY KEY, model TEXT NOT NULL, state TEXT NOT NULL, gateway TEXT NOT NULL DEFAULT '',
        since_s REAL NOT NULL, keep_s REAL NOT NULL, code TEXT NOT NULL DEFAULT '', why TEXT NOT NULL DEFAULT '',
        bytes INTEGER NOT NULL, answer BLOB) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS asking ON tickets (state, gateway)",
    "CREATE TABLE IF NOT EXISTS backlog (one INTEGER PRIMARY KEY CHECK (one = 1), waiting INTEGER)",
    "INSERT OR IGNORE INTO backlog SELECT 1, COUNT(*) FROM entries WHERE state = 'waiting'",
    *[
        f"CREATE TRIGGER IF NOT EXISTS backlog_{event.split()[0]} AFTER {event} ON entries BEGIN"
        f" UPDATE backlog SET waiting = waiting + ({change}); END"
        for event, change in (
            ("insert", "NEW.state = 'waiting'"),
            ("delete", "- (OLD.state = 'waiting')"),
            ("update OF state", "(NEW.state = 'waiting') - (OLD.state = 'waiting')"),
        )
    ],
    *[
        f"CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} BEGIN UPDATE usage SET {change}; END"
        for table in ("entries", "tickets")
        for event, change in (
            ("insert", "rows = rows + 1, bytes = bytes + NEW.bytes"),
            ("delete", "rows = rows - 1, bytes = bytes - OLD.bytes"),
            ("update", "bytes = bytes + NEW.bytes - OLD.bytes"),
        )
    ],
)


class StoreFull(DatabaseFull):
    """The store is full of promised or more important entries."""


class BothClocks(NamedTuple):
    """Now, by both clocks."""

    powered_s: float
    utc_s: float | None = None  # None: the wall clock is not known to be right


class StoredItem(NamedTuple):
    """An item to be kept and sent. `promised`: a caller holds its id as a ticket."""

    id: str
    kind: Kind
    body: bytes
    priority: int = 0
    ttl_s: float = ANSWERS_KEPT_S
    key: str = ""
    model: str = ""
    version: str = ""
    variant: str = ""
    promised: bool = False


class OutgoingEntry(NamedTuple):
    """An entry as it is sent."""

    item: StoredItem
    age_s: float
    attempts: int
    size_bytes: int

    @property
    def id(self) -> str:
        return self.item.id

    @property
    def key(self) -> str:
        return self.item.key


class Ticket(NamedTuple):
    id: str
    model: str
    state: str  # waiting, taken, done, failed
    code: str
    why: str
    answer: bytes


class StoreUsage(msgspec.Struct, frozen=True):
    """The contents of the store in numbers, for people and metrics."""

    rows: int
    bytes: int
    waiting: int
    dead: int
    tickets: dict[str, int]
    counters: dict[str, int]


class OfflineLedger:
    """Bounds and rules; all state is in the file."""

    def __init__(self, *, max_bytes: int, max_rows: int) -> None:
        self.max_bytes = max_bytes
        self.max_rows = max_rows

    # in

    def put(self, db: sqlite3.Connection, item: StoredItem, now: BothClocks) -> None:
        """Store an item; a second time under the same id changes nothing. Raises StoreFull."""
        if db.execute("SELECT 1 FROM entries WHERE id = ?", (item.id,)).fetchone():
            return
        self.sweep(db, now)
        size = len(item.body) + ROW_BYTES
        self._make_room(db, size + ROW_BYTES * item.promised, 1 + item.promised, item.priority)
        db.execute(
            "INSERT INTO entries (id, kind, key, priority, promised, born_s, born_utc_s, ttl_s, bytes, model, version,"
            " variant, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (item.id, item.kind, item.key, item.priority, item.promised, now.powered_s, now.utc_s, item.ttl_s, size,
             item.model, item.version, item.variant, item.body),
        )  # fmt: skip
        if item.promised:
            db.execute(
                "INSERT INTO tickets (id, model, state, since_s, keep_s, bytes) VALUES (?, ?, 'waiting', ?, ?, ?)",
                (item.id, item.model, now.powered_s, item.ttl_s, ROW_BYTES),
            )

    def _make_room(self, db: sqlite3.Connection, size: int, rows: int, priority: int) -> None:
        used_rows, used_bytes = db.execute("SELECT rows, bytes FROM usage").fetchone()
        # Evict the least important unpromised entry until there is room; a promised item needs a ticket's row as well.
        # No cursor across the deletions: each is by its own key, and most often there is none.
        # What adds nothing needs no room, also where more is held than the bounds allow since they were lowered.
        while (size and used_bytes + size > self.max_bytes) or (rows and used_rows + rows > self.max_rows):
            least = db.execute(
                "SELECT seq, bytes, priority, state FROM entries WHERE promised = 0 ORDER BY priority, seq LIMIT 1"
            ).fetchone()
            if least is None or least["priority"] > priority:
                raise StoreFull(
                    f"the store is full: {used_bytes} of {self.max_bytes} bytes and {used_rows} of {self.max_rows} "
                    "rows, all promised or more important"
                )
            db.execute("DELETE FROM entries WHERE seq = ?", (least["seq"],))
            _count(db, "evicted_dead" if least["state"] == "dead" else "evicted_for_room")
            used_rows, used_bytes = used_rows - 1, used_bytes - least["bytes"]

    # out

    def waiting(
        self, db: sqlite3.Connection, now: BothClocks, limit: int, without: Collection[str] = ()
    ) -> list[OutgoingEntry]:
        """The entries that may be sent next, the most important first.

        Entries of one key stay in order, and none is sent behind one of `without`. A key is as important as the oldest
        entry under it.
        """
        # Candidates: entries without a key, and the oldest entry of each key. `limit + len(without)` of each suffice.
        alone = db.execute(
            "SELECT * FROM entries WHERE state = 'waiting' AND key = '' ORDER BY priority DESC, seq LIMIT ?",
            (limit + len(without),),
        ).fetchall()
        heads = db.execute(
            "SELECT * FROM entries WHERE seq IN (SELECT MIN(seq) FROM entries WHERE state = 'waiting' AND key <> ''"
            " GROUP BY key) ORDER BY priority DESC, seq LIMIT ?",
            (limit + len(without),),
        ).fetchall()
        found: list[OutgoingEntry] = []
        for row in sorted([*alone, *heads], key=lambda one: (-one["priority"], one["seq"])):
            if row["id"] in without:
                continue
            run = [row] if not row["key"] else db.execute(
                "SELECT * FROM entries WHERE state = 'waiting' AND key = ? ORDER BY seq LIMIT ?",
                (row["key"], limit - len(found)),
            )  # fmt: skip
            found += [
                OutgoingEntry(_item(one), _age_s(one, now), one["attempts"], one["bytes"])
                for one in run
                if not _is_over(one, now)
            ]
            if len(found) >= limit:
                break
        return found[:limit]

    def took(self, db: sqlite3.Connection, ids: Sequence[str], gateway: str, now: BothClocks) -> int:
        """Delete entries that a gateway has on its disk. How many were still here."""
        gone = 0
        for id in ids:
            gone += db.execute("DELETE FROM entries WHERE id = ?", (id,)).rowcount
            db.execute(
                "UPDATE tickets SET state = 'taken', gateway = ?, since_s = ? WHERE id = ? AND state = 'waiting'",
                (gateway, now.powered_s, id),
            )
        return gone

    def refused(self, db: sqlite3.Connection, refusals: Sequence[ItemRefusal], now: BothClocks) -> list[str]:
        """Record that a gateway refused entries; the ids of those that became dead letters."""
        dead = []
        for one in refusals:
            db.execute("UPDATE entries SET attempts = attempts + 1, why = ? WHERE id = ?", (one.why, one.id))
            row = db.execute("SELECT attempts FROM entries WHERE id = ? AND state = 'waiting'", (one.id,)).fetchone()
            if row is None or not (one.final or row["attempts"] >= MOST_REFUSALS):
                continue
            db.execute("UPDATE entries SET state = 'dead', promised = 0 WHERE id = ?", (one.id,))
            _fail(db, one.id, "nothing_alive", f"no gateway takes it: {one.why}", now)
            _count(db, "dead_letters")
            dead.append(one.id)
        return dead

    # tickets

    def answered(self, db: sqlite3.Connection, answers: Sequence[DeferredAnswer], now: BothClocks) -> int:
        """Store answers; how many were new. One for which there is no room is left out, and queried again later."""
        news = 0
        for one in answers:
            row = db.execute("SELECT state FROM tickets WHERE id = ?", (one.id,)).fetchone()
            if row is None or row["state"] not in ("waiting", "taken"):
                continue
            try:
                self._make_room(db, len(one.body), 0, 9)
            except StoreFull:
                continue
            db.execute("DELETE FROM entries WHERE id = ?", (one.id,))  # computed, though the receipt was lost
            if one.code:
                _fail(db, one.id, one.code, one.why, now)
            else:
                db.execute(
                    "UPDATE tickets SET state = 'done', answer = ?, bytes = ?, since_s = ?, keep_s = ? WHERE id = ?",
                    (one.body, ROW_BYTES + len(one.body), now.powered_s, ANSWERS_KEPT_S, one.id),
                )
            news += 1
        return news

    def unknown(self, db: sqlite3.Connection, ids: Sequence[str], gateway: str, now: BothClocks) -> None:
        """Fail tickets of which the gateway that took them knows nothing any more."""
        for id in ids:
            row = db.execute("SELECT state, gateway FROM tickets WHERE id = ?", (id,)).fetchone()
            if row is not None and (row["state"], row["gateway"]) == ("taken", gateway):
                _fail(db, id, "nothing_alive", f"{gateway} took it and knows nothing of it any more", now)

    def ticket(self, db: sqlite3.Connection, id: str) -> Ticket | None:
        row = db.execute("SELECT * FROM tickets WHERE id = ?", (id,)).fetchone()
        if row is None:
            return None
        return Ticket(row["id"], row["model"], row["state"], row["code"], row["why"], row["answer"] or b"")

    def forget(self, db: sqlite3.Connection, id: str) -> bool:
        """Delete a ticket on its caller's request, and its entry if that still waits."""
        db.execute("DELETE FROM entries WHERE id = ?", (id,))
        return db.execute("DELETE FROM tickets WHERE id = ?", (id,)).rowcount > 0

    def unanswered(self, db: sqlite3.Connection, gateway: str | None, limit: int) -> list[str]:
        """Tickets that this gateway took, or any did (None), and that have no answer, the oldest first."""
        rows = db.execute(
            "SELECT id FROM tickets WHERE state = 'taken' AND ? IN (gateway, '*') ORDER BY since_s LIMIT ?",
            ("*" if gateway is None else gateway, limit),
        )
        return [row["id"] for row in rows]

    # time

    def powered_s(self, db: sqlite3.Connection) -> float:
        """How long this device was on before this start, as far as was noted."""
        row = db.execute("SELECT value FROM meta WHERE name = 'powered_s'").fetchone()
        return 0.0 if row is None else float(row["value"])

    def sweep(self, db: sqlite3.Connection, now: BothClocks) -> int:
        """End expired entries and tickets, and note the powered time.

        How many ended; of SWEEP_ROWS and more others may be left.
        """
        db.execute("INSERT OR REPLACE INTO meta VALUES ('powered_s', ?)", (now.powered_s,))
        over = db.execute(
            "SELECT id FROM entries WHERE ? - born_s > ttl_s OR (? IS NOT NULL AND ? - born_utc_s > ttl_s) LIMIT ?",
            (now.powered_s, now.utc_s, now.utc_s, SWEEP_ROWS),
        ).fetchall()
        for row in over:
            db.execute("DELETE FROM entries WHERE id = ?", (row["id"],))
            _fail(db, row["id"], "deadline_exceeded", "it was kept for as long as it may be, and no gateway came", now)
            _count(db, "expired")
        stale = db.execute(
            "SELECT id, state FROM tickets WHERE state <> 'waiting' AND ? - since_s > keep_s LIMIT ?",
            (now.powered_s, SWEEP_ROWS),
        ).fetchall()
        for row in stale:
            if row["state"] == "taken":
                _fail(db, row["id"], "deadline_exceeded", "a gateway took it and has not answered in time", now)
            else:
                db.execute("DELETE FROM tickets WHERE id = ?", (row["id"],))
        return len(over) + len(stale)

    # operators

    def dead(self, db: sqlite3.Connection, limit: int = 100) -> list[sqlite3.Row]:
        """The dead letters, the oldest first; all with a limit of -1."""
        columns = "id, kind, model, priority, attempts, why"  # without the body, which may be 44,000 bytes each
        return db.execute(
            f"SELECT {columns} FROM entries WHERE state = 'dead' ORDER BY seq LIMIT ?", (limit,)
        ).fetchall()

    def retry(self, db: sqlite3.Connection, ids: Collection[str] | None = None) -> int:
        """Queue dead letters to be sent again; None: all."""
        return self._each_dead(
            db, ids, "UPDATE entries SET state = 'waiting', attempts = 0, why = '', promised = "
            "EXISTS (SELECT 1 FROM tickets WHERE tickets.id = entries.id) WHERE id = ?",
            "UPDATE tickets SET state = 'waiting', code = '', why = '' WHERE id = ? AND state = 'failed'",
        )  # fmt: skip

    def drop(self, db: sqlite3.Connection, ids: Collection[str] | None = None) -> int:
        """Delete dead letters; None: all."""
        return self._each_dead(db, ids, "DELETE FROM entries WHERE id = ?")

    def _each_dead(self, db: sqlite3.Connection, ids: Collection[str] | None, *statements: str) -> int:
        found = [row["id"] for row in db.execute("SELECT id FROM entries WHERE state = 'dead'").fetchall()]
        chosen = [id for id in found if ids is None or id in ids]
        for id in chosen:
            for statement in statements:
                db.execute(statement, (id,))
        return len(chosen)

    def backlog(self, db: sqlite3.Connection) -> int:
        """How many entries wait to be sent, in O(1)."""
        (waiting,) = db.execute("SELECT waiting FROM backlog").fetchone()
        return int(waiting)

    def usage(self, db: sqlite3.Connection) -> StoreUsage:
        rows, size = db.execute("SELECT rows, bytes FROM usage").fetchone()
        (dead,) = db.execute("SELECT COUNT(*) FROM entries WHERE state = 'dead'").fetchone()
        tickets = dict(db.execute("SELECT state, COUNT(*) FROM tickets GROUP BY state").fetchall())
        counters = dict(db.execute("SELECT reason, n FROM counters").fetchall())
        return StoreUsage(rows, size, self.backlog(db), dead, tickets, counters)

    def __repr__(self) -> str:
        return f"<OfflineLedger of at most {self.max_bytes} bytes and {self.max_rows} rows>"


def _fail(db: sqlite3.Connection, id: str, code: str, why: str, now: BothClocks) -> None:
    db.execute(
        "UPDATE tickets SET state = 'failed', code = ?, why = ?, since_s = ?, keep_s = ? WHERE id = ?",
        (code, why[:MAX_WORDS], now.powered_s, ANSWERS_KEPT_S, id),
    )


def _count(db: sqlite3.Connection, reason: str) -> None:
    db.execute("INSERT INTO counters VALUES (?, 1) ON CONFLICT (reason) DO UPDATE SET n = n + 1", (reason,))


def _item(row: sqlite3.Row) -> StoredItem:
    return StoredItem(
        id=row["id"],
        kind=row["kind"],
        body=row["body"],
        priority=row["priority"],
        ttl_s=row["ttl_s"],
        key=row["key"],
        model=row["model"],
        version=row["version"],
        variant=row["variant"],
        promised=bool(row["promised"]),
    )


def _age_s(row: sqlite3.Row, now: BothClocks) -> float:
    powered = now.powered_s - float(row["born_s"])
    if now.utc_s is None or row["born_utc_s"] is None:
        return max(0.0, powered)
    return max(0.0, powered, now.utc_s - float(row["born_utc_s"]))


def _is_over(row: sqlite3.Row, now: BothClocks) -> bool:
    return _age_s(row, now) > float(row["ttl_s"])
