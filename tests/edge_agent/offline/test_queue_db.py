"""The offline ledger keeps, evicts and expires entries and tickets: a real SQLite file, over virtual hours."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_agent.cli import edge
from edge_agent.commands import store
from edge_agent.offline.queue_db import (
    ANSWERS_KEPT_S,
    MOST_REFUSALS,
    ROW_BYTES,
    SCHEMA,
    BothClocks,
    OfflineLedger,
    StoredItem,
    StoreFull,
)
from tidegate.fleet.stored import DeferredAnswer, ItemRefusal
from tidegate.storage.database import connect, transact

NOW = BothClocks(1000.0)


def id_of(number: int) -> str:
    return f"{number:032x}"


def request(number: int, size: int = 100, **fields: object) -> StoredItem:
    return StoredItem(id_of(number), "request", b"r" * size, promised=True, **fields)  # type: ignore[arg-type]


def result(number: int, size: int = 100, **fields: object) -> StoredItem:
    return StoredItem(id_of(number), "result", b"r" * size, **fields)  # type: ignore[arg-type]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(connect(tmp_path / "store.db", SCHEMA)) as one:
        yield one


@pytest.fixture
def ledger() -> OfflineLedger:
    return OfflineLedger(max_bytes=10_000, max_rows=1000)


def waiting(ledger: OfflineLedger, db: sqlite3.Connection, now: BothClocks = NOW) -> list[str]:
    return [one.id for one in ledger.waiting(db, now, 100)]


def test_what_is_taken_is_deleted_and_its_ticket_says_so(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    ledger.put(db, request(1), NOW)
    ledger.put(db, request(1), NOW)  # a second time changes nothing

    assert ledger.took(db, [id_of(1), id_of(9)], "main", NOW) == 1

    assert waiting(ledger, db) == []
    ticket = ledger.ticket(db, id_of(1))
    assert ticket is not None
    assert ticket.state == "taken"
    assert ledger.unanswered(db, "main", 10) == [id_of(1)]
    assert ledger.unanswered(db, "other", 10) == []


def test_an_answer_ends_a_ticket_once_also_one_whose_receipt_was_lost(
    ledger: OfflineLedger, db: sqlite3.Connection
) -> None:
    ledger.put(db, request(1), NOW)

    assert ledger.answered(db, [DeferredAnswer(id_of(1), b"yes"), DeferredAnswer(id_of(5), b"nobody asked")], NOW) == 1
    assert ledger.answered(db, [DeferredAnswer(id_of(1), code="internal", why="late")], NOW) == 0

    ticket = ledger.ticket(db, id_of(1))
    assert ticket is not None
    assert (ticket.state, ticket.answer) == ("done", b"yes")
    assert waiting(ledger, db) == []


def test_for_room_the_least_important_goes_first_and_of_it_the_oldest(
    ledger: OfflineLedger, db: sqlite3.Connection
) -> None:
    for number, priority in enumerate([5, 2, 2, 9]):
        ledger.put(db, result(number, 2000, priority=priority), NOW)

    ledger.put(db, result(4, 2000, priority=5), NOW)

    assert waiting(ledger, db) == [id_of(3), id_of(0), id_of(4), id_of(2)]
    assert ledger.usage(db).counters == {"evicted_for_room": 1}


def test_nothing_that_is_more_important_gives_way(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    for number in range(4):
        ledger.put(db, result(number, 2000, priority=5), NOW)

    with pytest.raises(StoreFull, match="of 10000 bytes"):
        transact(db, lambda one: ledger.put(one, result(9, 2000, priority=4), NOW))

    assert len(waiting(ledger, db)) == 4


def test_a_promise_gives_way_to_nothing(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    for number in range(4):
        ledger.put(db, request(number, 1500, priority=0), NOW)

    with pytest.raises(StoreFull, match="all promised or more important"):
        transact(db, lambda one: ledger.put(one, request(9, 2000, priority=9), NOW))

    assert len(waiting(ledger, db)) == 4


@pytest.mark.slow
def test_rows_are_bounded_however_small(db: sqlite3.Connection) -> None:
    ledger = OfflineLedger(max_bytes=10**9, max_rows=20)
    for number in range(100):
        ledger.put(db, result(number, 1), NOW)

    assert ledger.usage(db).rows == 20
    assert waiting(ledger, db) == [id_of(number) for number in range(80, 100)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "state"),
    [(DeferredAnswer(id_of(1), b"a" * 50), "done"), (DeferredAnswer(id_of(1), code="not_found", why="no"), "failed")],
)
def test_an_answer_ends_its_ticket_also_since_fewer_rows_may_be_kept(
    ledger: OfflineLedger, db: sqlite3.Connection, answer: DeferredAnswer, state: str
) -> None:
    for number in range(1, 6):
        ledger.put(db, request(number), NOW)
    ledger.took(db, [id_of(number) for number in range(1, 6)], "main", NOW)
    ledger.max_rows = 3

    ledger.answered(db, [answer], NOW)
    ticket = ledger.ticket(db, id_of(1))
    assert ticket is not None and ticket.state == state
    with pytest.raises(StoreFull):
        ledger.put(db, request(6), NOW)


def test_words_alone_end_a_ticket_also_since_fewer_bytes_may_be_kept(
    ledger: OfflineLedger, db: sqlite3.Connection
) -> None:
    ledger.put(db, request(1), NOW)
    ledger.put(db, request(2), NOW)
    ledger.max_bytes = 100

    ledger.answered(db, [DeferredAnswer(id_of(1), code="not_found", why="no"), DeferredAnswer(id_of(2), b"a")], NOW)
    assert [one.state for number in (1, 2) if (one := ledger.ticket(db, id_of(number)))] == ["failed", "waiting"]


@pytest.mark.parametrize("utc_s", [None, 5.0])  # nobody knows the time; it is 1970
def test_time_is_powered_time(ledger: OfflineLedger, db: sqlite3.Connection, utc_s: float | None) -> None:
    ledger.put(db, request(1, ttl_s=3600.0), BothClocks(1000.0, utc_s))

    assert ledger.sweep(db, BothClocks(1000.0 + 3599.0)) == 0
    assert ledger.sweep(db, BothClocks(1000.0 + 3601.0)) == 1
    ticket = ledger.ticket(db, id_of(1))
    assert ticket is not None
    assert (ticket.state, ticket.code) == ("failed", "deadline_exceeded")


def test_the_wall_clock_adds_the_time_off_only_where_it_is_right_then_and_now(
    ledger: OfflineLedger, db: sqlite3.Connection
) -> None:
    ledger.put(db, request(1, ttl_s=3600.0), BothClocks(1000.0, 1.8e9))
    ledger.put(db, request(2, ttl_s=3600.0), BothClocks(1000.0, None))

    week_off = BothClocks(1010.0, 1.8e9 + 7 * 86_400)
    assert [one.id for one in ledger.waiting(db, BothClocks(1010.0, None), 10)] == [id_of(1), id_of(2)]
    assert [one.id for one in ledger.waiting(db, week_off, 10)] == [id_of(2)]
    assert ledger.sweep(db, week_off) == 1


def test_powered_time_goes_on_from_life_to_life(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    ledger.sweep(db, BothClocks(1234.5))
    assert ledger.powered_s(db) == 1234.5


def test_five_refusals_make_a_dead_letter_and_the_next_of_its_key_goes_on(
    ledger: OfflineLedger, db: sqlite3.Connection
) -> None:
    ledger.put(db, request(1, key="k"), NOW)
    ledger.put(db, request(2, key="k"), NOW)
    for _ in range(MOST_REFUSALS - 1):
        assert ledger.refused(db, [ItemRefusal(id_of(1), "I do not like it")], NOW) == []
    assert waiting(ledger, db) == [id_of(1), id_of(2)]
    assert ledger.waiting(db, NOW, 10, {id_of(1)}) == []

    assert ledger.refused(db, [ItemRefusal(id_of(1), "I do not like it")], NOW) == [id_of(1)]

    assert waiting(ledger, db) == [id_of(2)]
    ticket = ledger.ticket(db, id_of(1))
    assert ticket is not None
    assert ticket.why == "no gateway takes it: I do not like it"


def test_a_dead_letter_that_is_tried_again_opens_its_ticket(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    ledger.put(db, request(1), NOW)
    ledger.refused(db, [ItemRefusal(id_of(1), "no", final=True)], NOW)
    assert waiting(ledger, db) == []

    assert ledger.retry(db) == 1

    ticket = ledger.ticket(db, id_of(1))
    assert ticket is not None
    assert ticket.state == "waiting"
    assert waiting(ledger, db) == [id_of(1)]


def test_tickets_are_told_for_a_day_and_no_longer(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    ledger.put(db, request(1), NOW)
    ledger.answered(db, [DeferredAnswer(id_of(1), b"yes")], NOW)

    ledger.sweep(db, BothClocks(NOW.powered_s + ANSWERS_KEPT_S - 1))
    assert ledger.ticket(db, id_of(1)) is not None
    ledger.sweep(db, BothClocks(NOW.powered_s + ANSWERS_KEPT_S + 1))
    assert ledger.ticket(db, id_of(1)) is None
    assert ledger.usage(db).bytes == 0


@pytest.mark.slow
def test_the_command_lists_shows_and_revives_dead_letters(tmp_path: Path, ledger: OfflineLedger) -> None:
    with closing(connect(tmp_path / "store.db", SCHEMA)) as db:
        ledger.put(db, request(1, model="kinds"), NOW)
        ledger.refused(db, [ItemRefusal(id_of(1), "no such model", final=True)], NOW)
    config = tmp_path / "edge.yaml"
    config.write_text(f"state_dir: {tmp_path}\n")

    def run(*words: str) -> str:
        done = CliRunner().invoke(edge, ["--config", str(config), "store", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "no such model" in run("list", "--json")
    assert '"state": "dead"' in run("show", id_of(1))
    assert run("retry", "--all") == "1 to be sent again\n"
    assert '"dead": 0' in run("list", "--json")
    assert CliRunner().invoke(edge, ["--config", str(config), "store", "drop", id_of(7)]).exit_code == 1


def invoke(folder: Path, *words: str) -> Result:
    settings = {"TIDEGATE_EDGE_STATE_DIR": str(folder), "TIDEGATE_EDGE_MQTT": "mqtt://broker"}
    return CliRunner(env=settings).invoke(edge, ["store", *words])


@pytest.mark.slow
def test_the_command_says_how_many_dead_letters_it_leaves_out_and_json_has_all(
    tmp_path: Path, db: sqlite3.Connection
) -> None:
    ledger = OfflineLedger(max_bytes=10**6, max_rows=1000)
    for number in range(103):
        ledger.put(db, result(number, 1), NOW)
    ledger.refused(db, [ItemRefusal(id_of(number), "no", final=True) for number in range(103)], NOW)

    listed = invoke(tmp_path, "list")
    assert listed.output.count(" result ") == 100
    assert "these are the oldest 100 of 103; --json names all" in " ".join(listed.output.split())
    told = json.loads(invoke(tmp_path, "list", "--json").output)
    assert (told["dead"], len(told["dead_letters"])) == (103, 103)


def test_a_disk_that_refuses_what_the_command_would_change_is_told_in_words(
    tmp_path: Path, db: sqlite3.Connection, ledger: OfflineLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.put(db, result(1), NOW)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "transact", full)
    refused = invoke(tmp_path, "drop", "--all")
    assert refused.exit_code == 1
    assert refused.output == f"Error: {tmp_path / 'store.db'}: database or disk is full\n"


class Stored(RuleBasedStateMachine):
    """Against a model in memory: bounds hold, promises are kept, order within a key holds, and sums are right."""

    def __init__(self) -> None:
        super().__init__()
        self.db = connect(Path(":memory:"), SCHEMA)
        self.ledger = OfflineLedger(max_bytes=6000, max_rows=14)
        self.number = 0
        self.now = 0.0
        self.promised: set[str] = set()  # not yet ended in a way that may be

    def teardown(self) -> None:
        self.db.close()

    @rule(
        size=st.integers(0, 2500), priority=st.integers(0, 9), key=st.sampled_from(["", "a", "b"]), held=st.booleans()
    )
    def put(self, size: int, priority: int, key: str, held: bool) -> None:
        self.number += 1
        kind = "request" if held else "result"
        item = StoredItem(id_of(self.number), kind, bytes(size), priority, 50.0, key, promised=held)  # type: ignore[arg-type]
        try:
            transact(self.db, lambda db: self.ledger.put(db, item, BothClocks(self.now)))
        except StoreFull:
            return
        if held:
            self.promised.add(item.id)

    @rule(data=st.data(), fate=st.sampled_from(["took", "refused", "final", "answered"]))
    def settle(self, data: st.DataObject, fate: str) -> None:
        found = [one.id for one in self.ledger.waiting(self.db, BothClocks(self.now), 50)]
        if not found:
            return
        id, now = data.draw(st.sampled_from(found)), BothClocks(self.now)
        if fate == "took":
            self.ledger.took(self.db, [id], "main", now)
            self.promised.discard(id)
        elif fate == "answered":
            self.ledger.answered(self.db, [DeferredAnswer(id, b"a" * 50)], now)
            ticket = self.ledger.ticket(self.db, id)
            if ticket is not None and ticket.state == "done":
                self.promised.discard(id)
        else:
            self.promised -= set(self.ledger.refused(self.db, [ItemRefusal(id, "no", final=fate == "final")], now))

    @precondition(lambda self: self.promised)
    @rule(forward=st.floats(0.0, 60.0))
    def sweep(self, forward: float) -> None:
        self.now += forward
        self.ledger.sweep(self.db, BothClocks(self.now))
        rows = self.db.execute("SELECT id FROM tickets WHERE state = 'failed'").fetchall()
        self.promised -= {row["id"] for row in rows}

    @invariant()
    def promises_are_kept(self) -> None:
        kept = {row["id"] for row in self.db.execute("SELECT id FROM entries WHERE state = 'waiting'")}
        assert self.promised <= kept

    @invariant()
    def bounds_and_sums_hold(self) -> None:
        usage = self.ledger.usage(self.db)
        rows = self.db.execute(
            "SELECT (SELECT COUNT(*) FROM entries) + (SELECT COUNT(*) FROM tickets) AS rows,"
            " (SELECT COALESCE(SUM(bytes), 0) FROM entries) + (SELECT COALESCE(SUM(bytes), 0) FROM tickets) AS bytes"
        ).fetchone()
        assert (usage.rows, usage.bytes) == (rows["rows"], rows["bytes"])
        (waiting,) = self.db.execute("SELECT COUNT(*) FROM entries WHERE state = 'waiting'").fetchone()
        assert usage.waiting == self.ledger.backlog(self.db) == waiting
        assert usage.bytes <= 6000
        assert usage.rows <= 14

    @invariant()
    def of_each_key_nothing_is_left_out_and_all_is_in_order(self) -> None:
        found = self.ledger.waiting(self.db, BothClocks(self.now), 50)
        for key in ("a", "b"):
            of_key = [one.id for one in found if one.key == key]
            rows = self.db.execute("SELECT id FROM entries WHERE state = 'waiting' AND key = ? ORDER BY seq", (key,))
            assert of_key == [row["id"] for row in rows][: len(of_key)]


TestStored = pytest.mark.slow(Stored.TestCase)
TestStored.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_row_costs_what_it_is_counted_for(ledger: OfflineLedger, db: sqlite3.Connection) -> None:
    ledger.put(db, request(1, 1000), NOW)
    assert ledger.usage(db).bytes == 1000 + 2 * ROW_BYTES
