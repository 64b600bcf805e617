"""Batching policies choose the next batch, and how long it is held back."""

from __future__ import annotations

from typing import Any

import pytest

from cloud_pool.core.batching.batcher import Batcher
from cloud_pool.core.batching.closing_policies import BLOCKING_RATIO, AdaptivePolicy, policy_of
from cloud_pool.core.batching.deadline_queue import QueueEntry
from cloud_pool.core.batching.grouping import BatchLimits, WorkShape
from cloud_pool.core.batching.latency_model import LatencyModel
from cloud_pool.core.batching.queue_item import QueueItem
from tests.support.gateway.formula import Formula

NOW = 100.0


def affine_s(units: float) -> float:
    return 0.008 + 0.00002 * units


def batcher(policy: Any, **overrides: Any) -> Batcher:
    return Batcher(Formula(affine_s), **{"max_rows": 8, "policy": policy, **overrides})


def queued(id: int, *, at: float = NOW, due_in_s: float = 2.0, length: int = 16, **more: Any) -> QueueItem:
    return QueueItem(id, at, at + due_in_s, WorkShape(1, length, float(length)), **more)


def adaptive(*, target_s: float) -> AdaptivePolicy:
    return AdaptivePolicy(Formula(affine_s), BatchLimits(8), target_s)


def run(policy: AdaptivePolicy, *, batches: int, took_s: float, rows: int, waiting: int = 0) -> None:
    """Let batches of this many rows leave, while others stay, and take so long."""
    item = queued(0)
    chosen = [QueueEntry(item, item.key, affine_s(16), item.deadline)] * rows
    for _ in range(batches):
        policy.left(chosen, took_s, waiting=waiting)
        policy.took(took_s)


def ids(items: list[QueueItem]) -> list[int]:
    return [item.id for item in items]


def test_none_runs_each_by_itself() -> None:
    subject = batcher("none")
    subject.add([queued(1), queued(2)], NOW)
    assert [ids(subject.release(NOW)) for _ in range(3)] == [[1], [2], []]


def test_eager_takes_the_next_request_whatever_its_length() -> None:
    subject = batcher("eager", max_rows=3)
    subject.add([queued(1, length=8), queued(2, length=2_000), queued(3, length=8), queued(4, length=8)], NOW)
    assert [ids(subject.release(NOW)) for _ in range(2)] == [[1, 2, 3], [4]]


def test_eager_counts_padding_against_the_work_of_a_batch() -> None:
    subject = batcher("eager", max_work=64.0)
    subject.add([queued(1, length=8), queued(2, length=8), queued(3, length=32)], NOW)
    assert ids(subject.release(NOW)) == [1, 2]


@pytest.mark.parametrize(("waited_s", "first"), [(0.1, 2), (0.2, 1)])
def test_a_long_one_lets_short_ones_pass_until_it_has_waited_three_times_as_long(waited_s: float, first: int) -> None:
    subject, now = batcher("deadline"), NOW + waited_s
    subject.add([queued(1, length=2_000, due_in_s=30.0)], NOW)
    subject.add([queued(2, at=now, length=8, due_in_s=30.0)], now)
    assert ids(subject.release(now)) == [first]


class TestWindow:
    def test_the_wait_counts_from_the_oldest_member_and_not_from_the_last_batch(self) -> None:
        subject = batcher("window", max_queue_delay_s=0.005, max_rows=2)
        subject.add([queued(1), queued(2)], NOW)
        assert ids(subject.release(NOW + 0.004)) == [1, 2]
        subject.add([queued(3, at=NOW + 0.003)], NOW + 0.004)
        assert subject.release(NOW + 0.007) == []
        assert subject.next_wake(NOW + 0.007) == pytest.approx(NOW + 0.008)
        assert ids(subject.release(NOW + 0.0081)) == [3]

    def test_a_preferred_size_leaves_at_once(self) -> None:
        subject = batcher("window", max_queue_delay_s=0.005, preferred_batch_size=(2, 4))
        for id in (1, 2, 3):
            subject.add([queued(id)], NOW)
        assert ids(subject.release(NOW)) == [1, 2]
        assert subject.release(NOW) == []

    def test_once_the_wait_is_over_all_leave_beyond_the_preferred_size_too(self) -> None:
        subject = batcher("window", max_queue_delay_s=0.005, preferred_batch_size=(2,))
        for id in (1, 2, 3):
            subject.add([queued(id)], NOW)
        assert ids(subject.release(NOW + 0.006)) == [1, 2, 3]

    def test_a_device_that_is_often_late_is_left_more_time(self) -> None:
        model = LatencyModel([(1.0, 0.1), (100.0, 0.2)])
        for number in range(100):
            model.record(16.0, 16.0, 0.11 * (2.0 if number % 10 == 0 else 1.0))
        subject = Batcher(model, max_rows=8, policy="window", max_queue_delay_s=5.0)
        subject.add([queued(1, due_in_s=1.0)], NOW)
        wake_at = subject.next_wake(NOW)
        assert wake_at is not None
        assert wake_at < NOW + 1.0 - 1.5 * model.predict_s(16.0, 16.0)

    def test_a_deadline_is_not_waited_away(self) -> None:
        subject = batcher("window", max_queue_delay_s=5.0)
        subject.add([queued(1, due_in_s=1.0)], NOW)
        wake_at = subject.next_wake(NOW)
        assert wake_at == pytest.approx(NOW + 1.0 - affine_s(16))
        assert ids(subject.release(NOW + 1.0 - affine_s(16) + 1e-9)) == [1]


class TestAdaptive:
    def test_it_starts_at_fifty_milliseconds(self) -> None:
        subject = batcher("adaptive")
        subject.add([queued(1)], NOW)
        assert subject.next_wake(NOW) == pytest.approx(NOW + AdaptivePolicy.START_S)

    @pytest.mark.parametrize(
        ("batch_s", "ends_at"),
        [
            (0.030, AdaptivePolicy.MOST_S),
            (0.059, AdaptivePolicy.MOST_S),  # within a fifth of the target
            (0.061, AdaptivePolicy.LEAST_S),
            (0.700, AdaptivePolicy.LEAST_S),
        ],
    )
    def test_batches_slower_than_the_target_by_a_fifth_shorten_it_and_others_lengthen_it(
        self, batch_s: float, ends_at: float
    ) -> None:
        subject = adaptive(target_s=0.05)
        run(subject, batches=200, took_s=batch_s, rows=8)
        assert subject.delay_s == pytest.approx(ends_at)

    def test_it_is_looked_at_again_only_after_ten_batches(self) -> None:
        subject = adaptive(target_s=0.05)
        run(subject, batches=AdaptivePolicy.EVERY - 1, took_s=0.2, rows=8)
        assert repr(subject) == "<AdaptivePolicy 50 ms>"
        run(subject, batches=1, took_s=0.2, rows=8)
        assert repr(subject) == "<AdaptivePolicy 35 ms>"

    def test_one_slow_batch_among_fast_ones_does_not_shorten_it(self) -> None:
        subject = adaptive(target_s=0.05)
        run(subject, batches=9, took_s=0.01, rows=8)
        run(subject, batches=1, took_s=0.2, rows=8)
        assert subject.delay_s > AdaptivePolicy.START_S

    @pytest.mark.parametrize(("rows", "waiting"), [(8, 0), (1, 7), (4, 4)])
    def test_it_grows_more_the_more_requests_there_are(self, rows: int, waiting: int) -> None:
        lone, crowded = adaptive(target_s=0.05), adaptive(target_s=0.05)
        run(lone, batches=10, took_s=0.01, rows=1)
        run(crowded, batches=10, took_s=0.01, rows=rows, waiting=waiting)
        assert AdaptivePolicy.START_S < lone.delay_s < crowded.delay_s

    def test_the_target_is_that_of_the_manifest(self) -> None:
        subject = batcher("adaptive", target_batch_s=0.5)
        for number in range(10):
            subject.add([queued(number)], NOW)
            subject.release(NOW + 0.06)
            subject.took(0.4)
        subject.add([queued(10)], NOW)
        wake_at = subject.next_wake(NOW)
        assert wake_at is not None
        assert wake_at > NOW + AdaptivePolicy.START_S


class TestClosedBy:
    @pytest.mark.parametrize("policy", ["deadline", "window", "adaptive"])
    @pytest.mark.parametrize(("due_in_s", "after_s", "reason"), [(2.0, 0.051, "delay"), (0.04, 0.035, "deadline")])
    def test_a_batch_that_leaves_for_its_deadline_is_counted_as_such(
        self, policy: str, due_in_s: float, after_s: float, reason: str
    ) -> None:
        more = {} if policy == "adaptive" else {"max_queue_delay_s": 0.05}
        subject = batcher(policy, **more)
        for number in range(1, 100):  # so that batch-mates are expected, or `deadline` would not wait
            subject.add([queued(number)], NOW)
            subject.remove([number])
        subject.add([queued(0, due_in_s=due_in_s)], NOW)
        assert subject.release(NOW + 0.001) == []
        assert ids(subject.release(NOW + after_s)) == [0]
        assert subject.closed_by == reason

    def test_only_the_policy_that_prefers_sizes_closes_for_one(self) -> None:
        subject = batcher("deadline", preferred_batch_size=(2,))
        subject.add([queued(1), queued(2)], NOW)
        assert ids(subject.release(NOW)) == [1, 2]
        assert subject.closed_by == "idle"


class TestDeadline:
    def test_company_is_waited_for_where_it_can_be_expected_and_else_not(self) -> None:
        subject = batcher("deadline", max_queue_delay_s=0.02)
        subject.add([queued(0)], NOW)
        assert ids(subject.release(NOW)) == [0]
        for number in range(1, 200):
            at = NOW + 0.01 * number
            subject.add([queued(number, at=at)], at)
            subject.remove([number])
        subject.add([queued(200, at=NOW + 2.0)], NOW + 2.0)
        assert subject.release(NOW + 2.0) == []
        assert subject.next_wake(NOW + 2.0) == pytest.approx(NOW + 2.02)

    def test_no_long_batch_starts_where_tight_requests_come_often(self) -> None:
        subject = batcher("deadline", max_rows=64)
        for number in range(200):
            at = NOW + 0.01 * number
            subject.add([queued(number, at=at, due_in_s=0.15)], at)
            subject.remove([number])
        for number in range(200, 210):
            subject.add([queued(number, at=NOW + 2.0, due_in_s=3.0, length=1_000)], NOW + 2.0)
        batch = subject.release(NOW + 2.0)
        assert len(batch) > 1
        assert affine_s(1_000 * len(batch)) <= BLOCKING_RATIO * 0.15

    @pytest.mark.parametrize(("room", "first"), [(200.0, [2]), (100_000.0, [1])])
    def test_where_memory_is_short_the_batch_of_fewer_bytes_goes_first(self, room: float, first: list[int]) -> None:
        # A row of 160 is worth more, its level being higher, for a second, and one of 8 for each byte of it.
        subject = batcher("deadline", max_rows=1)
        subject.add([queued(1, length=160, priority=1, due_in_s=25.0)], NOW)
        subject.add([queued(2, length=8, due_in_s=25.0), queued(3, length=64, due_in_s=25.0)], NOW)
        subject.limit_work(room, lambda units: 1000.0 * units)
        assert ids(subject.release(NOW)) == first

    def test_where_no_request_is_tight_a_batch_is_as_long_as_it_pays(self) -> None:
        subject = batcher("deadline", max_rows=64)
        subject.add([queued(number, due_in_s=3.0, length=1_000) for number in range(10)], NOW)
        assert len(subject.release(NOW)) == 10

    def test_tight_slack_never_splits_batches_below_a_few_calls(self) -> None:
        subject = batcher("deadline", max_rows=64)
        for number in range(200):
            subject.add([queued(number, due_in_s=0.012, length=1)], NOW)
            subject.remove([number])
        subject.add([queued(number, due_in_s=3.0, length=100) for number in range(200, 210)], NOW)
        assert len(subject.release(NOW)) == 10


@pytest.mark.parametrize("name", ["deadline", "adaptive", "window", "eager", "none"])
def test_every_policy_says_what_it_is(name: Any) -> None:
    policy = policy_of(name, Formula(affine_s), BatchLimits(8), max_queue_delay_s=0.005)
    assert repr(policy).startswith(("<Deadline", "<Window", "<Adaptive"))
    assert policy.holds_back is (name not in ("eager", "none"))
