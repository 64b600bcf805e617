"""Whose turn it is while two versions are on trial, and what is known of both."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplit, TrafficSplits
from gateway.core.versions.version_figures import ALIKE, Agreement, VersionFigures, wilson_interval

SPLIT = TrafficSplit("1", "2", share=0.1, tenants=("acme",))
SET = TrafficSplits({"minilm": SPLIT}, {"digits": "3"})


@pytest.mark.parametrize(
    ("model", "wish", "tenant", "draw", "turn"),
    [
        ("minilm", "", "", 0.5, ("1",)),
        ("minilm", "", "", 0.09, ("2", "1")),
        ("minilm", "", "acme", 0.9, ("2", "1")),
        ("minilm", "candidate", "", 0.9, ("2",)),
        ("minilm", "standing", "acme", 0.0, ("1",)),
        ("minilm", "7", "acme", 0.0, ("7",)),
        ("digits", "", "", 0.0, ("3",)),
        ("digits", "candidate", "", 0.0, ("3",)),  # a header that outlives its trial does no harm
        ("digits", "2", "", 0.0, ("2",)),
        ("other", "", "", 0.0, ()),
        ("other", "standing", "", 0.0, ()),
    ],
)
def test_whose_turn_it_is(model: str, wish: str, tenant: str, draw: float, turn: tuple[str, ...]) -> None:
    assert SET.turn(model, wish, tenant, draw) == turn


@given(share=st.floats(0.0, 1.0), draw=st.floats(0.0, 1.0, exclude_max=True))
def test_the_candidate_gets_its_share_of_draws_and_whoever_did_not_ask_for_it_has_the_other(
    share: float, draw: float
) -> None:
    turn = TrafficSplits({"m": TrafficSplit("1", "2", share=share)}).turn("m", "", "", draw)
    assert turn == (("2", "1") if draw < share else ("1",))


def test_promotion_and_return_end_the_split_and_say_what_is_meant() -> None:
    promoted, returned = SET.after_promotion("minilm"), SET.after_return("minilm")
    assert promoted == TrafficSplits({}, {"digits": "3", "minilm": "2"})
    assert returned == TrafficSplits({}, {"digits": "3", "minilm": "1"})
    for done in (promoted, returned):
        with pytest.raises(InvalidSplit, match="no candidate of 'minilm'"):
            done.after_promotion("minilm")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"candidate": "1"}, "nothing to split"),
        ({"share": 1.5}, "share must be a number from 0 to 1, got 1.5"),
        ({"compare": -0.1}, "compare must be"),
        ({"tenants": tuple(map(str, range(1001)))}, "at most 1000"),
    ],
)
def test_a_split_that_makes_no_sense_says_why(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSplit, match=words):
        msgspec.structs.replace(SPLIT, **changes)


def test_what_is_set_is_the_same_after_a_file() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SET), type=TrafficSplits) == SET


def test_figures_count_each_ending_once_and_durations_of_answers_only() -> None:
    figures = VersionFigures()
    for took_s in (0.010, 0.020, 0.200):
        figures.record("in_time", took_s)
    figures.record("late", 2.0)
    figures.record("failed", 9.0, "unreachable")
    assert (figures.asked, figures.in_time_ratio, figures.failures) == (5, 0.6, {"unreachable": 1})
    p50, _, p99 = figures.quantiles_s
    assert p50 == pytest.approx(0.020, rel=0.06)
    assert p99 == pytest.approx(2.0, rel=0.06)
    assert VersionFigures().in_time_ratio is None
    assert VersionFigures().in_time_interval is None


def test_the_interval_holds_the_share_and_narrows_with_what_is_known() -> None:
    few, many = wilson_interval(9, 10), wilson_interval(900, 1000)
    assert few.low < many.low < 0.9 < many.high < few.high
    assert wilson_interval(10, 10).high == pytest.approx(1.0)
    assert wilson_interval(0, 10).low == pytest.approx(0.0)


@pytest.mark.parametrize(("classes", "agreeing"), [(True, 2), (False, 1)])
def test_classes_agree_by_their_largest_and_vectors_by_their_angle(classes: bool, agreeing: int) -> None:
    seen = Agreement()
    seen.record([ALIKE + 0.01, ALIKE - 0.2, 0.1], [True, True, False], classes=classes)
    assert (seen.rows, seen.agreeing, seen.cosine_least) == (3, agreeing, 0.1)
    assert seen.ratio == pytest.approx(agreeing / 3)
    assert Agreement().ratio is None
    assert Agreement().cosine is None
