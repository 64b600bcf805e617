"""The expected duration of a call on this device, corrected by its recent calls."""

from __future__ import annotations

from math import e

import pytest

from tidegate.estimate.service_time import FORGET_S, ServiceTime


def test_a_fresh_device_is_taken_at_its_tables_word() -> None:
    time = ServiceTime([(10, 0.010), (110, 0.110)])

    assert time.predict_s(60) == pytest.approx(0.060)


def test_a_throttled_device_is_priced_up_for_all_sizes_of_work() -> None:
    time = ServiceTime([(10, 0.010), (110, 0.110)])

    for _ in range(60):
        time.record(10, 0.020)

    assert time.predict_s(60) == pytest.approx(0.120, rel=0.1)


def test_a_factor_fades_while_nothing_is_computed_and_holds_while_something_is() -> None:
    time = ServiceTime([(10, 0.010)])
    for _ in range(80):
        time.record(10, 0.040)
    learned = time.predict_s(10)

    time.relax(100.0)
    assert time.predict_s(10) == learned  # the first look only starts the watch

    time.record(10, 0.040)
    time.relax(400.0)
    assert time.predict_s(10) >= learned * 0.99  # there was a call since

    time.relax(400.0 + FORGET_S)
    assert time.predict_s(10) == pytest.approx(0.010 * 4 ** (1 / e), rel=0.1)
    time.relax(400.0 + 10 * FORGET_S)
    assert time.predict_s(10) == pytest.approx(0.010, rel=0.01)


def test_a_clock_that_stands_still_forgets_nothing() -> None:
    time = ServiceTime([(10, 0.010)])
    time.record(10, 0.040)
    before = time.predict_s(10)

    time.relax(5.0)
    time.relax(5.0)
    time.relax(4.0)

    assert time.predict_s(10) == before


def test_it_prints_table_and_correction() -> None:
    time = ServiceTime([(1, 0.001)])

    assert repr(time) == ("<ServiceTime <CostTable 1:1.00ms … 1:1.00ms> <LogResidual x1.00 sigma 0.25 after 0 calls>>")
