"""What a call is expected to take on this device, today."""

from __future__ import annotations

import pytest

from tidegate.estimate.service_time import ServiceTime


def test_a_fresh_device_is_taken_at_its_tables_word() -> None:
    time = ServiceTime([(10, 0.010), (110, 0.110)])

    assert time.predict_s(60) == pytest.approx(0.060)


def test_a_throttled_device_is_priced_up_for_all_sizes_of_work() -> None:
    time = ServiceTime([(10, 0.010), (110, 0.110)])

    for _ in range(60):
        time.record(10, 0.020)

    assert time.predict_s(60) == pytest.approx(0.120, rel=0.1)


def test_it_prints_table_and_correction() -> None:
    time = ServiceTime([(1, 0.001)])

    assert repr(time) == ("<ServiceTime <CostTable 1:1.00ms … 1:1.00ms> <LogResidual x1.00 sigma 0.25 after 0 calls>>")
