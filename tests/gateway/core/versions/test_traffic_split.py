"""Whose turn it is while two versions are on trial, and what is known of both."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.versions.default_version import NO_PREFERENCE, VersionPreference
from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplit, TrafficSplits
from gateway.core.versions.version_figures import ALIKE, Agreement, VersionFigures, wilson_interval

SPLIT = TrafficSplit("1", "2", share=0.1, tenants=("acme",))
SET = TrafficSplits({"minilm": SPLIT}, {"digits": "3"})


@pytest.mark.parametrize(
    ("model", "tenant", "draw", "tried"),
    [
        ("minilm", "", 0.5, ""),
        ("minilm", "", 0.09, "2"),
        ("minilm", "acme", 0.9, "2"),
        ("digits", "acme", 0.0, ""),
        ("other", "", 0.0, ""),
    ],
)
def test_what_is_tried_ahead_of_the_default(model: str, tenant: str, draw: float, tried: str) -> None:
    assert SET.tried(model, tenant, draw) == tried


@pytest.mark.parametrize(
    ("model", "wish", "demanded"),
    [
        ("minilm", "candidate", "2"),
        ("minilm", "standing", "1"),
        ("minilm", "7", "7"),
        ("digits", "candidate", ""),  # a header that outlives its trial does no harm
        ("digits", "2", "2"),
        ("other", "standing", ""),
    ],
)
def test_what_a_caller_demands(model: str, wish: str, demanded: str) -> None:
    assert SET.demanded(model, wish) == demanded


@pytest.mark.parametrize(
    ("model", "preference"),
    [
        ("minilm", VersionPreference("1", alone=True)),
        ("digits", VersionPreference("3")),
        ("other", NO_PREFERENCE),
    ],
)
def test_what_is_preferred_where_no_version_is_named(model: str, preference: VersionPreference) -> None:
    assert SET.preference(model) == preference


@given(share=st.floats(0.0, 1.0), draw=st.floats(0.0, 1.0, exclude_max=True))
def test_the_candidate_gets_its_share_of_draws(share: float, draw: float) -> None:
    splits = TrafficSplits({"m": TrafficSplit("1", "2", share=share)})
    assert splits.tried("m", "", draw) == ("2" if draw < share else "")


def test_promotion_prefers_the_candidate_and_the_return_changes_nothing_but_the_split() -> None:
    promoted, returned = SET.after_promotion("minilm"), SET.after_return("minilm")
    assert promoted == TrafficSplits({}, {"digits": "3", "minilm": "2"})
    assert returned == TrafficSplits({}, {"digits": "3"})
    assert SET.begun("digits", TrafficSplit("3", "4")).after_return("digits") == SET
    for done in (promoted, returned):
        with pytest.raises(InvalidSplit, match="no candidate of 'minilm'"):
            done.after_promotion("minilm")


def test_a_standing_version_that_was_named_stays_preferred_after_the_split() -> None:
    begun = TrafficSplits().begun("minilm", SPLIT, prefer=True)
    assert begun.after_return("minilm").preference("minilm") == VersionPreference("1")


def test_a_version_rolled_out_since_a_preference_follows_its_devices_until_the_next_preference() -> None:
    shipped = SET.after_rollout("digits", "4").after_rollout("digits", "4")
    assert shipped.preference("digits") == VersionPreference("3", ("4",))
    assert SET.after_rollout("digits", "3") is SET, "it is preferred already"
    assert SET.after_rollout("other", "1") is SET, "without a preference all versions follow their devices"
    assert shipped.begun("digits", TrafficSplit("3", "4")).after_promotion("digits").followed == {}


def test_a_version_that_is_called_back_is_preferred_no_longer() -> None:
    shipped = SET.after_rollout("digits", "4")
    assert shipped.after_recall("digits", "4") is shipped, "the preferred one is another"
    assert shipped.after_recall("digits", "3") == TrafficSplits({"minilm": SPLIT})
    assert SET.after_recall("minilm", "2") is SET, "the candidate is the default of no request"
    assert SET.after_recall("minilm", "1") == TrafficSplits({}, {"digits": "3"})


def test_settings_of_an_older_file_are_read() -> None:
    written = b'{"split":{"minilm":{"standing":"1","candidate":"2","share":0.1}},"promoted":{"digits":"3"}}'
    assert msgspec.json.decode(written, type=TrafficSplits).preference("digits") == VersionPreference("3")


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
