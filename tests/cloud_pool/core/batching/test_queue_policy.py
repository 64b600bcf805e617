"""Queue policies limit how many requests wait at a level of priority, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_pool.core.batching.batcher import EARLY_DROP_RATIO, Batcher
from cloud_pool.core.batching.deadline_queue import SLACK
from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.queue_item import FAR_S, QueueItem
from cloud_pool.core.batching.queue_policy import QueuePolicies
from tests.support.gateway.formula import Formula
from tidegate.models.manifest import BatchingPolicy, QueuePolicy
from tidegate.outcome import Overloaded
from tidegate.priority import LAST_LEVEL, LEVEL_S

NOW = 100.0
CALL_S = 0.1


def batcher(policies: QueuePolicies, **overrides: Any) -> Batcher:
    cost = Formula(lambda units: CALL_S)
    return Batcher(cost, **{"max_rows": 1, "policy": "eager", "queue_policies": policies, **overrides})


def queued(id: int, *, at: float = NOW, due_in_s: float = 20.0, priority: int = 2) -> QueueItem:
    return QueueItem(id, at, at + due_in_s, WorkShape(1, 8, 8.0), priority=priority)


def ids(items: list[QueueItem]) -> list[int]:
    return [item.id for item in items]


def timeout(seconds: float, action: Any = "REJECT") -> QueuePolicy:
    return QueuePolicy(timeout_action=action, default_timeout_microseconds=round(seconds * 1e6))


class TestRoom:
    def test_a_full_level_refuses_only_its_own_requests(self) -> None:
        subject = batcher(QueuePolicies(by_level={3: QueuePolicy(max_queue_size=2)}))
        subject.add([queued(1, priority=3)], NOW)
        subject.add([queued(2, priority=3)], NOW)
        subject.add([queued(3, priority=2)], NOW)
        with pytest.raises(Overloaded, match="2 of 2 wait at this level") as refused:
            subject.add([queued(4, priority=3)], NOW)
        assert refused.value.retry_after_s
        subject.remove([1])
        subject.add([queued(5, priority=3)], NOW)
        assert sorted(ids(subject.waiting())) == [2, 3, 5]

    def test_a_request_that_finds_its_level_full_waits_at_the_next_lower_one_with_room_where_that_is_allowed(
        self,
    ) -> None:
        full = {2: QueuePolicy(max_queue_size=1, demote_when_full=True), 3: QueuePolicy(max_queue_size=1)}
        subject = batcher(QueuePolicies(by_level={**full, 4: QueuePolicy(max_queue_size=1)}))
        given = [subject.add([queued(id)], NOW)[0].priority for id in (1, 2, 3)]
        assert given == [2, 3, 4]
        with pytest.raises(Overloaded, match="1 of 1 wait at this level"):
            subject.add([queued(4)], NOW)
        with pytest.raises(Overloaded):  # its own level allows no demotion
            subject.add([queued(5, priority=3)], NOW)
        subject.add([queued(6, priority=1)], NOW)
        assert [ids(subject.release(NOW)) for _ in range(4)] == [[6], [1], [2], [3]]

    def test_a_demoted_request_has_the_timeout_of_the_level_at_which_it_waits(self) -> None:
        policies = {2: QueuePolicy(max_queue_size=1, demote_when_full=True), 3: timeout(0.5)}
        subject = batcher(QueuePolicies(by_level=policies))
        subject.add([queued(1)], NOW)
        subject.add([queued(2)], NOW)
        assert ids(subject.expire(NOW + 0.51)) == [2]

    def test_all_parts_of_a_demoted_request_wait_at_one_level(self) -> None:
        subject = batcher(QueuePolicies(by_level={2: QueuePolicy(max_queue_size=2, demote_when_full=True)}))
        subject.add([queued(1)], NOW)
        assert [item.priority for item in subject.add([queued(2), queued(3)], NOW)] == [3, 3]

    def test_a_number_that_is_no_level_counts_as_the_default(self) -> None:
        subject = batcher(QueuePolicies(by_level={2: QueuePolicy(max_queue_size=1)}))
        subject.add([queued(1, priority=0)], NOW)
        for priority in (2, 99):
            with pytest.raises(Overloaded):
                subject.add([queued(2, priority=priority)], NOW)

    def test_an_empty_level_takes_one_request_of_any_size(self) -> None:
        subject = batcher(QueuePolicies(QueuePolicy(max_queue_size=1)))
        subject.add([queued(1, priority=3), queued(2, priority=3)], NOW)
        subject.add([queued(3, priority=1)], NOW)
        assert len(subject) == 3

    def test_who_goes_back_is_not_turned_away(self) -> None:
        subject = batcher(QueuePolicies(QueuePolicy(max_queue_size=1)))
        subject.add([queued(1)], NOW)
        subject.add([queued(2)], NOW, readmit=True)
        assert len(subject) == 2


class TestReject:
    def test_who_has_waited_too_long_is_taken_out_by_a_timer(self) -> None:
        """Triton's wait until an instance is free, up to half a second more (server#7512)."""
        subject = batcher(QueuePolicies(timeout(0.5)))
        subject.add([queued(1)], NOW)
        assert subject.next_wake(NOW, worker_free=False) == pytest.approx(NOW + 0.5)
        assert subject.expire(NOW + 0.499) == []
        assert ids(subject.expire(NOW + 0.5)) == [1]

    @pytest.mark.parametrize(("timeout_s", "due_in_s"), [(0.5, 20.0), (0.5, 0.3), (0.0, 0.3)])
    def test_the_least_of_timeout_and_deadline_counts_of_those_that_are_set(
        self, timeout_s: float, due_in_s: float
    ) -> None:
        """Triton ignores a caller's timeout where the level has none."""
        subject = batcher(QueuePolicies(timeout(timeout_s)))
        subject.add([queued(1, due_in_s=due_in_s)], NOW)
        out_at = min(timeout_s or 99.0, due_in_s - EARLY_DROP_RATIO * CALL_S)
        assert subject.next_wake(NOW) == pytest.approx(NOW + out_at)

    def test_each_level_has_its_own(self) -> None:
        subject = batcher(QueuePolicies(timeout(0.5), {1: timeout(0.1), 4: QueuePolicy()}))
        for priority in (1, 2, 4):
            subject.add([queued(priority, priority=priority)], NOW)
        assert ids(subject.expire(NOW + 0.2)) == [1]
        assert ids(subject.expire(NOW + 0.6)) == [2]
        assert ids(subject.expire(NOW + 10.0)) == []

    def test_who_goes_back_has_no_timeout_any_more(self) -> None:
        subject = batcher(QueuePolicies(timeout(0.5)))
        subject.add([queued(1)], NOW)
        assert ids(subject.release(NOW + 0.4)) == [1]
        subject.add([queued(1)], NOW + 0.4, readmit=True)
        assert subject.expire(NOW + 5.0) == []


class TestDelay:
    def test_a_request_that_waited_too_long_goes_behind_all_that_wait(self) -> None:
        subject = batcher(QueuePolicies(timeout(0.5, "DELAY")), max_rows=8)
        subject.add([queued(1, due_in_s=5.0)], NOW)
        for id in (2, 3):
            subject.add([queued(id, at=NOW + 0.4, due_in_s=19.0)], NOW + 0.4)
        assert subject.expire(NOW + 0.6) == []
        assert ids(subject.release(NOW + 0.6)) == [2, 3]
        assert ids(subject.release(NOW + 0.6)) == [1]

    @pytest.mark.slow
    @pytest.mark.parametrize("policy", ["eager", "deadline"])
    def test_it_is_passed_for_a_bounded_time_only(self, policy: BatchingPolicy) -> None:
        """Triton's delayed ones may wait for ever."""
        subject = batcher(QueuePolicies(by_level={3: timeout(0.5, "DELAY")}), policy=policy)
        subject.add([queued(0, priority=3, due_in_s=1e5)], NOW)
        waited_s = until_released(subject, 0)
        assert 0.5 < waited_s < FAR_S + (LAST_LEVEL + 1) * LEVEL_S

    def test_its_deadline_counts_as_before(self) -> None:
        subject = batcher(QueuePolicies(timeout(0.5, "DELAY")))
        subject.add([queued(1, due_in_s=3.0)], NOW)
        assert ids(subject.release(NOW + 0.1)) == [1]
        subject.add([queued(2, due_in_s=3.0)], NOW)
        subject.add([queued(3, at=NOW + 0.9, due_in_s=9.0)], NOW + 0.9)
        assert ids(subject.release(NOW + 1.0)) == [3]
        assert subject.next_wake(NOW + 1.0) == pytest.approx(NOW + 3.0 - EARLY_DROP_RATIO * CALL_S)

    def test_those_who_left_leave_nothing_behind(self) -> None:
        subject = batcher(QueuePolicies(timeout(50.0, "DELAY")))
        for id in range(1_000):
            subject.add([queued(id)], NOW)
            subject.remove([id])
        assert subject.timed_size <= SLACK + 2
        assert subject.next_wake(NOW) is None


def until_released(subject: Batcher, id: int, *, rival_s: float = 2.0) -> float:
    """Seconds until it leaves, while important requests with short deadlines never stop coming, twice what fits."""
    now, number = NOW, 1
    for _ in range(2_000):
        for _ in range(2):
            if len(subject) < 200:
                subject.add([queued(number, at=now, due_in_s=rival_s, priority=1)], now)
                number += 1
        subject.expire(now)
        if id in ids(subject.release(now)):
            return now - NOW
        now += CALL_S
    raise AssertionError("it never left")


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(["deadline", "eager", "none"]),
    priority=st.integers(1, LAST_LEVEL),
    due_in_s=st.sampled_from([80.0, 1e5]),
    rival_s=st.floats(0.5, 5.0),
)
def test_nobody_waits_for_ever_however_low_and_whoever_comes(
    policy: BatchingPolicy, priority: int, due_in_s: float, rival_s: float
) -> None:
    subject = batcher(QueuePolicies(), policy=policy)
    subject.add([queued(0, priority=priority, due_in_s=due_in_s)], NOW)
    assert until_released(subject, 0, rival_s=rival_s) < FAR_S + LAST_LEVEL * LEVEL_S
