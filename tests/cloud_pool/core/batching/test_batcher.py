"""The batcher queues, releases, expires and refuses requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cloud_pool.core.batching.batcher import EARLY_DROP_RATIO, Batcher
from cloud_pool.core.batching.closing_policies import ROOM_RATIO
from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.queue_item import QueueItem
from tests.support.gateway.formula import Formula
from tidegate.models.manifest import BatchingPolicy
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.priority import DEFAULT_LEVEL, LAST_LEVEL, LEVEL_S, level_of, order_key

NOW = 100.0


def affine_s(units: float) -> float:
    return 0.008 + 0.00025 * units


def batcher(service_s: Callable[[float], float] = affine_s, **overrides: Any) -> Batcher:
    return Batcher(Formula(service_s), **{"max_rows": 8, **overrides})


def queued(
    id: int, *, at: float = NOW, due_in_s: float = 2.0, length: int = 16, rows: int = 1, **more: Any
) -> QueueItem:
    return QueueItem(id, at, at + due_in_s, WorkShape(rows, length, float(rows * length)), **more)


def ids(items: list[QueueItem]) -> list[int]:
    return [item.id for item in items]


def test_the_earliest_deadline_leads_the_batch() -> None:
    subject = batcher(max_rows=1)
    subject.add([queued(1, due_in_s=3.0)], NOW)
    subject.add([queued(2, due_in_s=1.0)], NOW)
    subject.add([queued(3, due_in_s=2.0)], NOW)
    assert [ids(subject.release(NOW)) for _ in range(3)] == [[2], [3], [1]]


def test_equal_deadlines_are_first_come_first_served() -> None:
    subject = batcher(max_rows=1)
    for id, at in ((3, NOW), (1, NOW + 0.1), (2, NOW + 0.2)):
        subject.add([QueueItem(id, at, NOW + 5.0, WorkShape(1, 4, 4.0))], at)
    assert [ids(subject.release(NOW + 0.2)) for _ in range(3)] == [[3], [1], [2]]


def test_a_higher_priority_overtakes_what_waits() -> None:
    subject = batcher(max_rows=1)
    subject.add([queued(1)], NOW)
    subject.add([queued(2, at=NOW + 0.5, priority=1)], NOW + 0.5)
    assert ids(subject.release(NOW + 0.5)) == [2]


def test_priority_does_not_starve_those_below() -> None:
    levels_s = LEVEL_S * (LAST_LEVEL - 1)
    assert order_key(NOW, LAST_LEVEL) < order_key(NOW + levels_s + 1.0, 1)


@pytest.mark.parametrize(
    ("priority", "level"),
    [(0, DEFAULT_LEVEL), (1, 1), (2, 2), (99, DEFAULT_LEVEL), (LAST_LEVEL, LAST_LEVEL), (-5, DEFAULT_LEVEL)],
)
def test_the_numbers_of_priority(priority: int, level: int) -> None:
    assert level_of(priority) == level


def test_an_idle_worker_gets_what_there_is_at_once() -> None:
    subject = batcher()
    subject.add([queued(1)], NOW)
    assert ids(subject.release(NOW)) == [1]


def test_an_empty_queue_releases_nothing_and_needs_no_waking() -> None:
    subject = batcher()
    assert subject.release(NOW) == []
    assert subject.next_wake(NOW) is None
    assert subject.head_key == float("inf")


def test_like_lengths_share_a_batch_and_the_others_wait() -> None:
    subject = batcher()
    for id, length in ((1, 12), (2, 250), (3, 14), (4, 13)):
        subject.add([queued(id, length=length)], NOW)
    assert sorted(ids(subject.release(NOW))) == [1, 3, 4]  # worth more for their time, and all have time
    assert ids(subject.release(NOW)) == [2]


def test_the_rows_of_a_batch_are_counted_and_not_its_requests() -> None:
    subject = batcher(max_rows=8)
    for id in (1, 2, 3):
        subject.add([queued(id, rows=4)], NOW)
    assert len(subject.release(NOW)) == 2


def test_different_kinds_never_share_a_batch() -> None:
    subject = batcher()
    subject.add([queued(1, kind="float")], NOW)
    subject.add([queued(2, kind="half")], NOW)
    subject.add([queued(3, kind="float")], NOW)
    assert ids(subject.release(NOW)) == [1, 3]


def test_the_groups_of_a_failed_batch_keep_to_themselves() -> None:
    subject = batcher()
    subject.add([queued(1, cohort=7), queued(2, cohort=8), queued(3, cohort=7)], NOW, readmit=True)
    subject.add([queued(4)], NOW)
    subject.add([queued(5)], NOW)
    assert ids(subject.release(NOW)) == [1, 3]
    assert ids(subject.release(NOW)) == [2]
    assert ids(subject.release(NOW)) == [4, 5]


def test_company_is_kept_small_enough_for_the_head_to_be_in_time() -> None:
    subject = batcher()
    subject.add([queued(1, due_in_s=affine_s(48) / ROOM_RATIO + 1e-6)], NOW)
    for id in (2, 3, 4, 5):
        subject.add([queued(id)], NOW)
    assert [len(subject.release(NOW)) for _ in range(2)] == [3, 2]


def test_a_head_that_is_late_by_prediction_still_has_batch_mates() -> None:
    subject = batcher()
    subject.add([queued(1, due_in_s=0.8 * affine_s(16))], NOW)
    subject.add([queued(2)], NOW)
    assert len(subject.release(NOW)) == 2


class TestLateness:
    def test_what_is_provably_too_late_is_refused_at_once(self) -> None:
        subject = batcher()
        with pytest.raises(DeadlineExceeded, match="at least 7 ms"):
            subject.add([queued(1, due_in_s=EARLY_DROP_RATIO * affine_s(16) - 1e-6)], NOW)
        assert len(subject) == 0

    def test_a_deadline_that_has_passed_is_late_and_not_most_urgent(self) -> None:
        subject = batcher()
        subject.add([queued(1, due_in_s=0.5)], NOW)
        subject.add([queued(2, due_in_s=5.0)], NOW)
        assert ids(subject.release(NOW + 1.0)) == [2]

    def test_the_next_wake_is_when_the_first_is_lost(self) -> None:
        subject = batcher()
        subject.add([queued(1, due_in_s=2.0)], NOW)
        subject.add([queued(2, due_in_s=1.0)], NOW)
        lost_at = NOW + 1.0 - EARLY_DROP_RATIO * affine_s(16)
        assert subject.next_wake(NOW) == pytest.approx(lost_at)
        assert subject.expire(lost_at - 1e-6) == []
        assert ids(subject.expire(lost_at + 1e-6)) == [2]
        assert subject.next_wake(NOW) == pytest.approx(lost_at + 1.0)

    def test_the_parts_of_a_request_are_late_together(self) -> None:
        parts = [queued(id, due_in_s=3 * EARLY_DROP_RATIO * affine_s(16)) for id in range(4)]
        with pytest.raises(DeadlineExceeded):
            batcher().add(parts, NOW)
        batcher().add(parts[:2], NOW)


class TestRoom:
    def test_a_full_queue_says_when_it_will_have_drained(self) -> None:
        subject = batcher(max_queue_size=2)
        subject.add([queued(1)], NOW)
        subject.add([queued(2, length=256)], NOW)
        with pytest.raises(Overloaded) as refused:
            subject.add([queued(3)], NOW)
        assert refused.value.retry_after_s == pytest.approx(affine_s(16) + affine_s(256))
        assert len(subject) == 2

    def test_the_parts_of_a_request_are_taken_together_or_not_at_all(self) -> None:
        subject = batcher(max_queue_size=4)
        subject.add([queued(1), queued(2)], NOW)
        with pytest.raises(Overloaded):
            subject.add([queued(3), queued(4), queued(5)], NOW)
        assert ids(subject.waiting()) == [1, 2]

    def test_an_empty_queue_takes_a_request_of_any_size(self) -> None:
        subject = batcher(max_queue_size=2)
        subject.add([queued(id) for id in range(5)], NOW)
        assert len(subject) == 5

    def test_who_goes_back_into_the_queue_is_not_turned_away(self) -> None:
        subject = batcher(max_queue_size=1)
        subject.add([queued(1)], NOW)
        subject.add([queued(2, cohort=7)], NOW, readmit=True)
        assert len(subject) == 2

    def test_who_leaves_makes_room_at_once(self) -> None:
        subject = batcher(max_queue_size=1)
        subject.add([queued(1)], NOW)
        subject.remove([1, 77])
        subject.add([queued(2)], NOW)
        assert ids(subject.waiting()) == [2]


class TestHoldingBack:
    def test_a_partial_batch_leaves_once_its_oldest_member_has_waited_long_enough(self) -> None:
        subject = batcher(policy="window", max_queue_delay_s=0.005)
        subject.add([queued(1)], NOW)
        subject.add([queued(2, at=NOW + 0.004)], NOW + 0.004)
        assert subject.release(NOW + 0.0049) == []
        assert subject.next_wake(NOW + 0.0049) == pytest.approx(NOW + 0.005)
        assert ids(subject.release(NOW + 0.0051)) == [1, 2]

    def test_a_full_batch_does_not_wait(self) -> None:
        subject = batcher(policy="window", max_rows=2, max_queue_delay_s=0.005)
        subject.add([queued(1)], NOW)
        subject.add([queued(2)], NOW)
        assert ids(subject.release(NOW)) == [1, 2]

    def test_a_batch_whose_time_is_short_does_not_wait(self) -> None:
        subject = batcher(policy="window", max_queue_delay_s=5.0)
        subject.add([queued(1, due_in_s=1.0)], NOW)
        latest_start_at = NOW + 1.0 - affine_s(16)
        assert subject.release(latest_start_at - 1e-6) == []
        assert ids(subject.release(latest_start_at + 1e-6)) == [1]

    def test_a_busy_worker_is_not_woken_for_a_batch(self) -> None:
        subject = batcher(policy="window", max_queue_delay_s=0.005)
        subject.add([queued(1)], NOW)
        wake_at = subject.next_wake(NOW, worker_free=False)
        assert wake_at == pytest.approx(NOW + 2.0 - EARLY_DROP_RATIO * affine_s(16))


def test_a_cost_function_that_fails_leaves_the_queue_as_it_was() -> None:
    def service_s(units: float) -> float:
        if units > 100:
            raise ZeroDivisionError
        return 0.01

    subject = batcher(service_s)
    subject.add([queued(1)], NOW)
    with pytest.raises(ZeroDivisionError):
        subject.add([queued(2), queued(3, length=200)], NOW)
    assert ids(subject.waiting()) == [1]
    assert ids(subject.release(NOW)) == [1]


def test_a_caller_that_leaves_while_others_wait_costs_and_delays_no_other() -> None:
    subject = batcher()
    for id in (1, 2, 3):
        subject.add([queued(id)], NOW)
    subject.remove([2])
    assert subject.ahead(float("inf")) == (2, pytest.approx(2 * affine_s(16)))
    assert ids(subject.release(NOW)) == [1, 3]


def test_predictions_learn_what_sharing_saves() -> None:
    subject = batcher(lambda _units: 0.010, max_rows=10)  # a device on which a batch costs no more than a row
    assert subject.drain_s() == 0.0
    for _ in range(40):
        subject.add([queued(id) for id in range(10)], NOW)
        subject.release(NOW)
    subject.add([queued(id) for id in range(10)], NOW)
    assert subject.drain_s() == pytest.approx(0.010, rel=0.05)
    assert subject.ahead(order_key(NOW + 99.0, 0)) == (10, pytest.approx(0.010, rel=0.05))
    assert subject.ahead(order_key(NOW, 0)) == (0, 0.0)


def test_a_batcher_shows_what_waits() -> None:
    subject = batcher()
    subject.add([queued(1)], NOW)
    assert repr(subject) == "<Batcher 1/256 waiting, drained in 12 ms>"


class AnyTraffic(RuleBasedStateMachine):
    """Whatever comes, in whatever order: each item leaves exactly once, in time, in order, within the limits."""

    @initialize(
        max_rows=st.integers(1, 8),
        max_work=st.sampled_from([64.0, 1024.0, float("inf")]),
        max_queue_size=st.integers(1, 12),
        delay_s=st.sampled_from([0.0, 0.02]),
        policy=st.sampled_from(get_args(BatchingPolicy)),
    )
    def start(
        self, max_rows: int, max_work: float, max_queue_size: int, delay_s: float, policy: BatchingPolicy
    ) -> None:
        self.now = NOW
        self.ids = count()
        self.inside: dict[int, QueueItem] = {}
        self.max_rows, self.max_work, self.max_queue_size, self.delay_s = max_rows, max_work, max_queue_size, delay_s
        self.batcher = batcher(
            max_rows=max_rows, max_work=max_work, max_queue_size=max_queue_size, max_queue_delay_s=delay_s,
            policy=policy, preferred_batch_size=(2,),
        )  # fmt: skip

    @rule(
        lengths=st.lists(st.integers(1, 256), min_size=1, max_size=3),
        rows=st.integers(1, 4),
        due_in_s=st.floats(-0.1, 3.0),
        priority=st.integers(0, 5),
        kind=st.sampled_from("ab"),
    )
    def arrive(self, lengths: list[int], rows: int, due_in_s: float, priority: int, kind: str) -> None:
        items = [
            queued(next(self.ids), at=self.now, due_in_s=due_in_s, length=n, rows=rows, priority=priority, kind=kind)
            for n in lengths
        ]
        try:
            self.batcher.add(items, self.now)
        except Overloaded as refused:
            assert refused.retry_after_s is not None and refused.retry_after_s > 0.0
            assert len(self.inside) + len(items) > self.max_queue_size
        except DeadlineExceeded:
            assert EARLY_DROP_RATIO * sum(affine_s(item.shape.units) for item in items) >= due_in_s - 1e-9
        else:
            self.inside.update((item.id, item) for item in items)

    @rule(seconds=st.floats(0.0, 0.5))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        gone = list(self.inside)[which % len(self.inside)]
        self.batcher.remove([gone])
        del self.inside[gone]

    @rule()
    def expire(self) -> None:
        for item in self.batcher.expire(self.now):
            assert self.now >= item.deadline - EARLY_DROP_RATIO * affine_s(item.shape.units) - 1e-9
            del self.inside[item.id]

    @rule()
    def release(self) -> None:
        batch = self.batcher.release(self.now)
        if not batch:
            return
        shapes = [item.shape for item in batch]
        work = max(shape.length for shape in shapes) * sum(shape.cells for shape in shapes)
        within = sum(shape.rows for shape in shapes) <= self.max_rows and work <= self.max_work + 1e-6
        assert within or len(batch) == 1
        assert len({item.kind for item in batch}) == 1
        assert all(self.now < item.deadline for item in batch)
        for item in batch:
            del self.inside[item.id]

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "batcher"):
            assert sorted(ids(self.batcher.waiting())) == sorted(self.inside)
            assert (self.batcher.next_wake(self.now) is None) == (not self.inside)

    @invariant()
    def a_free_worker_never_idles_without_a_wake_up(self) -> None:
        """Either something leaves now, or there is an instant in the future at which something will change."""
        if hasattr(self, "batcher") and self.inside:
            wake_at = self.batcher.next_wake(self.now)
            assert wake_at is not None
            assert wake_at <= max(item.deadline for item in self.inside.values())


AnyTraffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyTraffic = pytest.mark.slow(AnyTraffic.TestCase)


@pytest.mark.slow
@given(st.permutations(range(8)))
def test_the_order_of_arrival_does_not_change_who_goes_first(order: list[int]) -> None:
    subject = batcher(max_rows=1)
    for id in order:
        subject.add([queued(id, due_in_s=1.0 + id)], NOW)
    assert [ids(subject.release(NOW))[0] for _ in order] == list(range(8))
