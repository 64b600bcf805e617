"""Length-aware grouping partitions requests into padded batches at the least cost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.batching.grouping import BatchLimits, WorkShape, cheapest_groups, padded_shape
from tests.support.gateway.formula import Formula


def row(length: int, rows: int = 1) -> WorkShape:
    return WorkShape(rows, length, float(rows * length))


def cpu_s(units: float) -> float:
    """torch fp32 on one core: docs/design/numbers.md, "Model cost"."""
    return 0.00836 + 0.000248 * units


def gpu_s(units: float) -> float:
    return 0.002 + 0.0000001 * units


def group_of_head(shapes: list[WorkShape], service_s: Callable[[float], float], limits: BatchLimits) -> list[int]:
    """The group of the first."""
    return next(group for group in cheapest_groups(shapes, Formula(service_s), limits) if 0 in group)


def lengths_of(group: list[int], shapes: list[WorkShape]) -> list[int]:
    return sorted(shapes[index].length for index in group)


def test_a_padded_batch_costs_as_if_all_rows_had_the_longest_ones_length() -> None:
    assert padded_shape([row(10), row(30, rows=2)]) == row(30, rows=3)


def test_a_long_row_does_not_pad_short_ones_on_a_cpu() -> None:
    shapes = [row(256), row(8), row(10), row(9)]
    assert group_of_head(shapes, cpu_s, BatchLimits(32)) == [0]


def test_short_rows_share_a_batch_whichever_of_them_is_the_head() -> None:
    shapes = [row(8), row(256), row(10), row(9)]
    assert lengths_of(group_of_head(shapes, cpu_s, BatchLimits(32)), shapes) == [8, 9, 10]


def test_on_a_device_with_a_flat_cost_everyone_travels_together() -> None:
    shapes = [row(256), row(8), row(10), row(9)]
    assert group_of_head(shapes, gpu_s, BatchLimits(32)) == [0, 1, 2, 3]


def test_a_row_joins_when_its_padding_costs_less_than_a_call() -> None:
    saved_tokens = 33  # what a call's fixed part is worth: 8.36 ms / 0.248 ms
    near, far = row(40 - saved_tokens), row(40 - saved_tokens - 2)
    assert group_of_head([row(40), near], cpu_s, BatchLimits(32)) == [0, 1]
    assert group_of_head([row(40), far], cpu_s, BatchLimits(32)) == [0]


def test_limits_count_rows_and_not_requests() -> None:
    shapes = [row(8, rows=3), row(8, rows=3), row(8, rows=2)]
    group = group_of_head(shapes, gpu_s, BatchLimits(max_rows=5))
    assert sum(shapes[index].rows for index in group) <= 5


def test_work_counts_padding() -> None:
    assert group_of_head([row(20), row(10)], gpu_s, BatchLimits(32, max_work=40.0)) == [0, 1]
    assert group_of_head([row(20), row(10)], gpu_s, BatchLimits(32, max_work=39.0)) == [0]


def test_what_does_not_fit_is_left_over_from_those_whose_turn_is_last() -> None:
    assert group_of_head([row(8)] * 5, gpu_s, BatchLimits(max_rows=3)) == [0, 1, 2]


def test_company_never_makes_the_head_late() -> None:
    shapes = [row(8) for _ in range(8)]
    group = group_of_head(shapes, cpu_s, BatchLimits(32, max_s=cpu_s(24)))
    assert 0 in group
    assert len(group) == 3


def test_a_request_over_the_limits_runs_by_itself() -> None:
    assert group_of_head([row(300, rows=9), row(300)], gpu_s, BatchLimits(max_rows=4, max_work=100.0)) == [0]


def test_who_has_little_room_is_in_short_batches_only() -> None:
    shapes = [row(8)] * 6
    rooms_s = [cpu_s(16) + 1e-9, *[1.0] * 5]
    groups = cheapest_groups(shapes, Formula(cpu_s), BatchLimits(32), rooms_s)
    assert sorted(map(len, groups)) == [2, 4]
    assert len(next(group for group in groups if 0 in group)) == 2


shapes_lists = st.lists(st.builds(row, st.integers(1, 256), st.integers(1, 6)), min_size=1, max_size=80)


@pytest.mark.slow
@given(shapes_lists, st.integers(1, 16), st.sampled_from([inf, 512.0, 4096.0]), st.sampled_from([cpu_s, gpu_s]))
def test_a_group_holds_the_head_and_stays_within_its_limits(shapes, max_rows, max_work, service_s) -> None:  # type: ignore[no-untyped-def]
    group = group_of_head(shapes, service_s, BatchLimits(max_rows, max_work))
    members = [shapes[index] for index in group]
    assert 0 in group
    assert len(set(group)) == len(group)
    assert len(group) == 1 or (
        sum(shape.rows for shape in members) <= max_rows and padded_shape(members).units <= max_work
    )


@pytest.mark.slow
@given(shapes_lists, st.integers(1, 16))
def test_everybody_is_in_one_group(shapes: list[WorkShape], max_rows: int) -> None:
    groups = cheapest_groups(shapes, Formula(cpu_s), BatchLimits(max_rows))
    assert sorted(index for group in groups for index in group) == list(range(len(shapes)))


@pytest.mark.slow
@given(shapes_lists)
def test_a_group_never_costs_more_than_its_members_alone(shapes: list[WorkShape]) -> None:
    members = [shapes[index] for index in group_of_head(shapes, cpu_s, BatchLimits(16))]
    assert cpu_s(padded_shape(members).units) <= sum(cpu_s(shape.units) for shape in members) + 1e-12


def cheapest_partition_s(lengths: list[int]) -> float:
    """By brute force over all contiguous partitions of the sorted lengths."""
    ordered, n = sorted(lengths), len(lengths)
    costs = []
    for cuts in range(n):
        for at in combinations(range(1, n), cuts):
            bounds = [0, *at, n]
            groups = [ordered[a:b] for a, b in pairwise(bounds)]
            costs.append(sum(cpu_s(max(group) * len(group)) for group in groups))
    return min(costs)


@pytest.mark.parametrize("lengths", [[4, 9, 40, 41, 90], [12] * 5, [5, 30, 55, 80, 105, 130], [256, 4, 4, 4, 60, 61]])
def test_taking_the_heads_group_again_and_again_gives_the_cheapest_partition(lengths: list[int]) -> None:
    left, total_s = [row(length) for length in sorted(lengths)], 0.0
    while left:
        group = group_of_head(left, cpu_s, BatchLimits(32))
        total_s += cpu_s(padded_shape([left[index] for index in group]).units)
        left = [shape for index, shape in enumerate(left) if index not in group]
    assert total_s == pytest.approx(cheapest_partition_s(lengths))


def cheapest_by_looking_at_one_run_after_another(
    shapes: list[WorkShape], limits: BatchLimits, rooms_s: list[float]
) -> float:
    """Seconds of the plan by the same rules, without arrays."""
    order = sorted(range(len(shapes)), key=lambda index: (shapes[index].length, -index))
    best_s = [0.0]
    for end, last in enumerate(order):
        rows, cells, room_s, run_s, least_s = 0, 0.0, inf, 0.0, inf
        for start in range(end, -1, -1):
            shape, alone_s = shapes[order[start]], cpu_s(shapes[order[start]].units)
            rows, cells, room_s = (
                rows + shape.rows,
                cells + shape.cells,
                min(room_s, rooms_s[order[start]], limits.max_s),
            )
            units = cells * shapes[last].length
            too_large = rows > limits.max_rows or units > limits.max_work or cpu_s(units) > room_s
            if start < end and (too_large or cpu_s(units) - run_s > alone_s):
                break
            run_s = cpu_s(units)
            least_s = min(least_s, best_s[start] + run_s)
        best_s.append(least_s)
    return best_s[-1]


@pytest.mark.slow
@given(
    shapes_lists,
    st.integers(1, 16),
    st.sampled_from([inf, 512.0, 4096.0]),
    st.sampled_from([inf, 0.03, 0.3]),
    st.integers(0, 7),
)
def test_pricing_all_runs_at_once_finds_what_one_after_another_finds(
    shapes: list[WorkShape], max_rows: int, max_work: float, max_s: float, tight: int
) -> None:
    limits = BatchLimits(max_rows, max_work, max_s)
    rooms_s = [0.02 if index % 8 < tight else 1.0 for index in range(len(shapes))]
    groups = cheapest_groups(shapes, Formula(cpu_s), limits, rooms_s)
    total_s = sum(cpu_s(padded_shape([shapes[index] for index in group]).units) for group in groups)
    assert total_s == pytest.approx(cheapest_by_looking_at_one_run_after_another(shapes, limits, rooms_s))


def cheapest_split_s(alike: int, service_s: Callable[[int], float], most: int) -> float:
    """Seconds of so many requests that are alike, in groups of at most `most`, by looking at all splits."""
    best_s = [0.0]
    for count in range(1, alike + 1):
        best_s.append(min(service_s(size) + best_s[count - size] for size in range(1, min(count, most) + 1)))
    return best_s[-1]


@pytest.mark.parametrize("service_s", [cpu_s, gpu_s, lambda units: 0.001 * units**0.7], ids=["line", "flat", "curve"])
@pytest.mark.parametrize("limits", [BatchLimits(1), BatchLimits(4), BatchLimits(32), BatchLimits(32, 100.0)])
def test_requests_that_are_alike_cost_what_the_best_of_all_splits_costs(
    service_s: Callable[[float], float], limits: BatchLimits
) -> None:
    most = int(min(limits.max_rows, limits.max_work // 16))
    for alike in range(2, 65, 7):
        shapes = [row(16)] * alike
        groups = cheapest_groups(shapes, Formula(service_s), limits)
        total_s = sum(service_s(16.0 * len(group)) for group in groups)
        assert total_s == pytest.approx(cheapest_split_s(alike, lambda size: service_s(16.0 * size), most))
        assert sorted(index for group in groups for index in group) == list(range(alike))


def test_of_requests_that_are_alike_those_whose_turn_is_first_fill_the_first_batch() -> None:
    groups = cheapest_groups([row(16)] * 70, Formula(cpu_s), BatchLimits(32))
    assert groups == [list(range(32)), list(range(32, 64)), list(range(64, 70))]


def test_full_batches_of_requests_that_are_alike_are_no_rule_where_each_one_more_costs_more() -> None:
    def knee_s(units: float) -> float:
        return 0.010 + (0.0 if units <= 64 else 0.0004 * (units - 64))

    groups = cheapest_groups([row(16)] * 8, Formula(knee_s), BatchLimits(32))
    assert [len(group) for group in groups] == [4, 4]
