"""True costs by size, and the computations that are read from a recording."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.history.trace_format import RecordedAttempt, RecordedRequest
from simulator.replay.recorded_calls import calls_of
from simulator.world.true_costs import true_tables
from tidegate.estimate.cost_table import CostTable

TABLE = ((1.0, 10.0), (16.0, 20.0), (256.0, 300.0))


def answered(at_s: float, compute_s: float, *, batch: int = 1, units: float = 10.0, rows: int = 1,
             took_s: float = 0.1) -> tuple[RecordedRequest, RecordedAttempt]:  # fmt: skip
    attempt = RecordedAttempt(
        "pool/a", "fp32", "only",
        at_s=0.0, took_s=took_s, end="answered", queue_s=0.0, compute_s=compute_s, link_s=0.001, batch=batch,
    )  # fmt: skip
    request = RecordedRequest(
        at_s, "m", "oip-http", "ok",
        elapsed_s=0.1, budget_s=1.0, gateway_s=0.0, version="1", units=units, rows=rows,
    )  # fmt: skip
    return request, attempt


def times(tables: dict[str, tuple[tuple[float, float], ...]], id: str, units: float) -> float:
    """What a call of this size takes by the table that was found, against the one that was told."""
    return CostTable(tables[id]).seconds_for(units) / CostTable(TABLE).seconds_for(units)


def test_a_table_that_is_wrong_for_large_calls_is_mended_there_and_nowhere_else() -> None:
    # given a table whose last point is a quarter too slow, and calls of all sizes
    sizes = [2.0, 4.0, 8.0, 16.0, 32.0] * 40 + [128.0, 256.0] * 40
    found = true_tables({"a": TABLE}, {"a": [(units, 0.8 if units > 100 else 1.0) for units in sizes]})
    assert times(found, "a", 256.0) / times(found, "a", 8.0) == pytest.approx(0.8, rel=0.03)
    assert times(found, "a", 4.0) == pytest.approx(times(found, "a", 16.0), rel=0.02)


def test_a_target_that_was_sent_one_size_only_is_for_the_others_as_its_tier_is() -> None:
    # given four alike, whose calls take 1.1 times as long, but large ones 0.8 times; one was sent large ones only
    mixed = [(8.0, 1.1), (256.0, 0.8)] * 50
    calls = {"a": mixed, "b": mixed, "c": mixed, "large": [(256.0, 0.8)] * 50}
    found = true_tables(dict.fromkeys(calls, TABLE), calls)
    own_s = 0.8 / times(found, "large", 256.0)  # how slow it is all in all, which is told apart from the table
    assert own_s * times(found, "large", 8.0) == pytest.approx(1.1, rel=0.05)


def test_a_device_that_was_slower_than_its_tier_keeps_its_table_and_is_slower_at_every_size() -> None:
    calls = {"a": [(8.0, 1.0), (256.0, 1.0)] * 50, "hot": [(8.0, 3.0), (256.0, 3.0)] * 50}
    found = true_tables(dict.fromkeys(calls, TABLE), calls)
    for units in (1.0, 8.0, 100.0, 256.0):
        assert times(found, "hot", units) == pytest.approx(1.0, rel=0.05)


def test_a_target_that_was_sent_nothing_takes_what_its_tier_takes() -> None:
    found = true_tables({"a": TABLE, "idle": TABLE}, {"a": [(8.0, 1.2)] * 50})
    assert times(found, "idle", 8.0) == pytest.approx(1.2)
    assert times(true_tables({"idle": TABLE}, {}), "idle", 8.0) == pytest.approx(1.0)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.01, 100.0)), max_size=60))
def test_a_table_of_whatever_was_seen_lies_between_the_least_and_the_most_of_it(
    seen: list[tuple[float, float]],
) -> None:
    ratios = [1.0, *(ratio for _, ratio in seen)]
    most = max(ratios) / min(ratios)
    for units, ms in true_tables({"a": TABLE}, {"a": seen})["a"]:
        assert 1.0 / most - 1e-9 <= ms / CostTable(TABLE).seconds_for(units) <= most * (1.0 + 1e-9)


def test_a_batch_is_put_together_from_its_members_with_what_was_padded() -> None:
    # given two batches, shuffled, of which one lost a member
    whole = [answered(1.0 + 0.001 * n, 0.0305, batch=3, units=units) for n, units in enumerate((10.0, 40.0, 20.0))]
    broken = [answered(2.0, 0.0501, batch=2)]
    told = [*whole, *broken, answered(3.0, 0.004)]
    Random(1).shuffle(told)
    assert [(one.units, one.took_s) for one in calls_of(told)] == [(120.0, 0.0305), (10.0, 0.004)]


def test_two_batches_that_took_the_same_to_the_microsecond_are_two() -> None:
    told = [
        answered(at, 0.03, batch=2, units=units) for at, units in ((1.0, 5.0), (1.01, 10.0), (7.0, 20.0), (7.01, 1.0))
    ]
    assert [(one.at_s, one.units) for one in calls_of(told)] == [(1.0, 20.0), (7.0, 40.0)]


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.sampled_from([0.01, 0.02]), st.integers(1, 4), st.integers(1, 3))))
def test_no_answer_is_in_two_calls(rows: Sequence[tuple[float, float, int, int]]) -> None:
    told = [answered(at, took, batch=batch, rows=own, units=float(own)) for at, took, batch, own in rows]
    found = calls_of(told)
    assert sum(one.units for one in found) <= sum(request.units or 0.0 for request, _ in told) + 1e-9
