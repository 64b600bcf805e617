"""The fault matrix's bench: what its short form plays, and for how long."""

from __future__ import annotations

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
