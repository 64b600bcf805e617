"""The drain pacer sends trains with pauses, on any link, in order within a key."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.drain import MAX_WINDOW, MIN_WINDOW, RECEIPT_S, DrainPacer


@dataclass(frozen=True)
class Entry:
    id: str
    key: str = ""
    size_bytes: int = 1000
    attempts: int = 0


def entries(number: int, size: int = 1000, key: str = "") -> list[Entry]:
    return [Entry(f"{index:04}", key, size) for index in range(number)]


def send_train(drain: DrainPacer, waiting: list[Entry], now: float, *, live: bool = False) -> list[Entry]:
    budget = drain.budget(now, live=live)
    if budget is None:
        return []
    train = drain.choose(waiting, budget, now)
    for entry in train:
        drain.sent(entry, now)
    return train


def drained(waiting: list[Entry], bytes_s: float, *, live: bool = False, share: float = 0.5) -> tuple[float, float]:
    """(when all were taken, how long the link was busy) over a link of that rate."""
    drain, now, busy_s = DrainPacer(share=share), 0.0, 0.0
    drain.begin(now)
    while waiting:
        train = send_train(drain, waiting, now, live=live)
        if not train:
            wake = drain.next_wake(now)
            assert wake is not None
            assert wake > now
            now = wake
            continue
        took_s = sum(one.size_bytes for one in train) / bytes_s
        now, busy_s = now + took_s, busy_s + took_s
        waiting = [one for one in waiting if one not in train]
        drain.settled([one.id for one in train], now, live=live)
    return now, busy_s


def test_it_begins_with_the_session_and_not_with_a_timer() -> None:
    drain = DrainPacer()
    assert drain.budget(0.0, live=False) is None

    drain.begin(5.0)

    assert len(send_train(drain, entries(100), 5.0)) == MIN_WINDOW


@pytest.mark.slow
@given(st.floats(2e3, 1e7), st.integers(20, 300), st.integers(300, 40_000))
def test_at_most_half_of_any_link_is_used_between_the_first_train_and_the_last(
    bytes_s: float, number: int, size: int
) -> None:
    ended_at, busy_s = drained(entries(number, size), bytes_s)
    last_train_s = max(MAX_WINDOW * size, size) / bytes_s

    assert busy_s <= 0.5 * ended_at + last_train_s


@pytest.mark.slow
def test_while_live_requests_are_answered_it_takes_a_tenth() -> None:
    ended_at, busy_s = drained(entries(2000), 50_000.0, live=True)
    assert busy_s / ended_at < 0.12

    ended_at, busy_s = drained(entries(2000), 50_000.0)
    assert 0.4 < busy_s / ended_at < 0.52


def test_a_train_on_a_slow_link_is_short_enough_to_let_a_live_message_through() -> None:
    drain, now = DrainPacer(), 0.0
    drain.begin(now)
    waiting = entries(500, 2000)
    for _ in range(12):
        train = send_train(drain, waiting, now)
        took_s = sum(one.size_bytes for one in train) / 8_000.0
        waiting = waiting[len(train) :]
        drain.settled([one.id for one in train], now + took_s, live=False)
        now = drain.next_wake(now + took_s) or now
    assert took_s <= 1.0  # 32 KiB at first, 4 seconds; then half a second's worth


def test_the_window_grows_to_its_bound_on_a_quick_link() -> None:
    drain, now = DrainPacer(), 0.0
    drain.begin(now)
    sizes = []
    for _ in range(20):
        train = send_train(drain, entries(500, 100), now)
        sizes.append(len(train))
        drain.settled([one.id for one in train], now + 0.005, live=False)
        now = drain.next_wake(now + 0.005) or now
    assert sizes[0] == MIN_WINDOW
    assert sizes == sorted(sizes)
    assert sizes[-1] == MAX_WINDOW


def test_behind_a_refused_entry_only_its_key_waits() -> None:
    drain = DrainPacer()
    drain.begin(0.0)
    waiting = [*entries(3, key="a"), Entry("b1", "b"), Entry("free")]
    assert [one.id for one in send_train(drain, waiting, 0.0)] == ["0000", "0001", "0002", "b1", "free"]
    drain.refused("0000", 0.1)
    drain.settled([one.id for one in waiting], 0.1, live=False)

    assert [one.id for one in send_train(drain, waiting, 1.0)] == ["b1", "free"]


def test_without_a_receipt_it_is_sent_again_and_with_care() -> None:
    drain = DrainPacer()
    drain.begin(0.0)
    first = send_train(drain, entries(8), 0.0)
    assert drain.next_wake(0.0) == RECEIPT_S
    assert drain.budget(RECEIPT_S - 0.1, live=False) is None

    assert drain.budget(RECEIPT_S, live=False) is None  # now a pause
    wake = drain.next_wake(RECEIPT_S)
    assert wake is not None
    assert send_train(drain, entries(8), wake) == first


def test_a_refused_entry_waits_longer_each_time_and_holds_no_other_key_up() -> None:
    drain = DrainPacer()
    drain.begin(0.0)
    bad, good = Entry("bad", attempts=3), Entry("good")
    send_train(drain, [bad, good], 0.0)
    drain.refused("bad", 0.1)
    drain.settled(["bad", "good"], 0.1, live=False)

    assert drain.held_back(1.0) == {"bad"}
    assert send_train(drain, [bad], 1.0) == []
    assert drain.next_wake(1.0) == 0.1 + 2.0 * 2**3
    assert send_train(drain, [bad], 20.0) == [bad]


def test_a_busy_gateway_is_left_alone_and_loses_nothing() -> None:
    drain = DrainPacer()
    drain.begin(0.0)
    train = send_train(drain, entries(8), 0.0)
    drain.busy(15.0, 0.2)

    assert drain.budget(15.1, live=False) is None
    assert send_train(drain, entries(8), 15.3) == train


@pytest.mark.slow
@given(st.data())
def test_whatever_receipts_do_everything_is_taken_in_order_within_its_key(data: st.DataObject) -> None:
    ids = count()
    waiting = [
        Entry(f"{next(ids):03}", data.draw(st.sampled_from(["", "a", "b"])), data.draw(st.integers(100, 5000)))
        for _ in range(data.draw(st.integers(1, 40)))
    ]
    order = {one.id: number for number, one in enumerate(waiting)}
    keys = {one.id: one.key for one in waiting}
    drain, now, taken = DrainPacer(), 0.0, list[str]()
    drain.begin(now)
    for _ in range(600):
        if not waiting:
            break
        train = send_train(drain, waiting, now)
        now += 0.05
        if train:
            fate = data.draw(st.sampled_from(["taken", "taken", "lost", "session", "some"]))
            if fate == "session":
                drain.end()
                drain.begin(now)
            elif fate != "lost":
                arrived = [one.id for one in train][: len(train) if fate == "taken" else 1]
                taken += arrived
                waiting = [one for one in waiting if one.id not in arrived]
                drain.settled(arrived, now, live=False)
        now = max(now, drain.next_wake(now) or now)
    assert not waiting
    for key in ("a", "b"):
        of_key = [order[id] for id in taken if keys[id] == key]
        assert of_key == sorted(of_key)


def test_a_refusal_of_something_that_is_not_under_way_changes_nothing_and_it_says_how_it_is() -> None:
    drain = DrainPacer()
    drain.refused("unknown", 0.0)
    assert drain.held_back(0.0) == frozenset()
    assert "no session" in repr(drain)
    assert drain.next_wake(0.0) is None

    drain.begin(0.0)
    send_train(drain, entries(3), 0.0)
    assert drain.under_way == {"0000", "0001", "0002"}
    assert repr(drain) == "<DrainPacer 3 under way, window 8, 32768 bytes a train, 0 trains>"
