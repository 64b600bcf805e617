"""The queue of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulator.event_queue import EventQueue
from tidegate.netsim.random_streams import stream


@given(st.lists(st.floats(0.0, 10.0), max_size=50))
def test_events_run_in_the_order_of_their_instants_and_then_of_their_scheduling(instants: list[float]) -> None:
    queue, ran = EventQueue(), list[tuple[float, int]]()
    for number, at in enumerate(instants):
        queue.schedule(at, lambda number=number: ran.append((queue.now, number)))

    queue.run()

    assert ran == sorted(ran)
    assert len(ran) == len(instants) == queue.executed


def test_an_event_that_was_cancelled_does_not_happen() -> None:
    queue, ran = EventQueue(), list[str]()
    queue.schedule(1.0, ran.append, "kept")
    gone = queue.schedule(0.5, ran.append, "gone")

    queue.cancel(gone)
    queue.run()

    assert ran == ["kept"]


def test_an_event_for_the_past_runs_now() -> None:
    queue, ran = EventQueue(), list[float]()

    def look_back() -> None:
        queue.schedule(1.0, lambda: ran.append(queue.now))

    queue.schedule(2.0, look_back)

    queue.run()

    assert ran == [2.0]


def test_running_until_an_instant_leaves_later_events_and_moves_the_time() -> None:
    queue, ran = EventQueue(), list[str]()
    queue.schedule(1.0, ran.append, "early")
    queue.schedule(3.0, ran.append, "late")

    queue.run(until=2.0)

    assert (ran, queue.now, len(queue)) == (["early"], 2.0, 1)
    assert repr(queue) == "<EventQueue at 2.000 s, 1 scheduled, 1 executed>"


def test_streams_are_the_same_for_the_same_name_and_different_for_others() -> None:
    def of(*names: object) -> list[float]:
        source = stream(7, *names)
        return [source.random() for _ in range(5)]

    assert of("link", 1) == of("link", 1)
    assert of("link", 1) != of("link", 2)
    assert [stream(8, "link", 1).random()] != of("link", 1)[:1]
