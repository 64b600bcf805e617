"""The cost table reads between measured points and is never fooled by noise into calling more work cheaper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.estimate.cost_table import CostTable

POINTS = [(8.0, 0.002), (32.0, 0.004), (128.0, 0.0136)]


@pytest.mark.parametrize(
    ("units", "seconds"),
    [(1, 0.002), (8, 0.002), (20, 0.003), (32, 0.004), (80, 0.0088), (128, 0.0136), (224, 0.0232)],
)
def test_service_time_is_flat_below_the_first_point_linear_between_and_extrapolated_beyond(
    units: float, seconds: float
) -> None:
    assert CostTable(POINTS).seconds_for(units) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("points", "units", "floor"),
    [
        (POINTS, 32, 0.004),
        (POINTS, 1000, 0.0136),  # beyond the table nothing is proved but what its last point took
        ([(8, 0.002), (32, 0.040), (128, 0.0136)], 32, 0.0136),  # more work took less: 40 ms were a hiccup
        ([(8, 0.002), (32, 0.040), (128, 0.0136)], 20, 0.0136),
        ([(8, 0.002), (32, 0.040), (128, 0.0136)], 8, 0.002),
        ([(10, 0.5)], 1000, 0.5),
    ],
)
def test_the_floor_is_no_more_than_any_call_of_as_much_work_took(
    points: list[tuple[float, float]], units: float, floor: float
) -> None:
    assert CostTable(points).floor_for(units) == pytest.approx(floor)


def test_a_single_point_is_a_constant() -> None:
    assert CostTable([(10, 0.5)]).seconds_for(1000) == 0.5


def test_the_order_in_which_points_come_does_not_matter() -> None:
    assert CostTable(POINTS[::-1]).points == CostTable(POINTS).points == POINTS


@pytest.mark.parametrize(
    "points", [[], [(1, 0.0)], [(1, -1.0)], [(-1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, float("nan"))]]
)
def test_points_that_cannot_be_a_measurement_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="cost"):
        CostTable(points)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.floats(1e-6, 10)), min_size=1, max_size=8, unique_by=lambda point: point[0]
    ),
    st.floats(0, 5000),
    st.floats(0, 5000),
)
def test_a_prediction_is_always_positive_and_finite(points: list[tuple[float, float]], a: float, b: float) -> None:
    table = CostTable(points)
    assert 0 < table.seconds_for(a) < float("inf")
    assert 0 < table.seconds_for(b) < float("inf")


def test_its_repr_shows_the_range() -> None:
    assert repr(CostTable(POINTS)) == "<CostTable 8:2.00ms … 128:13.60ms>"
