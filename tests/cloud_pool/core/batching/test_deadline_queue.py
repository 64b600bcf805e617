"""The deadline queue stays ordered, counted and summed under any sequence of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloud_pool.core.batching.deadline_queue import CHUNK, SLACK, DeadlineQueue, QueueEntry
from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.queue_item import QueueItem


def entry(
    id: int, key: float = 0.0, *, at: float = 0.0, alone_s: float = 0.01, infeasible_at: float = 9.0
) -> QueueEntry:
    return QueueEntry(QueueItem(id, at, key, WorkShape(1, 1, 1.0)), key, alone_s, infeasible_at)


def ids(line: DeadlineQueue) -> list[int]:
    return [one.item.id for one in line]


def test_an_empty_line_has_no_first_and_nothing_to_lose() -> None:
    subject = DeadlineQueue()
    assert subject.first is None
    assert subject.next_infeasible_at is None
    assert subject.before(1.0) == (0, 0.0)
    assert subject.take(1) is None
    assert subject.take_infeasible(99.0) == []


def test_equal_keys_stand_by_arrival_then_by_number() -> None:
    subject = DeadlineQueue()
    for one in (entry(3, at=1.0), entry(2, at=2.0), entry(1, at=2.0), entry(4, key=-1.0, at=5.0)):
        subject.add(one)
    assert ids(subject) == [4, 3, 1, 2]


def test_what_left_is_lost_no_more() -> None:
    subject = DeadlineQueue()
    subject.add(entry(1, infeasible_at=1.0))
    subject.add(entry(2, infeasible_at=2.0))
    subject.take(1)
    assert subject.next_infeasible_at == 2.0
    assert [one.item.id for one in subject.take_infeasible(2.0)] == [2]
    assert subject.next_infeasible_at is None


def test_who_comes_back_with_more_time_is_not_lost_at_its_former_one() -> None:
    subject = DeadlineQueue()
    subject.add(entry(1, infeasible_at=1.0))
    subject.take(1)
    subject.add(entry(1, infeasible_at=3.0))
    assert subject.next_infeasible_at == 3.0
    assert subject.take_infeasible(2.0) == []
    assert [one.item.id for one in subject.take_infeasible(3.0)] == [1]


def test_callers_who_come_and_leave_leave_nothing_behind() -> None:
    subject = DeadlineQueue()
    subject.add(entry(0, infeasible_at=0.5))
    for id in range(1, 1_000):
        subject.add(entry(id))
        subject.take(id)
    assert subject.heap_size <= 2 * len(subject) + SLACK + 1
    assert repr(subject) == "<DeadlineQueue 1 in 1 chunks, 10 ms>"


def test_a_long_line_is_cut_into_chunks_and_stays_in_order() -> None:
    subject = DeadlineQueue()
    for id in range(5 * CHUNK):
        subject.add(entry(id, key=float(id * 7919 % 1_009)))
    keys = [one.key for one in subject]
    assert keys == sorted(keys)
    assert subject.before(500.0) == (
        sum(key < 500.0 for key in keys), pytest.approx(0.01 * sum(key < 500.0 for key in keys))
    )  # fmt: skip


class AnyLine(RuleBasedStateMachine):
    """Against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.line = DeadlineQueue()
        self.inside: dict[int, QueueEntry] = {}
        self.numbers = 0

    @rule(
        many=st.integers(1, 2 * CHUNK),
        key=st.floats(0.0, 10.0),
        step=st.floats(-0.1, 0.1),
        alone_s=st.floats(0.001, 1.0),
        infeasible_at=st.floats(0.0, 10.0),
    )
    def arrive(self, many: int, key: float, step: float, alone_s: float, infeasible_at: float) -> None:
        for index in range(many):
            self.numbers += 1
            one = entry(self.numbers, key + index * step, alone_s=alone_s, infeasible_at=infeasible_at + step)
            self.line.add(one)
            self.inside[self.numbers] = one

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 10_000), every=st.integers(1, 5))
    def leave(self, which: int, every: int) -> None:
        for id in list(self.inside)[which % len(self.inside) :: every]:
            assert self.line.take(id) is self.inside.pop(id)

    @rule(now=st.floats(0.0, 10.0))
    def lose(self, now: float) -> None:
        lost = self.line.take_infeasible(now)
        assert {one.item.id for one in lost} == {id for id, one in self.inside.items() if one.infeasible_at <= now}
        for one in lost:
            del self.inside[one.item.id]

    @invariant()
    def it_is_the_same_as_a_sorted_list(self) -> None:
        ordered = sorted(self.inside.values(), key=lambda one: one.place)
        assert list(self.line) == ordered
        assert self.line.first == (ordered[0] if ordered else None)
        assert len(self.line) == len(ordered)
        assert self.line.next_infeasible_at == min((one.infeasible_at for one in ordered), default=None)
        assert self.line.total_s == pytest.approx(sum(one.alone_s for one in ordered), abs=1e-9)
        for key in (0.0, 5.0, 10.0):
            before = [one for one in ordered if one.key < key]
            assert self.line.before(key) == (len(before), pytest.approx(sum(one.alone_s for one in before), abs=1e-9))


AnyLine.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
TestAnyLine = pytest.mark.slow(AnyLine.TestCase)
