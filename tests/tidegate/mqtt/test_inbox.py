"""The bounded inbox of messages."""

from __future__ import annotations

from tidegate.mqtt.inbox import Inbox


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
    assert repr(inbox) == "<Inbox 3/3, 0 bytes, 2 dropped, 0 replaced>"
    assert inbox.take(9) == [2, 3, 4]


def test_what_waits_is_bounded_in_bytes_as_well() -> None:
    inbox: Inbox[int] = Inbox(100, max_bytes=1000)
    for item in range(5):
        inbox.put(item, size_bytes=300)
    assert inbox.dropped == 2
    assert inbox.take(9) == [2, 3, 4]
    inbox.put(5, size_bytes=900)
    assert inbox.take(9) == [5] and inbox.dropped == 2


def test_a_topic_that_is_said_again_weighs_what_it_says_now() -> None:
    inbox: Inbox[str] = Inbox(100, max_bytes=1000)
    for size_bytes in (900, 100, 800):
        inbox.put("a", "hb/a", size_bytes)
    inbox.put("b", "hb/b", 200)
    assert inbox.take(9) == ["a", "b"] and inbox.dropped == 0


def test_one_that_is_larger_than_all_the_room_is_all_there_is() -> None:
    inbox: Inbox[str] = Inbox(100, max_bytes=1000)
    inbox.put("a", size_bytes=10)
    inbox.put("b", size_bytes=2000)
    assert inbox.take(9) == ["b"]
