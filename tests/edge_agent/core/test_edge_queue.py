"""The edge queue admits, orders, expires and refuses requests."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from edge_agent.core.edge_queue import (
    MAX_AHEAD,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    OPTIMISM,
    EdgeQueue,
    QueueTicket,
)
from tidegate.models.fair_share import FairShare
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.priority import LEVEL_S
from tidegate.types import Accepted
from tidegate.workers.process import PIPELINE

_ids = count(1)


def ticket(*, deadline: float, cost_s: float = 0.010, priority: int = 0, lane: str = "minilm") -> QueueTicket:
    return QueueTicket(next(_ids), lane, deadline, cost_s, priority)


def of_group(group: str, *, deadline: float) -> QueueTicket:
    return QueueTicket(next(_ids), group, deadline, 0.1, group=group)


def queue_with(*tickets: QueueTicket, max_size: int = 8, slots: int = 1, now: float = 0.0) -> EdgeQueue:
    queue = EdgeQueue(max_size=max_size, slots=slots)
    for one in tickets:
        queue.admit(one, now)
    return queue


def drained(queue: EdgeQueue, now: float = 0.0) -> list[int]:
    """The ids in the order in which they are computed, in no time."""
    order = []
    while (taken := queue.take(now)) is not None:
        order.append(taken.id)
        queue.finish(taken.id)
    return order


# --- order ---------------------------------------------------------------------------------------------------------


def test_the_earliest_deadline_goes_first_whatever_the_arrival_order() -> None:
    late, early, middle = ticket(deadline=3.0), ticket(deadline=1.0), ticket(deadline=2.0)

    assert drained(queue_with(late, early, middle)) == [early.id, middle.id, late.id]


def test_equal_deadlines_are_served_in_the_order_of_arrival() -> None:
    first, second, third = (ticket(deadline=1.0) for _ in range(3))

    assert drained(queue_with(first, second, third)) == [first.id, second.id, third.id]


def test_priority_moves_a_request_before_earlier_deadlines_of_its_time_but_not_before_those_long_waiting() -> None:
    urgent = ticket(deadline=1.0 + LEVEL_S, priority=1)
    ordinary, long_waiting = ticket(deadline=1.1), ticket(deadline=0.9)

    assert drained(queue_with(ordinary, urgent, long_waiting)) == [long_waiting.id, urgent.id, ordinary.id]


def test_a_worker_that_computes_does_not_hold_up_another_model_while_a_slot_is_free() -> None:
    first, second = ticket(deadline=1.0, lane="minilm"), ticket(deadline=1.1, lane="minilm")
    other = ticket(deadline=2.0, lane="digits")
    queue = queue_with(first, second, other, slots=2)

    assert [queue.take(0.0), queue.take(0.0), queue.take(0.0)] == [first, other, None]


def test_nothing_starts_while_all_slots_are_taken() -> None:
    first, second = ticket(deadline=1.0), ticket(deadline=2.0)
    queue = queue_with(first, second)
    assert queue.take(0.0) == first

    assert queue.take(0.0) is None
    queue.finish(first.id)

    assert queue.take(0.0) == second


# --- the door ------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_it_will_have_drained() -> None:
    queue = queue_with(*(ticket(deadline=9.0, cost_s=0.5) for _ in range(4)), max_size=4)

    with pytest.raises(Overloaded, match="4 requests wait") as refused:
        queue.admit(ticket(deadline=9.0), 0.0)

    assert refused.value.retry_after_s == pytest.approx(2.0)
    assert queue.queued == 4


@pytest.mark.parametrize(("cost_s", "retry_after_s"), [(1e-4, MIN_RETRY_AFTER_S), (1e3, MAX_RETRY_AFTER_S)])
def test_the_wait_that_a_full_queue_advises_stays_sensible(cost_s: float, retry_after_s: float) -> None:
    queue = queue_with(ticket(deadline=1e6, cost_s=cost_s), max_size=1)

    with pytest.raises(Overloaded) as refused:
        queue.admit(ticket(deadline=1e6), 0.0)

    assert refused.value.retry_after_s == retry_after_s


@pytest.mark.parametrize(
    ("left_s", "admitted"),
    [
        (0.0601, True),  # 0.100 s at 60 %
        (0.0599, False),
        (0.0, False),
        (-1.0, False),
    ],
)
def test_an_idle_edge_refuses_only_what_it_could_not_do_even_at_its_fastest(left_s: float, admitted: bool) -> None:
    queue = EdgeQueue(max_size=8)
    one = ticket(deadline=5.0 + left_s, cost_s=0.100)

    if admitted:
        assert queue.admit(one, 5.0) == Accepted(0, pytest.approx(0.100))
    else:
        with pytest.raises(DeadlineExceeded):
            queue.admit(one, 5.0)
    assert queue.queued == int(admitted)


def test_only_the_work_that_goes_first_counts_against_a_deadline() -> None:
    later_work = [ticket(deadline=50.0, cost_s=1.0) for _ in range(4)]
    queue = queue_with(*later_work)

    accepted = queue.admit(ticket(deadline=0.5, cost_s=0.1), 0.0)

    assert accepted == Accepted(queue_ahead=0, finish_in_s=pytest.approx(0.1))


def test_work_ahead_makes_a_request_provably_late_and_the_refusal_tells_how() -> None:
    queue = queue_with(*(ticket(deadline=2.0, cost_s=1.0) for _ in range(3)))

    with pytest.raises(
        DeadlineExceeded, match="3 requests go first and the earliest finish is in 2400 ms, but 2100 ms"
    ):
        queue.admit(ticket(deadline=2.1, cost_s=1.0), 0.0)


@pytest.mark.parametrize("deadline", [4.0, 3.9999, 1.0])
def test_a_refusal_after_the_deadline_says_that_no_time_is_left(deadline: float) -> None:
    with pytest.raises(DeadlineExceeded, match=r"0 requests go first .*, but no time is left$"):
        queue_with().admit(ticket(deadline=deadline, cost_s=0.1), 4.0)


def test_what_is_being_computed_counts_only_for_what_is_left_of_it() -> None:
    queue = queue_with(ticket(deadline=9.0, cost_s=1.0))
    queue.take(0.0)

    accepted = queue.admit(ticket(deadline=9.0, cost_s=1.0), 0.75)

    assert accepted == Accepted(queue_ahead=1, finish_in_s=pytest.approx(1.25))


def test_a_computation_that_overruns_is_expected_to_end_at_any_moment() -> None:
    queue = queue_with(ticket(deadline=9.0, cost_s=1.0))
    queue.take(0.0)

    assert queue.queue_delay_s(5.0) == 0.0


def test_two_slots_halve_the_wait_for_different_models() -> None:
    queue = queue_with(ticket(deadline=9.0, cost_s=1.0, lane="a"), ticket(deadline=9.0, cost_s=1.0, lane="b"), slots=2)

    accepted = queue.admit(ticket(deadline=9.0, cost_s=1.0, lane="c"), 0.0)

    assert accepted == Accepted(queue_ahead=2, finish_in_s=pytest.approx(2.0))


def test_two_slots_do_not_help_two_requests_for_the_same_worker() -> None:
    queue = queue_with(ticket(deadline=9.0, cost_s=1.0), slots=2)

    assert queue.admit(ticket(deadline=9.0, cost_s=1.0), 0.0).finish_in_s == pytest.approx(2.0)


@pytest.mark.parametrize(("deadline", "priority", "ahead"), [(0.5, 0, 1), (1.5, 0, 2), (9.0, 0, 3), (2.02, 1, 1)])
def test_the_queue_ahead_counts_what_computes_and_what_goes_first(deadline: float, priority: int, ahead: int) -> None:
    queue = queue_with(ticket(deadline=0.4), ticket(deadline=1.0), ticket(deadline=2.0))
    queue.take(0.0)

    assert queue.queue_ahead(deadline, priority) == ahead


# --- leaving -------------------------------------------------------------------------------------------------------


def test_a_request_is_dropped_when_it_could_not_make_it_even_if_it_started_now() -> None:
    computing, waiting = ticket(deadline=9.0, cost_s=5.0, priority=1), ticket(deadline=4.0, cost_s=1.0)
    queue = queue_with(computing)
    queue.take(0.0)
    queue.admit(waiting, 0.0)

    wake_at = queue.next_wake()

    assert wake_at == pytest.approx(4.0 - OPTIMISM * 1.0)
    assert queue.expire(wake_at - 0.01) == []
    assert queue.expire(wake_at) == [waiting]
    assert queue.next_wake() is None


def test_what_is_too_late_is_not_taken_even_before_anybody_asked_for_the_expired() -> None:
    missed, possible = ticket(deadline=1.0, cost_s=0.5), ticket(deadline=2.0, cost_s=0.5)
    queue = queue_with(missed, possible)

    assert queue.take(0.9) == possible
    assert queue.expire(0.9) == [missed]


def test_a_cancelled_request_frees_its_place_at_once() -> None:
    gone = ticket(deadline=1.0)
    queue = queue_with(gone, max_size=1)

    assert queue.remove(gone.id)
    assert not queue.remove(gone.id)
    queue.admit(ticket(deadline=1.0), 0.0)


def test_a_request_that_computes_is_not_in_the_queue_any_more() -> None:
    first, second = ticket(deadline=1.0), ticket(deadline=2.0)
    queue = queue_with(first, second)
    queue.take(0.0)

    assert not queue.remove(first.id)
    assert queue.remove(second.id)


def test_a_dead_workers_requests_leave_together_and_others_stay() -> None:
    one, two, other = ticket(deadline=1.0), ticket(deadline=2.0), ticket(deadline=3.0, lane="digits")
    queue = queue_with(one, other, two)

    assert queue.close("minilm") == [one, two]
    assert drained(queue) == [other.id]


def test_it_prints_its_state() -> None:
    queue = queue_with(ticket(deadline=1.0), ticket(deadline=1.0))
    queue.take(0.0)

    assert repr(queue) == "<EdgeQueue 1/8 waiting, 1/1 computing>"


# --- whatever happens ----------------------------------------------------------------------------------------------

costs = st.floats(0.001, 2.0)
budgets = st.floats(-0.5, 10.0)
priorities = st.integers(0, 6)
lanes = st.sampled_from(["minilm", "digits", "yolo"])


class WhateverHappens(RuleBasedStateMachine):
    """Arrivals, computations, cancellations and the passing of time, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = count(1)
        self.waiting: dict[int, QueueTicket] = {}
        self.computing: dict[int, QueueTicket] = {}
        self.ends_at: dict[int, float] = {}  # of those that compute, as predicted
        self.left: list[int] = []

    @initialize(max_size=st.integers(1, 6), slots=st.integers(1, 3), ahead_s=st.sampled_from([0.0, 0.3, 2.0]))
    def start(self, max_size: int, slots: int, ahead_s: float) -> None:
        self.max_size, self.slots, self.ahead_s = max_size, slots, ahead_s
        self.queue = EdgeQueue(max_size=max_size, slots=slots, ahead_s=ahead_s)

    @rule(budget_s=budgets, cost_s=costs, priority=priorities, lane=lanes)
    def arrive(self, budget_s: float, cost_s: float, priority: int, lane: str) -> None:
        one = QueueTicket(next(self.ids), lane, self.now + budget_s, cost_s, priority)
        full = len(self.waiting) >= self.max_size
        try:
            accepted = self.queue.admit(one, self.now)
        except Overloaded as refused:
            assert full
            assert refused.retry_after_s is not None
            assert MIN_RETRY_AFTER_S <= refused.retry_after_s <= MAX_RETRY_AFTER_S
        except DeadlineExceeded:
            assert not full
        else:
            assert not full
            assert budget_s > OPTIMISM * cost_s
            assert accepted.finish_in_s >= cost_s * 0.999
            self.waiting[one.id] = one

    @rule()
    def take(self) -> None:
        taken = self.queue.take(self.now)
        busy = {one.lane for one in self.computing.values()}
        possible = [one for one in self.waiting.values() if one.lane not in busy and self.now < one.latest_start]
        if taken is None:
            assert not possible or len(busy) >= self.slots
            assert not self._may_go_ahead(self._first()), "what may go ahead does"
            return
        assert taken.deadline > self.now
        if taken.lane in busy:
            assert not possible or len(busy) >= self.slots, "a free slot is used first"
            assert taken == self._first(), "nobody is overtaken by what goes ahead"
            assert self._may_go_ahead(taken)
        else:
            assert taken.key == min(one.key for one in possible)
        self._leaves(taken)
        before = [self.ends_at[other.id] for other in self.computing.values() if other.lane == taken.lane]
        self.ends_at[taken.id] = max([self.now, *before[-1:]]) + taken.cost_s
        self.computing[taken.id] = taken

    @rule(choice=st.randoms(use_true_random=False))
    def finish(self, choice: st.DataObject) -> None:
        if self.computing:
            self.queue.finish(one := choice.choice(sorted(self.computing)))  # type: ignore[attr-defined]
            del self.computing[one]

    @rule(choice=st.randoms(use_true_random=False))
    def cancel(self, choice: st.DataObject) -> None:
        if self.waiting:
            one = self.waiting[choice.choice(sorted(self.waiting))]  # type: ignore[attr-defined]
            assert self.queue.remove(one.id)
            self._leaves(one)

    @rule(lane=lanes)
    def worker_dies(self, lane: str) -> None:
        closed = self.queue.close(lane)
        assert {one.id for one in closed} == {one.id for one in self.waiting.values() if one.lane == lane}
        for one in closed:
            self._leaves(one)

    @rule(seconds=st.floats(0.0, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for one in self.queue.expire(self.now):
            assert self.now + OPTIMISM * one.cost_s >= one.deadline
            self._leaves(one)

    @invariant()
    def counts_agree_and_stay_bounded(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.queued == len(self.waiting) <= self.max_size
            assert self.queue.in_flight == len(self.computing)
            lanes_at_work = {one.lane for one in self.computing.values()}
            assert len(lanes_at_work) <= self.slots
            assert self.ahead_s > 0.0 or len(lanes_at_work) == len(self.computing)
            assert self.queue.queue_delay_s(self.now) >= 0.0
            wake_at = self.queue.next_wake()
            assert (wake_at is None) == (not self.waiting)

    def _first(self) -> QueueTicket | None:
        """Of those that wait, the first in order; of equals the one that came first."""
        return min(self.waiting.values(), key=lambda one: one.key, default=None)

    def _may_go_ahead(self, one: QueueTicket | None) -> bool:
        """Whether its lane computes, and would have no more than it may beside the first of its calls."""
        if one is None or not self.now < one.latest_start:
            return False
        there = [other for other in self.computing.values() if other.lane == one.lane]
        if there and self.now > self.ends_at[there[0].id] + self.ahead_s:
            return False
        return bool(there) and sum(other.cost_s for other in there[1:]) + one.cost_s <= self.ahead_s

    def _leaves(self, one: QueueTicket) -> None:
        assert self.waiting.pop(one.id) == one
        assert one.id not in self.left
        self.left.append(one.id)


# --- ahead of their turn -------------------------------------------------------------------------------------------


def busy_with(*tickets: QueueTicket, ahead_s: float, **how: int) -> EdgeQueue:
    """The first of them computes."""
    queue = EdgeQueue(max_size=99, ahead_s=ahead_s, **how)
    for one in tickets:
        queue.admit(one, 0.0)
    assert queue.take(0.0) == tickets[0]
    return queue


def test_short_calls_are_handed_over_ahead_as_far_as_their_predictions_allow() -> None:
    calls = [ticket(deadline=1.0 + at, cost_s=0.001) for at in range(5)]
    queue = busy_with(*calls, ahead_s=0.0031)
    assert [queue.take(0.0) for _ in range(4)] == [*calls[1:4], None]
    queue.finish(calls[0].id)
    assert queue.take(0.001) == calls[4]
    assert queue.take(0.001) is None


def test_a_long_call_waits_for_its_turn() -> None:
    queue = busy_with(*[ticket(deadline=1.0, cost_s=0.010) for _ in range(2)], ahead_s=0.002)
    assert queue.take(0.0) is None


def test_no_more_are_handed_over_ahead_than_a_worker_keeps() -> None:
    calls = [ticket(deadline=1.0, cost_s=1e-6) for _ in range(PIPELINE + 2)]
    queue = busy_with(*calls, ahead_s=1.0)
    while queue.take(0.0) is not None:
        pass
    assert queue.in_flight == 1 + MAX_AHEAD == PIPELINE


def test_what_goes_ahead_overtakes_no_other_models_call() -> None:
    running, other, same = ticket(deadline=1.0, cost_s=0.001), ticket(deadline=2.0, lane="yolo"), ticket(deadline=3.0)
    queue = busy_with(running, other, same, ahead_s=1.0)
    assert queue.take(0.0) is None
    assert drained_after(queue, running) == [other.id, same.id]


def drained_after(queue: EdgeQueue, running: QueueTicket) -> list[int]:
    queue.finish(running.id)
    return drained(queue)


def test_a_free_slot_comes_before_a_place_ahead() -> None:
    first, second, other = ticket(deadline=1.0), ticket(deadline=2.0), ticket(deadline=3.0, lane="yolo")
    queue = busy_with(first, second, other, ahead_s=1.0, slots=2)
    assert [queue.take(0.0) for _ in range(2)] == [other, second]


def test_nobody_is_put_behind_a_call_that_is_overdue() -> None:
    calls = [ticket(deadline=9.0, cost_s=0.001) for _ in range(4)]
    queue = busy_with(*calls, ahead_s=0.002)
    assert queue.take(0.0029) == calls[1]
    assert queue.take(0.0031) is None
    queue.finish(calls[0].id)
    assert queue.take(0.005) == calls[2], "the next one has begun by then"


def test_with_shares_nothing_goes_ahead_since_another_group_may_be_next() -> None:
    queue = EdgeQueue(max_size=9, ahead_s=1.0, shares=FairShare({}, window_s=0.2))
    for _ in range(2):
        queue.admit(of_group("text", deadline=20.0), 0.0)
    assert queue.take(0.0) is not None
    assert queue.take(0.0) is None


@pytest.mark.parametrize("slots", [1, 2])
def test_a_newcomer_is_told_of_what_was_handed_over_before_it(slots: int) -> None:
    queue = busy_with(*[ticket(deadline=1.0, cost_s=0.001) for _ in range(3)], ahead_s=0.01, slots=slots)
    before = queue.finish_in_s(ticket(deadline=2.0, cost_s=0.001), 0.0)
    while queue.take(0.0) is not None:
        pass
    assert queue.finish_in_s(ticket(deadline=2.0, cost_s=0.001), 0.0) == pytest.approx(before) == 0.004
    assert queue.finish_in_s(ticket(deadline=2.0, cost_s=0.001), 0.0015) == pytest.approx(0.0025)


@pytest.mark.parametrize("slots", [1, 2])
def test_nobody_is_put_behind_a_call_that_has_long_to_go(slots: int) -> None:
    long, short = ticket(deadline=9.0, cost_s=1.0), ticket(deadline=9.0, cost_s=0.001)
    queue = busy_with(long, short, ahead_s=0.002, slots=slots)
    assert queue.take(0.0) is None
    third = ticket(deadline=0.8, cost_s=0.001)
    queue.admit(third, 0.0)  # it may take 0.6 s and be in time, as far as anybody knows
    assert queue.expire(0.9985) == [third]
    assert queue.take(0.9985) == short


def test_what_was_handed_over_ahead_begins_when_the_one_before_it_ends() -> None:
    calls = [ticket(deadline=1.0, cost_s=0.001) for _ in range(4)]
    queue = busy_with(*calls, ahead_s=0.01)
    while queue.take(0.0) is not None:
        pass
    queue.finish(calls[0].id)
    assert queue.take(0.0002) is None
    last = ticket(deadline=2.0, cost_s=0.001)
    assert queue.finish_in_s(last, 0.0002) == pytest.approx(0.004), "three and itself: the first one took 0.2 ms"
    queue.finish(calls[1].id)
    assert queue.queue_delay_s(0.01) == pytest.approx(0.002), "and where nobody has looked since"


def test_the_way_to_a_worker_and_back_takes_no_room_ahead() -> None:
    calls = [replace(ticket(deadline=1.0 + at, cost_s=0.001), compute_s=0.0001) for at in range(6)]
    queue = busy_with(*calls, ahead_s=0.00031)
    assert [queue.take(0.0) for _ in range(4)] == [*calls[1:4], None]
    assert queue.finish_in_s(ticket(deadline=9.0, cost_s=0.001), 0.0) == pytest.approx(0.007)


TestWhateverHappens = pytest.mark.slow(WhateverHappens.TestCase)
TestWhateverHappens.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@given(st.lists(st.tuples(costs, budgets, priorities), max_size=12), costs)
def test_with_one_slot_the_predicted_finish_is_the_sum_of_what_goes_first(
    arrivals: list[tuple[float, float, int]], cost_s: float
) -> None:
    queue = EdgeQueue(max_size=99)
    for cost, budget, priority in arrivals:
        try:
            queue.admit(ticket(deadline=budget, cost_s=cost, priority=priority), 0.0)
        except DeadlineExceeded:
            continue
    last = ticket(deadline=1e9, cost_s=cost_s)

    accepted = queue.admit(last, 0.0)

    total = cost_s
    assert accepted.queue_ahead == queue.queued - 1
    while (taken := queue.take(0.0)) is not None and taken is not last:
        total += taken.cost_s
        queue.finish(taken.id)
    assert accepted.finish_in_s == pytest.approx(total)


@pytest.mark.parametrize(("weights", "least", "most"), [({}, 7, 10), ({"image": 3.0}, 12, 15)])
def test_shares_divide_the_device_and_an_urgent_model_does_not_starve_the_others(
    weights: dict[str, float], least: int, most: int
) -> None:
    queue = EdgeQueue(max_size=99, shares=FairShare(weights, window_s=0.2))
    for _ in range(20):
        queue.admit(of_group("text", deadline=20.0), 0.0)
        queue.admit(of_group("image", deadline=1000.0), 0.0)
    taken = []
    for _ in range(20):
        one = queue.take(0.0)
        assert one is not None
        taken.append(one.group)
        queue.finish(one.id)
    assert least <= taken.count("image") <= most


def test_without_shares_deadlines_alone_decide() -> None:
    queue = EdgeQueue(max_size=99)
    tickets = [of_group("image", deadline=1000.0), *[of_group("text", deadline=20.0) for _ in range(5)]]
    for one in tickets:
        queue.admit(one, 0.0)
    assert drained(queue)[-1] == tickets[0].id
