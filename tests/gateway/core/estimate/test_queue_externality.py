"""What a request takes from those that wait already: the places it passes and their chances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.queue_externality import QueuePosition, insertion_cost
from tests.support.gateway.fleets import NOW


def due(in_s: float, weight: float = 1.0) -> QueuePosition:
    return QueuePosition(NOW + in_s, NOW + in_s, weight)


HEAD = (0.050, due(9.0))


@pytest.mark.parametrize(
    ("behind", "wait_s"),
    [
        ([], 0.050),
        ([(0.1, due(0.5))], 0.150),  # more urgent than ours: stays before it
        ([(0.1, due(9.0))], 0.050),  # passed
        ([(0.1, None)], 0.150),  # nothing is known of it
        ([(0.1, due(9.0)), (0.1, due(0.5)), (0.1, due(8.0))], 0.150),
    ],
)
def test_a_request_waits_for_the_head_and_for_whoever_is_more_urgent(
    behind: list[tuple[float, QueuePosition | None]], wait_s: float
) -> None:
    queue = [HEAD, *behind]
    total_s = sum(work_s for work_s, _ in queue)
    assert insertion_cost(queue, due(1.0), 0.1, total_s, NOW).wait_s == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("deadline_s", "harm"),
    [
        (5.00, 0.0),  # it has time enough for both
        (0.35, 0.9),  # with ours before it, it is late
        (0.01, 0.0),  # it is lost anyway: its own tenth of a second does not fit
    ],
)
def test_harm_is_the_chance_that_is_taken(deadline_s: float, harm: float) -> None:
    queue = [HEAD, (0.1, due(deadline_s))]
    assert insertion_cost(queue, due(0.005), 0.3, 0.150, NOW).harm == pytest.approx(harm, abs=0.1)


def test_harm_is_weighed_by_whom_it_meets() -> None:
    ordinary = insertion_cost([HEAD, (0.1, due(1.1))], due(0.5), 1.1, 0.15, NOW).harm
    important = insertion_cost([HEAD, (0.1, due(1.1, weight=2.0))], due(0.5), 1.1, 0.15, NOW).harm
    assert ordinary > 0.9
    assert important == pytest.approx(2 * ordinary)


def test_only_so_many_are_looked_at() -> None:
    queue = [HEAD, *[(0.001, due(2.0))] * 1000]
    assert insertion_cost(queue, due(1.0), 9.0, 1.05, NOW).harm <= 64.0


places = st.builds(due, st.floats(0.0, 3.0), st.sampled_from([0.25, 0.5, 1.0, 2.0]))


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.none() | places), max_size=12), places, st.floats(0.0, 1.0))
def test_waits_and_harm_stay_in_their_bounds(
    queue: list[tuple[float, QueuePosition | None]], place: QueuePosition, work_s: float
) -> None:
    total_s = sum(own_s for own_s, _ in queue)
    found = insertion_cost(queue, place, work_s, total_s, NOW)
    passed = sum(other.weight for _, other in queue[1:] if other and other.key > place.key)
    assert 0.0 <= found.wait_s <= total_s
    assert 0.0 <= found.harm <= passed + 1e-9
    assert insertion_cost(queue, place, 0.0, total_s, NOW).harm == 0.0
