"""The fault matrix's bench: what its short form plays, and for how long."""

from __future__ import annotations

from math import inf

import pytest

from tests.bench import stream_faults
from tests.bench.fault_rows.stalls import BUDGETS_MS, most_units
from tests.bench.faults import TRIALS, least_wall_s, wanted


def test_the_short_form_plays_its_rows_within_ten_minutes() -> None:
    short = wanted(None, quick=True)
    assert {one.row.number for one in short} == {one.row.number for one in TRIALS if one.quick}
    assert least_wall_s(short) <= 600.0
    assert least_wall_s(wanted(None, quick=False)) > least_wall_s(short)


def test_a_row_is_found_by_its_number_and_by_its_letter() -> None:
    assert [one.row.number for one in wanted("31b,32h", quick=True)] == ["31b", "32h"]
    assert [one.row.number[-1] for one in wanted("31", quick=True)] == list("abcdefghijkl")
    assert {one.foreign for one in wanted("32a,32l", quick=True)} == {True}


def test_rows_of_streams_are_found_likewise_and_no_number_is_used_twice() -> None:
    assert stream_faults.wanted("35,37") == ["35a", "35b", "37"]
    assert stream_faults.wanted(None) == list(stream_faults.NUMBERS)
    assert not {one.row.number for one in TRIALS} & set(stream_faults.NUMBERS)
    with pytest.raises(SystemExit, match="no row 4a"):
        stream_faults.wanted("4a")


def test_where_the_pool_is_gone_a_row_asks_of_edges_what_one_of_middle_speed_has_time_for() -> None:
    of_300_ms, of_1_s, of_2_s = [most_units("32", budget_ms) for budget_ms in BUDGETS_MS]
    assert 24 < of_300_ms < 64, "a call of 64 units takes 166 ms there"
    assert 128 < of_1_s < 256, "and one of 256 takes 744 ms"
    assert of_1_s < of_2_s < 512
    assert most_units("28", 300) == inf, "the pool does what edges cannot"
