"""The watchdog decides how long a batch may take before it counts as stuck."""

from __future__ import annotations

import pytest

from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.latency_model import LatencyModel
from cloud_pool.core.health.watchdog import FLOOR_S, batch_patience_s
from tidegate.workers.watchdog import LONGEST, RATIO, remaining_patience_s

BATCH = WorkShape(10, 10, 100.0)


def test_a_short_batch_gets_the_floor() -> None:
    assert batch_patience_s(LatencyModel([(1.0, 0.01), (100.0, 0.1)]), BATCH) == FLOOR_S


def test_a_long_one_gets_six_times_its_99th_percentile() -> None:
    model = LatencyModel([(1.0, 1.0), (100.0, 4.0)])
    for number in range(200):
        model.record(100.0, 10.0, 4.0 if number % 10 else 5.0)
    assert batch_patience_s(model, BATCH) == pytest.approx(RATIO * 5.0, rel=0.1)


def test_a_device_that_has_become_slower_gets_more() -> None:
    model = LatencyModel([(1.0, 1.0), (100.0, 4.0)])
    for _ in range(100):
        model.record(100.0, 10.0, 4.0)
    before_s = batch_patience_s(model, BATCH)
    for _ in range(100):
        model.record(100.0, 10.0, 12.0)
    assert batch_patience_s(model, BATCH) > 2.0 * before_s


@pytest.mark.parametrize(
    ("elapsed_s", "excused_s", "left"),
    [
        (2.0, 0.0, 0.0),  # asleep, or spinning: stuck
        (2.0, 1.5, 1.5),  # it ran for half a second
        (3.5, 1.5, 0.0),
        (2.0 * LONGEST, 2.0 * LONGEST, 0.0),  # nobody waits for ever
        (9.0, 9.0, 1.0),
    ],
)
def test_seconds_in_which_it_was_kept_from_running_do_not_count(
    elapsed_s: float, excused_s: float, left: float
) -> None:
    assert remaining_patience_s(2.0, elapsed_s=elapsed_s, excused_s=excused_s) == pytest.approx(left)
