"""A device and its gateway at the level of their files, in lives that end by SIGKILL in the middle of a statement.

python -m tests.support.edge.keeping FOLDER SEED HOURS A_HOUR all|storing

Each life is a fork: it goes on where the files say that the one before was, and is killed at the statement that its
chance names, in either file: before BEGIN, between two statements of a transaction, before or after COMMIT. What a life
was told is kept it notes in `told` right after, as an agent tells its caller. Time is virtual: HOURS without a gateway,
in which A_HOUR things are stored, then a drain at the pace of the core over a link of BYTES_S. With `storing` only the
lives of those hours are killed, so that the drain is one and its pace can be seen. Prints a summary.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from edge_agent.core.drain import DrainPacer
from edge_agent.offline import queue_db as store
from edge_agent.offline.forwarder import forwarded_message
from gateway.ingest import journal
from tidegate.storage.database import connect, transact

BYTES_S = 40_000.0
LIVES = 400
MOST_STATEMENTS = 150  # of a life that is killed
Statement = Callable[[str], None]


class Device:
    """One life."""

    def __init__(self, folder: Path, draw: random.Random, on_statement: Statement, hours: float, a_hour: int) -> None:
        self.folder, self.draw, self.hours, self.a_hour = folder, draw, hours, a_hour
        self.ledger = store.OfflineLedger(max_bytes=64 * 2**20, max_rows=100_000)
        self.journal = journal.IngestJournal(max_bytes=64 * 2**20, max_seen=100_000)
        self.here = connect(folder / "store.db", store.SCHEMA)
        self.there = connect(folder / "ingest.db", journal.SCHEMA)
        self.here.set_trace_callback(on_statement)
        self.there.set_trace_callback(on_statement)
        self.now = self.ledger.powered_s(self.here)

    def live(self) -> None:
        """To the end, if it may."""
        self.store_all()
        self.drain_all()
        (self.folder / "done").touch()

    def store_all(self) -> None:
        """One thing each 3600 / a_hour seconds, from where the last life was."""
        number = self.count("told")
        while self.now < self.hours * 3600.0:
            self.now += 3600.0 / self.a_hour
            id = f"{self.draw.getrandbits(128):032x}"
            promised = self.draw.random() < 0.5
            kind = "request" if promised else "result"
            item = store.StoredItem(id, kind, id.encode() * 8, number % 10, 7 * 86_400.0,  # type: ignore[arg-type]
                              self.draw.choice(["", "a", "b"]), promised=promised)  # fmt: skip
            transact(self.here, lambda db, item=item: self.ledger.put(db, item, store.BothClocks(self.now)))  # type: ignore[misc]
            self.note("told", id)
            number += 1

    def drain_all(self) -> None:
        drain = DrainPacer()
        drain.begin(self.now)
        while True:
            waiting = self.ledger.waiting(self.here, store.BothClocks(self.now), 64)
            if not waiting:
                return
            budget = drain.budget(self.now, live=False)
            if budget is None:
                self.now = drain.next_wake(self.now) or self.now
                continue
            train = drain.choose(waiting, budget, self.now)
            began_at = self.now
            for entry in train:
                drain.sent(entry, self.now)
            self.now += sum(entry.size_bytes for entry in train) / BYTES_S
            for entry in train:
                one = forwarded_message("kiosk", entry)
                transact(self.there, lambda db, one=one: self.journal.take(db, one, 1.8e9 + self.now))  # type: ignore[misc]
            taken = [entry.id for entry in train]
            now = store.BothClocks(self.now)
            transact(self.here, lambda db: self.ledger.took(db, taken, "main", now))  # noqa: B023 - done when it returns
            drain.settled(taken, self.now, live=False)
            self.note("trains", f"{began_at} {self.now}")
            transact(self.here, lambda db: self.ledger.sweep(db, store.BothClocks(self.now)))

    def note(self, what: str, line: str) -> None:
        with open(self.folder / what, "a", encoding="ascii") as file:
            file.write(f"{line}\n")

    def count(self, what: str) -> int:
        path = self.folder / what
        return len(path.read_text().splitlines()) if path.exists() else 0


def one_life(folder: Path, seed: int, kill_at: int, hours: float, a_hour: int, only_storing: bool) -> None:
    statements = 0

    def on_statement(_sql: str) -> None:
        nonlocal statements
        statements += 1
        if statements == kill_at and not (only_storing and device.now >= hours * 3600.0):
            os.kill(os.getpid(), signal.SIGKILL)

    device = Device(folder, random.Random(seed), on_statement, hours, a_hour)
    device.live()


def summary(folder: Path, lives: int) -> dict[str, object]:
    told = (folder / "told").read_text().split()
    with closing(sqlite3.connect(folder / "ingest.db")) as db:
        received = [row[0] for row in db.execute("SELECT id FROM records UNION ALL SELECT id FROM jobs")]
    with closing(sqlite3.connect(folder / "store.db")) as db:
        (left,) = db.execute("SELECT COUNT(*) FROM entries").fetchone()
    trains = [tuple(map(float, line.split())) for line in (folder / "trains").read_text().splitlines()]
    busy_s = sum(end - begin for begin, end in trains)
    return {
        "lives": lives,
        "done": (folder / "done").exists(),
        "told": len(told),
        "lost": len(set(told) - set(received)),
        "twice": len(received) - len(set(received)),
        "left": left,
        "busy_s": busy_s,
        "drain_s": trains[-1][1] - trains[0][0],
    }


def main(folder: Path, seed: int, hours: float, a_hour: int, only_storing: bool) -> None:
    draw, lives = random.Random(seed), 0
    while not (folder / "done").exists() and lives < LIVES:
        lives += 1
        kill_at = draw.randrange(1, MOST_STATEMENTS)
        child_seed = draw.getrandbits(32)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                one_life(folder, child_seed, kill_at, hours, a_hour, only_storing)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit(f"life {lives} failed")
    print(json.dumps(summary(folder, lives)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "storing")
