"""The ingest journal: each item once, within bounds, and no older than the memory of ids reaches."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ingest.dedup import MARGIN_S, WINDOW_S, classify_duplicate, dedup_horizon_s
from gateway.ingest.journal import JOB_S, SCHEMA, IngestJournal
from gateway.ingest.shared_items import SharedItem
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.stored import (
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    DeferredAnswer,
    Forwarded,
    ItemRefusal,
    Kind,
    Receipt,
    decode_receipt,
    decode_stored,
    encode_stored,
)
from tidegate.storage.database import DatabaseFull, connect

NOW_S = 1.8e9


def thing(number: int, *, age_s: float = 10.0, size: int = 100, kind: Kind = "result", device: str = "a") -> Forwarded:
    return Forwarded(device, f"{number:032x}", kind, round(age_s * 1e3), bytes(size), model="kinds")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(connect(tmp_path / "ingest.db", SCHEMA)) as one:
        yield one


@pytest.fixture
def journal() -> IngestJournal:
    return IngestJournal(max_bytes=20_000, max_seen=10)


def taken(db: sqlite3.Connection, journal: IngestJournal) -> list[str]:
    return [row["id"] for row in journal.records(db, 0, 1000)]


@pytest.mark.parametrize(
    ("known", "age_s", "reach", "verdict"),
    [
        (True, 1e9, 0.0, "duplicate"),
        (False, 5.0, 10.0 + MARGIN_S, "new"),
        (False, 10.0, 10.0 + MARGIN_S, "too-old"),
    ],
)
def test_unknown_means_new_only_within_reach(known: bool, age_s: float, reach: float, verdict: str) -> None:
    assert classify_duplicate(known=known, age_s=age_s, reach_s=reach) == verdict


def test_the_memory_reaches_back_seven_days_or_to_what_was_forgotten_last() -> None:
    assert dedup_horizon_s(NOW_S, None) == WINDOW_S
    assert dedup_horizon_s(NOW_S, NOW_S - 100) == 100
    assert dedup_horizon_s(NOW_S, NOW_S - 30 * 86_400) == WINDOW_S
    assert dedup_horizon_s(NOW_S, NOW_S + 5) == 0.0  # the clock was set back: nothing unknown is new


def test_the_second_time_is_acknowledged_and_changes_nothing(db: sqlite3.Connection, journal: IngestJournal) -> None:
    assert journal.take(db, thing(1), NOW_S) is None
    assert journal.take(db, thing(1), NOW_S + 5) is None
    assert journal.take(db, thing(1, device="b"), NOW_S) is None  # another's

    assert len(taken(db, journal)) == 2
    assert journal.usage(db)["counters"] == {"duplicates": 1, "taken_result": 2}


def test_an_item_older_than_the_memory_is_refused_for_good(db: sqlite3.Connection, journal: IngestJournal) -> None:
    refusal = journal.take(db, thing(1, age_s=WINDOW_S + 1), NOW_S)

    assert refusal is not None
    assert refusal.final
    assert "604801 s old" in refusal.why
    assert taken(db, journal) == []


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 3600), st.floats(0, 600)), max_size=80))
def test_however_small_the_memory_nothing_is_taken_twice(sendings: list[tuple[int, float, float]]) -> None:
    """Things are born, and sent again and again at growing ages; each is taken at most once."""
    journal, now, born = IngestJournal(max_bytes=10**6, max_seen=5), NOW_S, dict[int, float]()
    with closing(connect(Path(":memory:"), SCHEMA)) as db:
        for number, age_s, gap_s in sendings:
            now += gap_s
            born.setdefault(number, now - age_s)
            journal.take(db, thing(number, age_s=now - born[number]), now)
        ids = taken(db, journal)
    assert len(ids) == len(set(ids))


def test_records_give_way_to_new_ones_and_promises_to_nothing(db: sqlite3.Connection, journal: IngestJournal) -> None:
    journal = IngestJournal(max_bytes=20_000, max_seen=1000)
    for number in range(5):
        journal.take(db, thing(number, size=3000), NOW_S)
    for number in range(10, 16):
        journal.take(db, thing(number, size=3000, kind="request", device=f"d{number}"), NOW_S)

    assert taken(db, journal) == []
    with pytest.raises(DatabaseFull, match="deferred requests and their answers"):
        journal.take(db, thing(20, size=3000), NOW_S)


def test_one_device_cannot_keep_the_others_out(db: sqlite3.Connection, journal: IngestJournal) -> None:
    journal.take(db, thing(1, size=3000, kind="request"), NOW_S)

    with pytest.raises(DatabaseFull, match="deferred requests of a alone"):
        journal.take(db, thing(2, size=3000, kind="request"), NOW_S)
    assert journal.take(db, thing(2, size=3000, kind="request", device="b"), NOW_S) is None


def test_a_deferred_request_is_work_until_it_is_answered_and_then_a_record(
    db: sqlite3.Connection, journal: IngestJournal
) -> None:
    journal.take(db, thing(1, kind="request"), NOW_S)
    (job,) = journal.jobs(db, NOW_S, 5, frozenset())
    assert journal.jobs(db, NOW_S, 5, frozenset({job.seq})) == []
    assert journal.asked(db, "a", (job.id,)) == ([], [])

    journal.postpone(db, job, NOW_S + 8)
    assert journal.jobs(db, NOW_S + 7, 5, frozenset()) == []
    assert journal.next_due_s(db) == NOW_S + 8
    for _ in range(2):  # computed twice, since a disk was slow to say so
        journal.answer(db, job, DeferredAnswer(job.id, b"yes"), "fp32", b"yes", NOW_S + 9)

    assert journal.asked(db, "a", (job.id, f"{7:032x}")) == ([DeferredAnswer(job.id, b"yes")], [f"{7:032x}"])
    assert journal.asked(db, "b", (job.id,)) == ([], [job.id])  # another device's ticket
    (record,) = journal.records(db, 0, 10)
    assert (record["kind"], record["variant"], record["happened_s"]) == ("answer", "fp32", NOW_S - 10)


def test_a_job_without_an_answer_fails_after_a_day_and_all_is_forgotten_after_seven(
    db: sqlite3.Connection, journal: IngestJournal
) -> None:
    journal.take(db, thing(1, kind="request"), NOW_S)

    journal.sweep(db, NOW_S + JOB_S + 1)
    (answers, unknown) = journal.asked(db, "a", (thing(1).id,))
    assert [one.code for one in answers] == ["nothing_alive"]
    assert unknown == []

    journal.sweep(db, NOW_S + JOB_S + WINDOW_S + 2)
    assert journal.asked(db, "a", (thing(1).id,)) == ([], [thing(1).id])
    assert journal.usage(db)["remembered"] == 0


def test_a_sweep_says_whether_it_left_something_for_the_next(db: sqlite3.Connection) -> None:
    busy = IngestJournal(max_bytes=2**24, max_seen=10_000)
    for number in range(2500):
        assert busy.take(db, thing(number), NOW_S) is None
    after_s = NOW_S + WINDOW_S + 1
    assert [busy.sweep(db, after_s) for _ in range(3)] == [True, True, False]
    assert busy.usage(db)["remembered"] == 0


@pytest.mark.parametrize("kind", ["request", "result"])
def test_an_item_that_another_gateway_went_on_with_can_come_back(
    db: sqlite3.Connection, journal: IngestJournal, kind: Kind
) -> None:
    one = thing(1, kind=kind)
    assert journal.take(db, one, NOW_S) is None
    journal.drop(db, one.device, one.id)
    assert journal.take(db, one, NOW_S + 1) is None, "for its device it stays a duplicate"
    assert not journal.is_unfinished(db, one.device, one.id)
    assert journal.given_over(db, [(one.device, one.id)]) == journal.known(db, [(one.device, one.id)])

    for _ in range(2):  # once, however often
        assert journal.adopt(db, SharedItem(one, NOW_S), NOW_S + 20, NOW_S + 20) is None
        assert journal.is_unfinished(db, one.device, one.id)
        assert journal.given_over(db, [(one.device, one.id)]) == set()
        assert len(taken(db, journal)) + len(journal.jobs(db, NOW_S + 20, 5, frozenset())) == 1

    journal.drop(db, one.device, one.id)
    journal.sweep(db, NOW_S + WINDOW_S + 100)
    assert journal.given_over(db, [(one.device, one.id)]) == set(), "it is forgotten with its id"


def test_the_largest_item_fits_the_message_limit_of_mosquitto() -> None:
    largest = Forwarded(
        device="d" * 64,
        id="f" * 64,
        kind="request",
        age_ms=2**53 - 1,
        body=bytes(MAX_BODY_BYTES),
        key="k" * 128,
        priority=9,
        model="m" * 128,
        version="v" * 128,
        variant="w" * 128,
        attempt=2**31,
    )

    encoded = encode_stored(largest)

    assert len(encoded) < MAX_MESSAGE_BYTES - 256  # the topic and MQTT's own
    assert decode_stored(encoded) == largest


def test_a_receipt_crosses_as_it_is() -> None:
    receipt = Receipt(
        "main", ("ab" * 8,), (ItemRefusal("cd" * 8, "no", final=True),), (DeferredAnswer("ef" * 8, b"\x00"),), busy_s=2
    )
    assert decode_receipt(encode_stored(receipt)) == receipt


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_whatever_comes_is_a_message_or_bad_and_nothing_else(payload: bytes) -> None:
    for decode in (decode_stored, decode_receipt):
        try:
            decode(payload)
        except BadMessage:
            continue


@pytest.mark.parametrize(
    "payload",
    [
        b'{"t":"item","dev":"a/b","id":"0123456789abcdef","kind":"result","age":1,"body":""}',
        b'{"t":"item","dev":"a","id":"no hex","kind":"result","age":1,"body":""}',
        b'{"t":"item","dev":"a","id":"0123456789abcdef","kind":"other","age":1,"body":""}',
        b'{"t":"item","dev":"a","id":"0123456789abcdef","kind":"result","age":-1,"body":""}',
        b'{"t":"other","dev":"a"}',
        b'{"t":"item","dev":"a","id":"0123456789abcdef","kind":"result","age":1,"body":"' + b"A" * 70_000 + b'"}',
    ],
)
def test_what_does_not_fit_is_bad(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_stored(payload)
