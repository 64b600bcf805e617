"""The ingest journal stores in SQL what devices sent: ids against duplicates, jobs, answers and records.

    seen      (device, id) of each item that was taken, for seven days or as long as there is room (`dedup.py`)
    jobs      deferred requests without an answer
    answers   their answers, for devices that inquire, for seven days
    records   results, events and answers in the order in which they came: an operator's own program reads them by
              number (`GET /v1/ingested?after=N`), and reads none twice and misses none

An item's id and the item are stored in one transaction, so a crash cannot separate them. When room runs short the
oldest records are deleted and counted; jobs and answers, which devices were promised, are never deleted for room: then
devices are asked to come back later and keep their items.

Instants are this gateway's wall clock: a gateway knows the time.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final, NamedTuple

from gateway.ingest.dedup import WINDOW_S, classify_duplicate, dedup_horizon_s
from tidegate.fleet.stored import MAX_WORDS, DeferredAnswer, Forwarded, ItemRefusal
from tidegate.storage.database import DatabaseFull

ROW_BYTES: Final = 256
MOST_OF_ONE: Final = 0.25  # share of the room for one device's deferred requests, so that others have room too
JOB_S: Final = 86_400.0  # a deferred request without an answer for this long has failed
_SWEEP: Final = 1000

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS counters (reason TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS usage (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER, seen INTEGER)",
    "INSERT OR IGNORE INTO usage VALUES (1, 0, 0)",
    """CREATE TABLE IF NOT EXISTS seen (
        device TEXT, id TEXT, at_s REAL NOT NULL, PRIMARY KEY (device, id)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS forgetting ON seen (at_s)",
    """CREATE TABLE IF NOT EXISTS records (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL,
        model TEXT NOT NULL, version TEXT NOT NULL, variant TEXT NOT NULL, happened_s REAL NOT NULL,
        taken_s REAL NOT NULL, code TEXT NOT NULL DEFAULT '', body BLOB NOT NULL, bytes INTEGER NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS jobs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT NOT NULL, id TEXT NOT NULL, priority INTEGER NOT NULL,
        taken_s REAL NOT NULL, born_s REAL NOT NULL, not_before_s REAL NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0, model TEXT NOT NULL, version TEXT NOT NULL, variant TEXT NOT NULL,
        body BLOB NOT NULL, bytes INTEGER NOT NULL, UNIQUE (device, id))""",
    """CREATE TABLE IF NOT EXISTS answers (
        device TEXT, id TEXT, at_s REAL NOT NULL, code TEXT NOT NULL, why TEXT NOT NULL, body BLOB NOT NULL,
        bytes INTEGER NOT NULL, PRIMARY KEY (device, id)) WITHOUT ROWID""",
    *[
        f"CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} BEGIN UPDATE usage SET {change}; END"
        for table in ("records", "jobs", "answers")
        for event, change in (("insert", "bytes = bytes + NEW.bytes"), ("delete", "bytes = bytes - OLD.bytes"))
    ],
    "CREATE TRIGGER IF NOT EXISTS seen_insert AFTER insert ON seen BEGIN UPDATE usage SET seen = seen + 1; END",
    "CREATE TRIGGER IF NOT EXISTS seen_delete AFTER delete ON seen BEGIN UPDATE usage SET seen = seen - 1; END",
)


class DeferredJob(NamedTuple):
    """A deferred request that is due."""

    seq: int
    device: str
    id: str
    attempts: int
    model: str
    version: str
    variant: str  # the variant that was not sure; "" if nothing was computed
    body: bytes


class IngestJournal:
    """The journal's statements, rules and bounds; all state is in the database."""

    def __init__(self, *, max_bytes: int, max_seen: int) -> None:
        self.max_bytes = max_bytes
        self.max_seen = max_seen

    def take(self, db: sqlite3.Connection, one: Forwarded, now_s: float) -> ItemRefusal | None:
        """Store an item once. Return None if it is stored, now or before, or its refusal. Raises DatabaseFull."""
        known = db.execute("SELECT 1 FROM seen WHERE device = ? AND id = ?", (one.device, one.id)).fetchone()
        reach = dedup_horizon_s(now_s, self._meta(db, "forgotten_at_s"))
        match classify_duplicate(known=known is not None, age_s=one.age_ms / 1e3, reach_s=reach):
            case "duplicate":
                self._count(db, "duplicates")
                return None
            case "too-old":
                self._count(db, "too_old")
                why = f"it is {one.age_ms / 1e3:.0f} s old; whether it was taken before is known for {reach:.0f} s"
                return ItemRefusal(one.id, why, final=True)
        self._remember(db, one, now_s)
        born_s = now_s - one.age_ms / 1e3
        size = len(one.body) + ROW_BYTES
        self._make_room(db, size)
        if one.kind == "request":
            (mine,) = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM jobs WHERE device = ?", (one.device,)).fetchone()
            if mine + size > MOST_OF_ONE * self.max_bytes:
                raise DatabaseFull(f"{mine} bytes are deferred requests of {one.device} alone")
            db.execute(
                "INSERT INTO jobs (device, id, priority, taken_s, born_s, model, version, variant, body, bytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (one.device, one.id, one.priority, now_s, born_s, one.model, one.version, one.variant, one.body, size),
            )
        else:
            self._record(
                db,
                device=one.device,
                id=one.id,
                kind=one.kind,
                by=(one.model, one.version, one.variant),
                happened_s=born_s,
                now_s=now_s,
                code="",
                body=one.body,
            )
        self._count(db, f"taken_{one.kind}")
        return None

    def _remember(self, db: sqlite3.Connection, one: Forwarded, now_s: float) -> None:
        (seen,) = db.execute("SELECT seen FROM usage").fetchone()
        if seen >= self.max_seen:
            oldest = db.execute("SELECT device, id, at_s FROM seen ORDER BY at_s LIMIT 1").fetchone()
            db.execute("DELETE FROM seen WHERE device = ? AND id = ?", (oldest["device"], oldest["id"]))
            if now_s - oldest["at_s"] < WINDOW_S:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('forgotten_at_s', ?)", (oldest["at_s"],))
                self._count(db, "forgotten_early")
        db.execute("INSERT INTO seen VALUES (?, ?, ?)", (one.device, one.id, now_s))

    def _make_room(self, db: sqlite3.Connection, size: int) -> None:
        (used,) = db.execute("SELECT bytes FROM usage").fetchone()
        while used + size > self.max_bytes:
            oldest = db.execute("SELECT seq, bytes FROM records ORDER BY seq LIMIT 1").fetchone()
            if oldest is None:
                raise DatabaseFull(f"{used} of {self.max_bytes} bytes are deferred requests and their answers")
            db.execute("DELETE FROM records WHERE seq = ?", (oldest["seq"],))
            self._count(db, "records_dropped")
            used -= oldest["bytes"]

    # jobs and answers

    def jobs(self, db: sqlite3.Connection, now_s: float, limit: int, without: frozenset[int]) -> list[DeferredJob]:
        """Return due jobs, most important first, then in the order in which they were taken."""
        rows = db.execute(
            "SELECT * FROM jobs WHERE not_before_s <= ? ORDER BY priority DESC, seq LIMIT ?",
            (now_s, limit + len(without)),
        ).fetchall()
        due = [row for row in rows if row["seq"] not in without][:limit]
        return [_job(row, row["body"]) for row in due]

    def next_due_s(self, db: sqlite3.Connection) -> float | None:
        row = db.execute("SELECT MIN(not_before_s) AS at FROM jobs").fetchone()
        return None if row["at"] is None else float(row["at"])

    def postpone(self, db: sqlite3.Connection, job: DeferredJob, until_s: float) -> None:
        db.execute("UPDATE jobs SET attempts = attempts + 1, not_before_s = ? WHERE seq = ?", (until_s, job.seq))

    def answer(
        self, db: sqlite3.Connection, job: DeferredJob, answer: DeferredAnswer, variant: str, whole: bytes, now_s: float
    ) -> None:
        """Finish a job: store the answer for the device, and a record of it. A second answer changes nothing."""
        row = db.execute("SELECT born_s FROM jobs WHERE seq = ?", (job.seq,)).fetchone()
        if row is None:
            return
        db.execute("DELETE FROM jobs WHERE seq = ?", (job.seq,))
        size = len(answer.body) + ROW_BYTES
        self._make_room(db, size + len(whole) + ROW_BYTES)
        db.execute(
            "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
            (job.device, job.id, now_s, answer.code, answer.why[:MAX_WORDS], answer.body, size),
        )
        self._record(
            db,
            device=job.device,
            id=job.id,
            kind="answer",
            by=(job.model, job.version, variant),
            happened_s=row["born_s"],
            now_s=now_s,
            code=answer.code,
            body=whole,
        )
        self._count(db, "answered" if not answer.code else "failed")

    def asked(
        self, db: sqlite3.Connection, device: str, ids: tuple[str, ...]
    ) -> tuple[list[DeferredAnswer], list[str]]:
        """Return the stored answers and the unknown ids; an id whose job is still to be done is in neither."""
        answers, unknown = [], []
        for id in ids:
            row = db.execute("SELECT * FROM answers WHERE device = ? AND id = ?", (device, id)).fetchone()
            if row is not None:
                answers.append(DeferredAnswer(id, row["body"], row["code"], row["why"]))
            elif not db.execute("SELECT 1 FROM jobs WHERE device = ? AND id = ?", (device, id)).fetchone():
                unknown.append(id)
        return answers, unknown

    # expiry, and what operators read

    def sweep(self, db: sqlite3.Connection, now_s: float) -> None:
        """Delete expired rows: ids and answers after seven days; jobs fail after one."""
        for table in ("seen", "answers"):
            db.execute(
                f"DELETE FROM {table} WHERE (device, id) IN "
                f"(SELECT device, id FROM {table} WHERE at_s < ? LIMIT {_SWEEP})",
                (now_s - WINDOW_S,),
            )
        for row in db.execute("SELECT * FROM jobs WHERE taken_s < ? LIMIT ?", (now_s - JOB_S, _SWEEP)).fetchall():
            job = _job(row, b"")
            why = f"nobody could compute it for {JOB_S / 3600:.0f} hours"
            self.answer(db, job, DeferredAnswer(job.id, code="nothing_alive", why=why), "", b"", now_s)

    def records(self, db: sqlite3.Connection, after: int, limit: int) -> list[sqlite3.Row]:
        return db.execute("SELECT * FROM records WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)).fetchall()

    def usage(self, db: sqlite3.Connection) -> dict[str, Any]:
        used, seen = db.execute("SELECT bytes, seen FROM usage").fetchone()
        (jobs,) = db.execute("SELECT COUNT(*) FROM jobs").fetchone()
        counters = dict(db.execute("SELECT reason, n FROM counters").fetchall())
        return {"bytes": used, "max_bytes": self.max_bytes, "remembered": seen, "deferred": jobs, "counters": counters}

    def _record(
        self,
        db: sqlite3.Connection,
        *,
        device: str,
        id: str,
        kind: str,
        by: tuple[str, str, str],
        happened_s: float,
        now_s: float,
        code: str,
        body: bytes,
    ) -> None:
        db.execute(
            "INSERT INTO records (device, id, kind, model, version, variant, happened_s, taken_s, code, body, bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (device, id, kind, *by, happened_s, now_s, code, body, len(body) + ROW_BYTES),
        )

    @staticmethod
    def _meta(db: sqlite3.Connection, name: str) -> float | None:
        row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else float(row["value"])

    @staticmethod
    def _count(db: sqlite3.Connection, reason: str) -> None:
        db.execute("INSERT INTO counters VALUES (?, 1) ON CONFLICT (reason) DO UPDATE SET n = n + 1", (reason,))

    def __repr__(self) -> str:
        return f"<IngestJournal of at most {self.max_bytes} bytes, {self.max_seen} remembered>"


def _job(row: sqlite3.Row, body: bytes) -> DeferredJob:
    return DeferredJob(
        seq=row["seq"],
        device=row["device"],
        id=row["id"],
        attempts=row["attempts"],
        model=row["model"],
        version=row["version"],
        variant=row["variant"],
        body=body,
    )
