"""The shares of devices: ids, room and turns, as rules, and in a journal that greedy devices fill."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.config.ingest import IngestConfig
from gateway.ingest.dedup import WINDOW_S
from gateway.ingest.device_shares import WaitingDevice, may_hold, next_device, who_forgets
from gateway.ingest.journal import ROW_BYTES, SCHEMA, DeferredJob, IngestJournal
from tidegate.fleet.stored import DeferredAnswer, Forwarded, Kind
from tidegate.storage.database import DatabaseFull, connect

NOW_S = 1.8e9
DEVICES = ("greedy", "a", "b", "c")


def sent(
    device: str, number: int, kind: Kind = "result", *, age_s: float = 0.0, size: int = 100, priority: int = 0
) -> Forwarded:
    return Forwarded(device, f"{number:032x}", kind, round(age_s * 1e3), bytes(size), model="m", priority=priority)


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(connect(Path(":memory:"), SCHEMA)) as one:
        yield one


@given(st.integers(1, 8), st.integers(1, 50), st.integers(2000, 10_000))
def test_greedy_devices_leave_a_newcomer_as_much_as_each_of_them_has(devices: int, size: int, room: int) -> None:
    held = dict.fromkeys(range(devices), 0)
    growing = True
    while growing:
        growing = False
        for one in held:
            if may_hold(held=held[one], size=size, free=room - sum(held.values())):
                held[one] += size
                growing = True

    newcomer = 0
    while may_hold(held=newcomer, size=size, free=room - sum(held.values()) - newcomer):
        newcomer += size
    assert newcomer + size >= (room - sum(held.values())) / 4
    assert max(held.values()) <= room / 4 + size


@pytest.mark.parametrize(
    ("held", "most", "forgets"),
    [(0, ("greedy", 9), "greedy"), (9, ("greedy", 9), "a"), (3, ("greedy", 4), "greedy"), (5, ("a", 5), "a")],
)
def test_who_holds_most_forgets(held: int, most: tuple[str, int], forgets: str) -> None:
    assert who_forgets("a", held, most) == forgets


def test_a_claim_counts_up_to_the_right_and_equals_take_turns() -> None:
    loud, meek = WaitingDevice("loud", 9, 7, 1), WaitingDevice("meek", 0, 3, 2)
    rights = IngestConfig(path=Path("x"), priorities={"lou?": 5, "*": 1}).right_of

    assert next_device([loud, meek], lambda _: 0) == meek
    assert next_device([loud, meek], rights) == loud
    assert (rights("loud"), rights("other"), IngestConfig(path=Path("x")).right_of("loud")) == (5, 1, 0)
    assert next_device([], rights) is None


@pytest.mark.slow
def test_a_device_that_fills_the_memory_of_ids_loses_its_own_past_and_no_others(db: sqlite3.Connection) -> None:
    journal = IngestJournal(max_bytes=10**7, max_seen=100)
    for number in range(20):
        journal.take(db, sent("a", number), NOW_S)
    for number in range(1000, 2000):
        journal.take(db, sent("greedy", number), NOW_S + number)
    now = NOW_S + 3000

    assert journal.take(db, sent("b", 1, age_s=86_400), now) is None, "older data of another device is taken"
    assert journal.take(db, sent("a", 3, age_s=4000), now) is None
    assert journal.usage(db)["counters"]["duplicates"] == 1, "and no id of another was forgotten"
    refusal = journal.take(db, sent("greedy", 5, age_s=86_400), now)
    assert refusal is not None and refusal.final


def test_a_file_of_an_earlier_build_is_counted_once(tmp_path: Path) -> None:
    earlier = [one for one in SCHEMA if "holdings" not in one and "promised" not in one and "oldest_of_one" not in one]
    with closing(connect(tmp_path / "ingest.db", earlier)) as db:
        for number in range(3):
            db.execute("INSERT INTO seen VALUES ('a', ?, ?)", (str(number), NOW_S))
        db.execute("INSERT INTO answers VALUES ('b', 'x', ?, '', '', x'', 500)", (NOW_S,))
    for _ in range(2):
        with closing(connect(tmp_path / "ingest.db", SCHEMA)) as db:
            held = {row["device"]: (row["seen"], row["promised"]) for row in db.execute("SELECT * FROM holdings")}
    assert held == {"a": (3, 0), "b": (0, 500)}


def test_every_device_has_its_turn_whatever_another_claims(db: sqlite3.Connection) -> None:
    journal = IngestJournal(max_bytes=10**7, max_seen=1000)
    for number in range(50):
        journal.take(db, sent("greedy", number, "request", priority=9), NOW_S)
    journal.take(db, sent("a", 100, "request"), NOW_S + 1)
    journal.take(db, sent("a", 101, "request", priority=5), NOW_S + 1)

    order = []
    for _ in range(4):
        (job,) = journal.jobs(db, NOW_S + 2, 1, frozenset())
        order.append((job.device, int(job.id, 16)))
        journal.answer(db, job, DeferredAnswer(job.id), "", b"", NOW_S + 2)
    assert order == [("greedy", 0), ("a", 101), ("greedy", 1), ("a", 100)]


@pytest.mark.slow
def test_a_full_journal_computes_nothing_that_it_could_not_store(db: sqlite3.Connection) -> None:
    journal = IngestJournal(max_bytes=2**20, max_seen=10_000, kept_for_answers=2**19)
    refused = 0
    for number in range(2000):
        try:
            journal.take(db, sent(f"d{number % 40}", number, "request", size=1000), NOW_S)
        except DatabaseFull:
            refused += 1
    assert refused > 0

    computed = 0
    while jobs := journal.jobs(db, NOW_S, 2, frozenset()):
        for job in jobs:
            computed += 1
            body = bytes(journal.answer_bytes - ROW_BYTES)
            journal.answer(db, job, DeferredAnswer(job.id, body), "fp32", body, NOW_S)  # raises nothing
    usage = journal.usage(db)
    assert computed == usage["counters"]["answered"] > 0 and usage["bytes"] <= journal.max_bytes
    assert usage["deferred"] > 0, "the rest waits for room, and is not begun"

    journal.sweep(db, NOW_S + WINDOW_S / 6)  # after a day they fail: that needs no more room than they have
    assert journal.usage(db)["counters"]["failed"] == usage["deferred"]
    journal.sweep(db, NOW_S + WINDOW_S + 1)
    journal.sweep(db, NOW_S + WINDOW_S * 2)
    assert journal.take(db, sent("d1", 5000, "request", size=1000), NOW_S + WINDOW_S * 2) is None


def test_the_time_in_which_a_gateway_was_off_counts_up_to_an_hour(db: sqlite3.Connection) -> None:
    journal = IngestJournal(max_bytes=10**6, max_seen=10)
    assert journal.resume(db, NOW_S) == NOW_S
    journal.keep_time(db, NOW_S + 5, NOW_S + 1000)

    assert journal.resume(db, NOW_S + 1010) == NOW_S + 15
    assert journal.resume(db, NOW_S + 90_000) == NOW_S + 5 + 3600
    assert journal.resume(db, NOW_S - 90_000) == NOW_S + 5
    journal.take(db, sent("a", 1), NOW_S + 200)  # after the last sweep, and then a crash
    assert journal.resume(db, NOW_S + 1000) == NOW_S + 200


class SharedJournal(RuleBasedStateMachine):
    """Devices send, a worker computes, time passes: bounds hold, and what a modest device was given stays."""

    def __init__(self) -> None:
        super().__init__()
        self.db = connect(Path(":memory:"), SCHEMA)
        self.journal = IngestJournal(max_bytes=60_000, max_seen=24, kept_for_answers=30_000)
        self.now = NOW_S
        self.ids: dict[str, set[int]] = {device: set() for device in DEVICES}
        self.given: dict[int, DeferredJob] = {}

    def teardown(self) -> None:
        self.db.close()

    @rule(
        device=st.sampled_from(DEVICES),
        number=st.integers(0, 40),
        kind=st.sampled_from(["request", "result"]),
        size=st.integers(0, 3000),
        priority=st.integers(0, 9),
    )
    def send(self, device: str, number: int, kind: Kind, size: int, priority: int) -> None:
        if device != "greedy":
            number %= 6  # within its share of the ids
        before = self.journal.usage(self.db)["counters"]
        self.db.execute("SAVEPOINT one")
        try:
            refusal = self.journal.take(self.db, sent(device, number, kind, size=size, priority=priority), self.now)
        except DatabaseFull:
            self.db.execute("ROLLBACK TO one")
            return
        finally:
            self.db.execute("RELEASE one")
        after = self.journal.usage(self.db)["counters"]
        assert device == "greedy" or refusal is None, "no modest device pays for another"
        if device != "greedy":
            again = after.get("duplicates", 0) > before.get("duplicates", 0)
            assert again is (number in self.ids[device]), "each item is taken once"
        if refusal is None:
            self.ids[device].add(number)

    @rule(limit=st.integers(1, 3))
    def give(self, limit: int) -> None:
        for job in self.journal.jobs(self.db, self.now, limit, frozenset(self.given)):
            assert job.seq not in self.given
            self.given[job.seq] = job

    @precondition(lambda self: self.given)
    @rule(share=st.floats(0, 1), whole=st.integers(0, 20_000))
    def answer(self, share: float, whole: int) -> None:
        _, job = self.given.popitem()
        body = bytes(int((self.journal.answer_bytes - ROW_BYTES) * share))
        self.journal.answer(self.db, job, DeferredAnswer(job.id, body), "", bytes(whole), self.now)
        answers, _ = self.journal.asked(self.db, job.device, (job.id,))
        assert [len(one.body) for one in answers] == [len(body)], "what was computed is stored"

    @precondition(lambda self: self.given)
    @rule(for_s=st.floats(0, 100))
    def postpone(self, for_s: float) -> None:
        _, job = self.given.popitem()
        self.journal.postpone(self.db, job, self.now + for_s)

    @rule(for_s=st.floats(0, 60))
    def pass_time(self, for_s: float) -> None:
        self.now += for_s

    @invariant()
    def bounds_hold_and_the_counts_are_right(self) -> None:
        usage = self.journal.usage(self.db)
        assert usage["bytes"] <= self.journal.max_bytes and usage["remembered"] <= self.journal.max_seen
        promised: Counter[str] = Counter()
        for table in ("jobs", "answers"):
            for row in self.db.execute(f"SELECT device, bytes FROM {table}"):
                promised[row["device"]] += row["bytes"]
        held = {row["device"]: row["promised"] for row in self.db.execute("SELECT * FROM holdings")}
        assert {name: size for name, size in held.items() if size} == dict(promised)
        (total,) = self.db.execute("SELECT value FROM meta WHERE name = 'promised'").fetchone()
        assert total == promised.total()


TestSharedJournal = pytest.mark.slow(SharedJournal.TestCase)
TestSharedJournal.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
