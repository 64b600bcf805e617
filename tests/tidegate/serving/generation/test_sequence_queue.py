"""The sequence queue lets generations begin, makes them wait, and refuses them."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.outcome import DeadlineExceeded, OutOfMemory, Overloaded
from tidegate.priority import LEVEL_S
from tidegate.serving.generation.sequence_queue import OPTIMISM, QueuePlace, SequenceQueue, SequenceTicket

_ids = count(1)


def ticket(
    deadline: float = 10.0,
    *,
    certain_s: float = 0.1,
    expected_s: float = 1.0,
    cache: int = 0,
    priority: int = 0,
    first_by: float = inf,
    first_s: float = 0.0,
) -> SequenceTicket:
    return SequenceTicket(next(_ids), deadline, certain_s, expected_s, cache, priority, first_by, first_s)


def queue_of(*tickets: SequenceTicket, slots: int = 1, limit_bytes: float = inf, max_size: int = 8) -> SequenceQueue:
    queue = SequenceQueue(max_size=max_size)
    queue.open("w", slots=slots, limit_bytes=limit_bytes)
    for one in tickets:
        queue.admit(one, 0.0)
    return queue


def begun(queue: SequenceQueue, now: float = 0.0) -> list[int]:
    """The ids of those that may begin now."""
    ids = []
    while (taken := queue.take(now)) is not None:
        ids.append(taken[0].id)
    return ids


def test_the_earliest_latest_start_begins_first_and_no_more_than_there_are_slots() -> None:
    late, early = ticket(5.0), ticket(3.0)
    long_prompt = ticket(5.0, certain_s=4.0)  # has to begin by 2.6, which is before the others have to
    queue = queue_of(late, early, long_prompt, slots=2)

    assert begun(queue) == [long_prompt.id, early.id]
    queue.leave(early.id)
    assert begun(queue) == [late.id]


def test_the_one_that_has_to_begin_first_to_keep_its_first_token_begins_first() -> None:
    whole, slow, quick = ticket(3.0), ticket(9.0, first_by=1.0, first_s=0.7), ticket(9.0, first_by=0.8, first_s=0.1)

    assert begun(queue_of(whole, quick, slow, slots=3)) == [slow.id, quick.id, whole.id]


def test_what_is_late_for_its_first_token_goes_behind_what_can_still_make_it() -> None:
    late, on_time = ticket(5.0, first_by=0.5, first_s=0.1), ticket(9.0, first_by=2.0, first_s=0.1)
    queue = queue_of(late, on_time, slots=2)

    assert begun(queue, 0.4) == [on_time.id, late.id]  # from 0.4 on it could not make it any more


def test_a_late_one_stands_behind_those_on_time_in_what_it_is_told_as_well() -> None:
    queue = queue_of(ticket(9.0, first_by=2.0), ticket(9.0, first_by=2.0), slots=0)

    assert queue.admit(ticket(5.0, first_by=0.1), 0.2).ahead == 2
    assert queue.admit(ticket(9.0, first_by=2.0), 0.2).ahead == 2  # and not behind that one
    assert queue.admit(ticket(9.0, first_by=1.0), 0.2).ahead == 0


def test_a_late_one_is_not_starved_by_those_that_keep_coming_on_time() -> None:
    queue, late = queue_of(slots=1, max_size=32), ticket(5.0, first_by=0.5, expected_s=1.0)
    queue.admit(late, 0.0)
    begun_at = None
    for tenth in range(6, 50):  # always one that is on time waits as well
        queue.admit(ticket(tenth / 10 + 8.0, first_by=tenth / 10 + 0.6), tenth / 10)
        taken = queue.take(tenth / 10)
        assert taken is not None
        queue.leave(taken[0].id)
        if taken[0].id == late.id:
            begun_at = tenth / 10
            break

    assert begun_at is not None and 3.4 <= begun_at <= 4.2  # when it has to, to be whole by 5.0


def test_far_too_many_late_ones_leave_three_starts_of_four_to_those_on_time() -> None:
    queue = queue_of(slots=1, max_size=64)
    late = {(one := ticket(5.0, first_by=0.1, expected_s=1.0)).id: queue.admit(one, 0.0) for _ in range(20)}
    for _ in range(20):
        queue.admit(ticket(20.0, first_by=4.9), 4.5)
    order = []
    for _ in range(16):
        taken = queue.take(4.5)
        assert taken is not None
        order.append(taken[0].id in late)
        queue.leave(taken[0].id)

    assert order == [False, False, False, True] * 4


def test_a_level_of_priority_is_worth_a_stretch_of_deadline() -> None:
    usual, high = ticket(5.0), ticket(5.0 + 0.9 * LEVEL_S, priority=1)

    assert begun(queue_of(usual, high, slots=2)) == [high.id, usual.id]


def test_the_first_in_order_waits_for_memory_and_nothing_passes_it() -> None:
    held, large, small = ticket(1.0, cache=60), ticket(2.0, cache=50), ticket(3.0, cache=10)
    queue = queue_of(held, slots=4, limit_bytes=100)
    assert begun(queue) == [held.id] and queue.reserved_bytes == 60
    queue.admit(large, 0.0)
    queue.admit(small, 0.0)

    assert begun(queue) == []
    queue.leave(held.id)
    assert begun(queue) == [large.id, small.id] and queue.reserved_bytes == 60


def test_what_can_never_fit_is_refused_with_what_it_needs_and_what_there_is() -> None:
    queue = queue_of(limit_bytes=1000)
    queue.open("larger", slots=1, limit_bytes=1500)

    with pytest.raises(OutOfMemory, match=r"1501 bytes, and there are 1500 .*max_tokens"):
        queue.admit(ticket(cache=1501), 0.0)
    queue.admit(ticket(cache=1500), 0.0)
    assert queue.take(0.0) is not None and queue.reserved_bytes == 1500


def test_the_full_queue_refuses_until_a_slot_should_be_free() -> None:
    queue = queue_of(max_size=1)
    queue.admit(ticket(expected_s=4.0), 0.0)
    assert queue.take(0.0) is not None
    queue.admit(ticket(expected_s=2.0), 0.0)

    with pytest.raises(Overloaded, match="1 generations wait") as caught:
        queue.admit(ticket(), 1.0)
    assert caught.value.retry_after_s == pytest.approx(5.0)


def test_only_what_is_late_for_sure_is_refused() -> None:
    queue = queue_of()
    with pytest.raises(DeadlineExceeded, match="takes 1000 ms at least, but 600 ms are left"):
        queue.admit(ticket(0.6, certain_s=1.0), 0.0)
    with pytest.raises(DeadlineExceeded, match="but 0 ms are left"):
        queue.admit(ticket(-3.0, certain_s=1.0), 0.0)
    queue.admit(ticket(0.6 + 1e-6, certain_s=1.0, expected_s=60.0), 0.0)
    assert queue.next_wake() == pytest.approx(1e-6)


def test_one_that_waits_is_given_up_when_it_is_late_for_sure() -> None:
    running, waiting = ticket(10.0), ticket(2.0, certain_s=1.0)
    queue = queue_of(running)
    begun(queue)
    queue.admit(waiting, 0.0)

    assert queue.next_wake() == 2.0 - OPTIMISM * 1.0
    assert queue.expire(1.39) == []
    assert queue.expire(1.4) == [waiting] and queue.next_wake() is None
    assert begun(queue, 1.4) == []


def test_places_share_one_queue_and_the_least_busy_begins_next() -> None:
    queue = queue_of(slots=2)
    queue.open("v", slots=4)
    places = []
    for _ in range(6):
        queue.admit(ticket(), 0.0)
        taken = queue.take(0.0)
        assert taken is not None
        places.append(taken[1])
    assert sorted(places) == ["v"] * 4 + ["w"] * 2 and places[0] != places[1]
    queue.admit(ticket(), 0.0)
    assert queue.take(0.0) is None


def test_a_place_that_is_gone_takes_along_what_has_begun_and_the_last_one_all_that_waits() -> None:
    first, second = ticket(1.0), ticket(2.0)
    queue = queue_of(first, slots=1)
    queue.open("v", slots=1)
    begun(queue)
    queue.admit(second, 0.0)
    begun(queue)
    third = ticket(3.0)
    queue.admit(third, 0.0)

    assert queue.close("w") == [] and queue.in_flight == 1
    assert queue.close("v") == [third]
    assert (queue.queued, queue.in_flight, queue.has_places, queue.slots) == (0, 0, False, 0)
    assert queue.close("v") == []
    queue.leave(first.id)  # its caller hears of it later


def test_a_place_that_retires_begins_nothing_more() -> None:
    queue = queue_of(ticket(1.0), slots=2)
    (running,) = begun(queue)
    queue.admit(ticket(2.0), 0.0)

    assert queue.retire("w") == 1 and begun(queue) == []
    queue.leave(running)
    assert queue.retire("w") == 0
    queue.open("successor", slots=2)
    assert len(begun(queue)) == 1


def test_the_wait_is_predicted_by_when_slots_should_be_free() -> None:
    queue = queue_of(ticket(9.0, expected_s=3.0), ticket(9.0, expected_s=5.0), slots=2)
    assert queue.wait_s(0.0) == pytest.approx(3.0)  # behind both, of which none has begun
    begun(queue)
    assert queue.wait_s(1.0) == pytest.approx(2.0)
    assert queue.admit(ticket(20.0, expected_s=10.0), 1.0) == QueuePlace(2, pytest.approx(2.0))  # type: ignore[arg-type]
    assert queue.admit(ticket(30.0), 1.0) == QueuePlace(3, pytest.approx(4.0))  # type: ignore[arg-type]
    assert queue.admit(ticket(8.0), 1.0).ahead == 2  # it passes both that wait
    assert SequenceQueue(max_size=1).wait_s(0.0) == 0.0


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, slots and memory are kept, and nothing is lost or begun late."""

    @initialize(slots=st.integers(1, 3), limit=st.sampled_from([50.0, 100.0, inf]), size=st.integers(1, 5))
    def begin(self, slots: int, limit: float, size: int) -> None:
        self.queue = SequenceQueue(max_size=size)
        self.slots, self.limit, self.size, self.now = slots, limit, size, 0.0
        self.open: set[str] = set()
        self.names = count(1)
        self.waiting: dict[int, SequenceTicket] = {}
        self.running: dict[int, tuple[SequenceTicket, str]] = {}

    @rule()
    def a_worker_comes(self) -> None:
        name = f"w{next(self.names)}"
        self.queue.open(name, slots=self.slots, limit_bytes=self.limit)
        self.open.add(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_worker_goes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        given_up = self.queue.close(name)
        self.open.discard(name)
        self.running = {id: one for id, one in self.running.items() if one[1] != name}
        assert sorted(one.id for one in given_up) == (sorted(self.waiting) if not self.open else [])
        if not self.open:
            self.waiting.clear()

    @precondition(lambda self: self.open)
    @rule(
        budget_s=st.floats(-1.0, 20.0),
        certain_s=st.floats(0.0, 5.0),
        cache=st.integers(0, 120),
        priority=st.integers(0, 4),
    )
    def a_request_comes(self, budget_s: float, certain_s: float, cache: int, priority: int) -> None:
        one = ticket(
            self.now + budget_s, certain_s=certain_s, expected_s=certain_s + 1.0, cache=cache, priority=priority
        )
        try:
            stands = self.queue.admit(one, self.now)
        except OutOfMemory:
            assert cache > self.limit
        except Overloaded:
            assert len(self.waiting) == self.size
        except DeadlineExceeded:
            assert budget_s <= OPTIMISM * certain_s + 1e-9
        else:
            assert 0 <= stands.ahead <= len(self.waiting) + len(self.running) and stands.wait_s >= 0.0
            self.waiting[one.id] = one

    @rule()
    def the_next_begins(self) -> None:
        taken = self.queue.take(self.now)
        ready = [one for one in self.waiting.values() if self.now < one.latest_start]
        if taken is None:
            first = min(ready, key=lambda one: one.key, default=None)
            assert first is None or not any(self.fits(first, name) for name in self.open)
            return
        one, place = taken
        assert one.key == min(other.key for other in ready) and self.fits(one, place)
        del self.waiting[one.id]
        self.running[one.id] = one, place

    @rule(passes_s=st.floats(0.0, 10.0))
    def time_passes(self, passes_s: float) -> None:
        self.now += passes_s
        late = self.queue.expire(self.now)
        assert {one.id for one in late} == {id for id, one in self.waiting.items() if self.now >= one.latest_start}
        for one in late:
            del self.waiting[one.id]

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted({*self.waiting, *self.running})))
        self.queue.leave(id)
        self.waiting.pop(id, None)
        self.running.pop(id, None)

    def at(self, name: str) -> list[SequenceTicket]:
        return [one for one, place in self.running.values() if place == name]

    def fits(self, one: SequenceTicket, name: str) -> bool:
        there = self.at(name)
        return len(there) < self.slots and sum(other.cache_bytes for other in there) + one.cache_bytes <= self.limit

    @invariant()
    def slots_and_memory_are_kept(self) -> None:
        if not hasattr(self, "queue"):
            return
        for name in self.open:
            there = self.at(name)
            assert len(there) <= self.slots and sum(one.cache_bytes for one in there) <= self.limit
        assert (self.queue.queued, self.queue.in_flight) == (len(self.waiting), len(self.running))
        assert self.queue.reserved_bytes == sum(one.cache_bytes for one, _ in self.running.values())
        assert self.queue.wait_s(self.now) >= 0.0
        wake_at = self.queue.next_wake()
        assert (wake_at is None) == (not self.waiting)


TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)
