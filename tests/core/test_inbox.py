"""The bounded store of what has arrived."""

from __future__ import annotations

from tidegate.fleet.inbox import Inbox


def test_items_come_out_in_the_order_they_came_in() -> None:
    inbox: Inbox[str] = Inbox(4)
    for item in "abc":
        inbox.put(item)
    assert inbox.take(2) == ["a", "b"]
    assert inbox.take(9) == ["c"]
    assert inbox.take(9) == []


def test_a_flood_of_one_topic_takes_one_place_and_keeps_the_newest() -> None:
    inbox: Inbox[int] = Inbox(8)
    inbox.put(-1, "hb/b")
    for item in range(5000):
        inbox.put(item, "hb/a")
    assert len(inbox) == 2
    assert inbox.take(9) == [-1, 4999]
    assert (inbox.replaced, inbox.dropped) == (4999, 0)


def test_when_full_the_oldest_goes_and_is_counted() -> None:
    inbox: Inbox[int] = Inbox(3)
    for item in range(5):
        inbox.put(item)
    assert repr(inbox) == "<Inbox 3/3, 2 dropped, 0 replaced>"
    assert inbox.take(9) == [2, 3, 4]
