"""The queue looks at each resource once however often it is reported, and at a failing one ever later."""

from __future__ import annotations

from math import inf

from tidegate.tools.operator.work_queue import WorkQueue


def test_what_is_reported_often_is_looked_at_once() -> None:
    queue: WorkQueue[str] = WorkQueue(lambda: 0.5)
    queue.add("a", 1.0)
    queue.add("a", 3.0)
    queue.add("b", 2.0)

    assert queue.take(0.5) is None
    assert [queue.take(5.0), queue.take(5.0), queue.take(5.0)] == ["a", "b", None]
    assert queue.next_at() == inf


def test_what_fails_waits_longer_each_time_and_not_without_end() -> None:
    queue: WorkQueue[str] = WorkQueue(lambda: 1.0, base_s=0.2, cap_s=30)
    waits = []
    for _ in range(12):
        waits.append(queue.failed("a", 0.0))
        queue.take(100.0)

    assert waits[:3] == [0.2, 0.4, 0.8]
    assert waits[-1] == 30
    queue.succeeded("a")
    assert queue.failed("a", 0.0) == 0.2


def test_a_change_of_what_fails_is_looked_at_at_once() -> None:
    queue: WorkQueue[str] = WorkQueue(lambda: 1.0)
    queue.failed("a", 10.0)
    queue.add("a", 10.0)

    assert queue.take(10.0) == "a"


def test_what_is_gone_is_not_looked_at() -> None:
    queue: WorkQueue[str] = WorkQueue(lambda: 1.0)
    queue.failed("a", 0.0)
    queue.forget("a")

    assert queue.take(inf) is None
