"""Ages of messages between two clocks that have nothing in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet_sync.report_age import ClocklessAge


def test_before_any_message_there_is_no_date() -> None:
    assert ClocklessAge().said_at is None


def test_a_message_under_way_for_long_is_dated_by_the_fastest_one() -> None:
    age = ClocklessAge()
    age.record(m=1000.0, received_at=10.0)
    age.record(m=1005.0, received_at=18.0)  # three seconds late
    assert age.said_at == pytest.approx(15.0)
    assert repr(age) == "<ClocklessAge said at 15.0>"


def test_a_minute_lets_go_of_an_offset_that_drift_made_wrong() -> None:
    age = ClocklessAge(window_s=60.0)
    for second in range(600):
        age.record(m=second * (1 - 200e-6), received_at=float(second))
    assert age.said_at == pytest.approx(599.0, abs=0.02)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_order_and_duplicates_change_nothing_and_nothing_is_dated_after_its_arrival(
    sent: list[tuple[float, float]], random: object
) -> None:
    arrivals = [(at + 777.0, at + delay) for at, delay in sent]
    in_order, shuffled = ClocklessAge(1e9), ClocklessAge(1e9)
    for m, received_at in arrivals:
        in_order.record(m, received_at)
    again = arrivals + arrivals
    random.shuffle(again)  # type: ignore[attr-defined]
    for m, received_at in again:
        shuffled.record(m, received_at)
    assert in_order.said_at == shuffled.said_at
    assert in_order.said_at is not None
    newest = max(m for m, _ in arrivals)
    assert in_order.said_at <= min(received_at for m, received_at in arrivals if m == newest)
