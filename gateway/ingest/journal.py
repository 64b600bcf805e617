"""The ingest journal stores in SQL what devices sent: ids against duplicates, jobs, answers and records.

    seen        (device, id) of each item that was taken, for seven days or as long as there is room (`dedup.py`)
    given_over  those of them that another gateway went on with: if that one dies, they come back
    jobs        deferred requests without an answer
    answers     their answers, for devices that inquire, for seven days
    records     results, events and answers in the order in which they came: an operator's own program reads them by
                number (`GET /v1/ingested?after=N`), and reads none twice and misses none

An item's id and the item are stored in one transaction, so a crash cannot separate them. When room runs short the
oldest records are deleted and counted; jobs and answers, which devices were promised, are never deleted for room: then
devices are asked to come back later and keep their items. No device takes more than its share (`device_shares.py`),
and no job is given out before there is room for its answer: what is computed can be stored.

Durations are measured by a steady clock, which goes on from what the last process stored (`resume`): ids, answers and
jobs grow older by the time in which a gateway runs, and not by a wall clock that is set. Records have wall-clock times.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from gateway.ingest.dedup import WINDOW_S, classify_duplicate, dedup_horizon_s
from gateway.ingest.device_shares import WaitingDevice, may_hold, next_device, who_forgets
from gateway.ingest.shared_items import MAX_WHOLE_BYTES, SharedItem
from tidegate.fleet.stored import MAX_BODY_BYTES, MAX_WORDS, DeferredAnswer, Forwarded, ItemRefusal, Kind
from tidegate.storage.database import DatabaseFull

ROW_BYTES: Final = 256
OFF_S: Final = 3600.0  # a gateway's absence counts as so much at most: its clock may have been set meanwhile
JOB_S: Final = 86_400.0  # a deferred request without an answer for this long has failed
MAX_AGE_MS: Final = 10 * 365 * 86_400_000
_SWEEP: Final = 1000

_NOT_YET: Final = "NOT EXISTS (SELECT 1 FROM meta WHERE name = 'promised')"
_HELD: Final = (
    "INSERT OR IGNORE INTO holdings (device) VALUES ({0}.device);"
    " UPDATE holdings SET promised = promised {1} {0}.bytes WHERE device = {0}.device;"
    " UPDATE meta SET value = value {1} {0}.bytes WHERE name = 'promised';"
)

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
    """CREATE TABLE IF NOT EXISTS holdings (
        device TEXT PRIMARY KEY, seen INTEGER NOT NULL DEFAULT 0, promised INTEGER NOT NULL DEFAULT 0,
        forgotten_at_s REAL, turn INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS holding_most ON holdings (seen)",
    "CREATE INDEX IF NOT EXISTS record_of_one ON records (device, id)",
    "CREATE INDEX IF NOT EXISTS oldest_of_one ON seen (device, at_s)",
    # Once, in a file that was made before there were shares; the row in `meta` says that it is done.
    f"INSERT OR IGNORE INTO holdings (device, seen) SELECT device, COUNT(*) FROM seen WHERE {_NOT_YET} GROUP BY device",
    f"INSERT OR IGNORE INTO holdings (device) SELECT DISTINCT device FROM jobs WHERE {_NOT_YET}",
    f"INSERT OR IGNORE INTO holdings (device) SELECT DISTINCT device FROM answers WHERE {_NOT_YET}",
    f"""UPDATE holdings SET promised =
        (SELECT COALESCE(SUM(bytes), 0) FROM jobs WHERE jobs.device = holdings.device)
        + (SELECT COALESCE(SUM(bytes), 0) FROM answers WHERE answers.device = holdings.device) WHERE {_NOT_YET}""",
    "INSERT OR IGNORE INTO meta SELECT 'promised', COALESCE(SUM(promised), 0) FROM holdings",
    *[
        f"CREATE TRIGGER IF NOT EXISTS {table}_{event}_held AFTER {event} ON {table} BEGIN {change} END"
        for table in ("jobs", "answers")
        for event, change in (("insert", _HELD.format("NEW", "+")), ("delete", _HELD.format("OLD", "-")))
    ],
    "CREATE TRIGGER IF NOT EXISTS seen_insert_held AFTER insert ON seen BEGIN"
    " INSERT OR IGNORE INTO holdings (device) VALUES (NEW.device);"
    " UPDATE holdings SET seen = seen + 1 WHERE device = NEW.device; END",
    "CREATE TRIGGER IF NOT EXISTS seen_delete_held AFTER delete ON seen BEGIN"
    " UPDATE holdings SET seen = seen - 1 WHERE device = OLD.device; END",
    "CREATE TABLE IF NOT EXISTS given_over (device TEXT, id TEXT, PRIMARY KEY (device, id)) WITHOUT ROWID",
    "CREATE TRIGGER IF NOT EXISTS seen_delete_given_over AFTER delete ON seen BEGIN"
    " DELETE FROM given_over WHERE device = OLD.device AND id = OLD.id; END",
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
    taken_s: float  # by the journal's steady clock


def no_right(_device: str) -> int:
    return 0


class IngestJournal:
    """The journal's statements, rules and bounds. All state is in the database, but for the answers under way.

    Args:
        kept_for_answers: bytes that requests may not take, so that there is always room to answer some.
        right_of: the highest priority that a device's requests may have against those of other devices.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_seen: int,
        kept_for_answers: int = 0,
        right_of: Callable[[str], int] = no_right,
    ) -> None:
        self.max_bytes = max_bytes
        self._kept_for_answers = kept_for_answers
        self.max_seen = max_seen
        self.answer_bytes = min(MAX_BODY_BYTES, max_bytes // 8) + ROW_BYTES  # the most that one takes
        self._right_of = right_of
        self._reserved = 0  # for the answers of jobs that were given out

    def resume(self, db: sqlite3.Connection, utc_s: float) -> float:
        """Return the instant of the steady clock at which this process begins.

        It is never before one that is stored, and the time since then counts up to OFF_S: nothing tells a gateway that
        was off for a day from one whose clock was set ahead by a day, and to keep what was promised for longer is safe.
        """
        stored = self._meta(db, "steady_s")
        if stored is None:
            return utc_s
        last_utc_s = self._meta(db, "utc_s") or stored
        (newest,) = db.execute("SELECT MAX(at_s) FROM seen").fetchone()  # stored after the last sweep
        return max(stored, newest or stored) + min(max(0.0, utc_s - last_utc_s), OFF_S)

    def keep_time(self, db: sqlite3.Connection, now_s: float, utc_s: float) -> None:
        """Store the instant, for the next process."""
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", (("steady_s", now_s), ("utc_s", utc_s)))

    def take(
        self, db: sqlite3.Connection, one: Forwarded, now_s: float, utc_s: float | None = None
    ) -> ItemRefusal | None:
        """Store an item once. Return None if it is stored, now or before, or its refusal. Raises DatabaseFull.

        Args:
            utc_s: the wall clock's instant, for records; None: as `now_s`.
        """
        utc_s = now_s if utc_s is None else utc_s
        known = db.execute("SELECT 1 FROM seen WHERE device = ? AND id = ?", (one.device, one.id)).fetchone()
        reach = dedup_horizon_s(now_s, self._forgotten_at_s(db, one.device))
        match classify_duplicate(known=known is not None, age_s=one.age_ms / 1e3, reach_s=reach):
            case "duplicate":
                self._count(db, "duplicates")
                return None
            case "too-old":
                self._count(db, "too_old")
                why = f"it is {one.age_ms / 1e3:.0f} s old; whether it was taken before is known for {reach:.0f} s"
                return ItemRefusal(one.id, why, final=True)
        self._remember(db, one, now_s)
        self._store(db, one, now_s, utc_s)
        return None

    def _store(self, db: sqlite3.Connection, one: Forwarded, now_s: float, utc_s: float) -> None:
        """Raises DatabaseFull."""
        born_s = utc_s - one.age_ms / 1e3
        size = len(one.body) + ROW_BYTES
        if one.kind == "request":
            held, free = self._held(db, one.device)
            if size > (free := free - self._kept_for_answers):
                used = self.max_bytes - self._reserved - self._kept_for_answers - free
                raise DatabaseFull(f"{used} of {self.max_bytes} bytes are deferred requests and their answers")
            if not may_hold(held=held, size=size, free=free):
                raise DatabaseFull(f"{held} bytes are answers and deferred requests of {one.device} alone")
            self._make_room(db, size + self._reserved)
            db.execute(
                "INSERT INTO jobs (device, id, priority, taken_s, born_s, model, version, variant, body, bytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (one.device, one.id, one.priority, now_s, born_s, one.model, one.version, one.variant, one.body, size),
            )
        else:
            self._make_room(db, size)
            self._record(
                db,
                device=one.device,
                id=one.id,
                kind=one.kind,
                by=(one.model, one.version, one.variant),
                happened_s=born_s,
                now_s=utc_s,
                code="",
                body=one.body,
            )
        self._count(db, f"taken_{one.kind}")

    def _remember(self, db: sqlite3.Connection, one: Forwarded, now_s: float) -> None:
        (seen,) = db.execute("SELECT seen FROM usage").fetchone()
        if seen >= self.max_seen:
            most = db.execute("SELECT device, seen FROM holdings ORDER BY seen DESC LIMIT 1").fetchone()
            mine = db.execute("SELECT seen FROM holdings WHERE device = ?", (one.device,)).fetchone()
            device = who_forgets(one.device, mine["seen"] if mine else 0, (most["device"], most["seen"]))
            oldest = db.execute(
                "SELECT id, at_s FROM seen WHERE device = ? ORDER BY at_s LIMIT 1", (device,)
            ).fetchone()
            db.execute("DELETE FROM seen WHERE device = ? AND id = ?", (device, oldest["id"]))
            if now_s - oldest["at_s"] < WINDOW_S:
                db.execute("UPDATE holdings SET forgotten_at_s = ? WHERE device = ?", (oldest["at_s"], device))
                self._count(db, "forgotten_early")
        db.execute("INSERT INTO seen VALUES (?, ?, ?)", (one.device, one.id, now_s))

    def _forgotten_at_s(self, db: sqlite3.Connection, device: str) -> float | None:
        """Return when the newest id was taken that this device forgot early, or all did before there were shares."""
        row = db.execute("SELECT forgotten_at_s FROM holdings WHERE device = ?", (device,)).fetchone()
        instants = (self._meta(db, "forgotten_at_s"), row["forgotten_at_s"] if row else None)
        return max((at_s for at_s in instants if at_s is not None), default=None)

    def _held(self, db: sqlite3.Connection, device: str) -> tuple[int, int]:
        """Return the bytes promised to a device, and those that are free for promises to any."""
        row = db.execute("SELECT promised FROM holdings WHERE device = ?", (device,)).fetchone()
        return (row["promised"] if row else 0), self.max_bytes - self._reserved - int(self._meta(db, "promised") or 0)

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
        """Return due jobs that there is room to answer: of the devices in turn, the most important of each first.

        Args:
            without: the jobs that were given out before and are not answered yet.
        """
        self._reserved = len(without) * self.answer_bytes
        given: list[DeferredJob] = []
        waiting = self._waiting(db, now_s, without)
        while len(given) < limit and (device := next_device(waiting.values(), self._right_of)) is not None:
            waiting.pop(device.name)
            held, free = self._held(db, device.name)
            # The answer takes the place of its request.
            out = [*without, *(job.seq for job in given)]
            marks = ",".join("?" * len(out))
            row = db.execute(
                f"SELECT * FROM jobs WHERE device = ? AND not_before_s <= ? AND seq NOT IN ({marks})"
                " ORDER BY priority DESC, seq LIMIT 1",
                (device.name, now_s, *out),
            ).fetchone()
            if not may_hold(held=held - row["bytes"], size=self.answer_bytes, free=free + row["bytes"]):
                continue
            self._reserved += self.answer_bytes
            given.append(_job(row, row["body"]))
            db.execute(
                "UPDATE holdings SET turn = (SELECT MAX(turn) FROM holdings) + 1 WHERE device = ?", (device.name,)
            )
            waiting.update(self._waiting(db, now_s, frozenset({*out, row["seq"]}), device.name))
        return given

    def _waiting(
        self, db: sqlite3.Connection, now_s: float, without: frozenset[int], device: str = ""
    ) -> dict[str, WaitingDevice]:
        """Return the devices with due jobs, or the one."""
        rows = db.execute(
            "SELECT jobs.device, MAX(priority) AS priority, turn, MIN(seq) AS oldest FROM jobs"
            " JOIN holdings ON holdings.device = jobs.device"
            f" WHERE not_before_s <= ? AND seq NOT IN ({','.join('?' * len(without))}) AND ? IN ('', jobs.device)"
            " GROUP BY jobs.device",
            (now_s, *without, device),
        )
        return {
            row["device"]: WaitingDevice(row["device"], row["priority"], row["turn"], row["oldest"]) for row in rows
        }

    def next_due_s(self, db: sqlite3.Connection) -> float | None:
        row = db.execute("SELECT MIN(not_before_s) AS at FROM jobs").fetchone()
        return None if row["at"] is None else float(row["at"])

    def postpone(self, db: sqlite3.Connection, job: DeferredJob, until_s: float) -> None:
        db.execute("UPDATE jobs SET attempts = attempts + 1, not_before_s = ? WHERE seq = ?", (until_s, job.seq))

    def answer(
        self,
        db: sqlite3.Connection,
        job: DeferredJob,
        answer: DeferredAnswer,
        variant: str,
        whole: bytes,
        now_s: float,
        utc_s: float | None = None,
    ) -> None:
        """Finish a job: store the answer for the device, and a record of it. A second answer changes nothing.

        The room for the answer was kept free. A record, of which nothing was promised, is left out if it finds none.
        """
        row = db.execute("SELECT born_s FROM jobs WHERE seq = ?", (job.seq,)).fetchone()
        if row is None:
            return
        db.execute("DELETE FROM jobs WHERE seq = ?", (job.seq,))
        size = len(answer.body) + ROW_BYTES
        self._make_room(db, size)
        db.execute(
            "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
            (job.device, job.id, now_s, answer.code, answer.why[:MAX_WORDS], answer.body, size),
        )
        self._count(db, "answered" if not answer.code else "failed")
        try:
            self._make_room(db, len(whole) + ROW_BYTES)
        except DatabaseFull:
            self._count(db, "records_dropped")
            return
        self._record(
            db,
            device=job.device,
            id=job.id,
            kind="answer",
            by=(job.model, job.version, variant),
            happened_s=row["born_s"],
            now_s=now_s if utc_s is None else utc_s,
            code=answer.code,
            body=whole,
        )

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

    # what a store that gateways share holds too

    def known(self, db: sqlite3.Connection, items: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those of (device, id) that were taken here."""
        one = "SELECT 1 FROM seen WHERE device = ? AND id = ?"
        return {item for item in items if db.execute(one, item).fetchone() is not None}

    def given_over(self, db: sqlite3.Connection, items: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those of (device, id) that were taken here, and that another gateway went on with."""
        one = "SELECT 1 FROM given_over WHERE device = ? AND id = ?"
        return {item for item in items if db.execute(one, item).fetchone() is not None}

    def unfinished(
        self, db: sqlite3.Connection, utc_s: float, after: tuple[int, int], limit: int
    ) -> tuple[list[SharedItem], tuple[int, int]]:
        """Return jobs without an answer and records that nothing has read, as they are kept in the store.

        Args:
            after: numbers of the last job and the last record of the last call; (0, 0) begins.
        """
        found = []
        last_job, last_record = after
        for row in db.execute("SELECT * FROM jobs WHERE seq > ? ORDER BY seq LIMIT ?", (last_job, limit)):
            last_job = row["seq"]
            age_ms = round(max(0.0, utc_s - row["born_s"]) * 1e3)
            found.append(SharedItem(_forwarded(row, "request", age_ms, row["body"], row["priority"]), utc_s))
        last_record = max(last_record, int(self._meta(db, "read") or 0))
        query = "SELECT * FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
        for row in db.execute(query, (last_record, max(0, limit - len(found)))):
            last_record = row["seq"]
            age_ms = round(max(0.0, utc_s - row["happened_s"]) * 1e3)
            if row["kind"] != "answer":
                found.append(SharedItem(_forwarded(row, row["kind"], age_ms, row["body"]), utc_s))
                continue
            told = db.execute(
                "SELECT * FROM answers WHERE device = ? AND id = ?", (row["device"], row["id"])
            ).fetchone()
            answer = DeferredAnswer(row["id"], told["body"], told["code"], told["why"]) if told is not None else None
            forwarded = _forwarded(row, "request", age_ms, b"")
            found.append(SharedItem(forwarded, utc_s, answer, row["variant"], row["body"][:MAX_WHOLE_BYTES]))
        return found, (last_job, last_record)

    def adopt(self, db: sqlite3.Connection, one: SharedItem, now_s: float, utc_s: float) -> ItemRefusal | None:
        """Take over an item that another gateway had taken; once, however often. Raises DatabaseFull.

        One that was given over is known here and comes back all the same: it is no duplicate, and never too old.
        """
        age_ms = one.item.age_ms + round(max(0.0, utc_s - one.at_utc_s) * 1e3)
        item = msgspec.structs.replace(one.item, age_ms=min(age_ms, MAX_AGE_MS))
        refusal = None
        if db.execute("DELETE FROM given_over WHERE device = ? AND id = ?", (item.device, item.id)).rowcount:
            self._store(db, item, now_s, utc_s)
        else:
            refusal = self.take(db, item, now_s, utc_s)
        if refusal is None and one.answer is not None:
            row = db.execute("SELECT * FROM jobs WHERE device = ? AND id = ?", (item.device, item.id)).fetchone()
            if row is not None:
                self.answer(db, _job(row, b""), one.answer, one.variant, one.whole, now_s, utc_s)
        return refusal

    def drop(self, db: sqlite3.Connection, device: str, id: str) -> None:
        """Forget a job or a record that another gateway has taken over; its id stays known, and that it was given."""
        db.execute(
            "INSERT OR IGNORE INTO given_over SELECT device, id FROM seen WHERE device = ? AND id = ?", (device, id)
        )
        for table in ("jobs", "records"):
            if db.execute(f"DELETE FROM {table} WHERE device = ? AND id = ?", (device, id)).rowcount:
                self._count(db, "taken_over")

    def read_until(self, db: sqlite3.Connection, seq: int, limit: int) -> list[tuple[str, str]]:
        """Note that an operator's program has read up to this record; return (device, id) of some that it read."""
        before = int(self._meta(db, "read") or 0)
        rows = db.execute(
            "SELECT seq, device, id FROM records WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?", (before, seq, limit)
        ).fetchall()
        until = rows[-1]["seq"] if len(rows) == limit else max(before, seq)
        if until > before:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('read', ?)", (until,))
        return [(row["device"], row["id"]) for row in rows]

    def is_unfinished(self, db: sqlite3.Connection, device: str, id: str) -> bool:
        """Whether it is a job, or a record that nothing has read."""
        read = int(self._meta(db, "read") or 0)
        job = db.execute("SELECT 1 FROM jobs WHERE device = ? AND id = ?", (device, id)).fetchone()
        record = "SELECT 1 FROM records WHERE device = ? AND id = ? AND seq > ?"
        return job is not None or db.execute(record, (device, id, read)).fetchone() is not None

    # expiry, and what operators read

    def sweep(self, db: sqlite3.Connection, now_s: float, utc_s: float | None = None) -> bool:
        """Delete expired rows: ids and answers after seven days; jobs fail after one. True: there may be more."""
        most = 0
        for table in ("seen", "answers"):
            deleted = db.execute(
                f"DELETE FROM {table} WHERE (device, id) IN "
                f"(SELECT device, id FROM {table} WHERE at_s < ? LIMIT {_SWEEP})",
                (now_s - WINDOW_S,),
            ).rowcount
            most = max(most, deleted)
        failing = db.execute("SELECT * FROM jobs WHERE taken_s < ? LIMIT ?", (now_s - JOB_S, _SWEEP)).fetchall()
        for row in failing:
            job = _job(row, b"")
            why = f"nobody could compute it for {JOB_S / 3600:.0f} hours"
            self.answer(db, job, DeferredAnswer(job.id, code="nothing_alive", why=why), "", b"", now_s, utc_s)
        db.execute(
            "DELETE FROM holdings WHERE seen = 0 AND promised = 0 AND COALESCE(forgotten_at_s, 0) < ?",
            (now_s - WINDOW_S,),
        )
        self.keep_time(db, now_s, now_s if utc_s is None else utc_s)
        return max(most, len(failing)) == _SWEEP

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


def _forwarded(row: sqlite3.Row, kind: Kind, age_ms: int, body: bytes, priority: int = 0) -> Forwarded:
    return Forwarded(
        device=row["device"],
        id=row["id"],
        kind=kind,
        age_ms=min(age_ms, MAX_AGE_MS),
        body=body,
        priority=priority,
        model=row["model"],
        version=row["version"],
        variant=row["variant"],
    )


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
        taken_s=row["taken_s"],
    )
