"""Several models on one device: by deadline while shares permit, and each its share in the long run."""

from __future__ import annotations

from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cloud_pool.models import TEXT, manifest_of
from tidegate.models.fair_share import FairShare
from tidegate.models.manifest import Cost

HEAVY_S, LIGHT_S = 0.1, 0.005
SOON, LATE = 1.0, 100.0


def test_with_nothing_owed_the_earliest_deadline_goes_first() -> None:
    assert FairShare().order({"a": LATE, "b": SOON, "c": inf}) == ["b", "a"]


def test_a_heavy_model_with_short_deadlines_does_not_starve_a_light_one() -> None:
    shares = FairShare(window_s=0.25)
    served = {"heavy": 0.0, "light": 0.0}
    while sum(served.values()) < 10.0:
        first = shares.order({"heavy": SOON, "light": LATE})[0]
        took_s = HEAVY_S if first == "heavy" else LIGHT_S
        shares.charge(first, took_s)
        served[first] += took_s
        assert served["light"] >= sum(served.values()) / 2 - 0.25 - 2 * HEAVY_S
    assert served["light"] == pytest.approx(5.0, abs=0.25 + 2 * HEAVY_S)


def test_weights_divide_device_seconds_and_not_requests() -> None:
    shares = FairShare({"heavy": 3.0})
    served = {"heavy": 0.0, "light": 0.0}
    for _ in range(5000):
        first = shares.order({"heavy": LATE, "light": SOON})[0]
        took_s = HEAVY_S if first == "heavy" else LIGHT_S
        shares.charge(first, took_s)
        served[first] += took_s
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.05)


def test_who_would_be_late_goes_first_until_its_group_is_too_far_ahead() -> None:
    shares = FairShare(window_s=0.25)
    turns = []
    for _ in range(8):
        turns.append(shares.order({"urgent": SOON, "patient": LATE})[0])
        shares.charge(turns[-1], HEAVY_S)
    assert turns == ["urgent"] * 5 + ["patient", "urgent", "patient"]


def test_a_group_too_far_ahead_still_goes_when_no_other_has_work() -> None:
    shares = FairShare(window_s=0.1)
    shares.order({"a": SOON, "b": LATE, "c": LATE})
    for _ in range(3):
        shares.charge("a", HEAVY_S)
    assert shares.order({"a": SOON, "b": inf, "c": inf}) == ["a"]


def test_of_three_one_that_is_ahead_lets_those_go_that_are_not() -> None:
    shares = FairShare(window_s=0.2)
    shares.order({"a": 1.0, "b": 2.0, "c": 3.0})
    for _ in range(3):
        shares.charge("a", HEAVY_S)  # a is 0.2 ahead, b and c are owed 0.1 each
    assert shares.order({"a": 1.0, "b": 2.0, "c": 3.0}) == ["b", "c", "a"]


def test_the_idle_save_up_no_more_than_a_window() -> None:
    shares = FairShare(window_s=0.1)
    shares.order({"a": SOON, "b": LATE})
    for _ in range(10):
        shares.charge("a", HEAVY_S)
    shares.order({"a": SOON, "b": inf})
    assert shares.owed_s("b") == pytest.approx(0.1)
    for _ in range(100):
        shares.charge("a", HEAVY_S)
    assert shares.owed_s("b") == pytest.approx(0.1)
    assert shares.owed_s("a") == pytest.approx(-0.1)


def test_a_single_caller_after_another_keeps_what_it_is_owed_between_two_requests() -> None:
    shares = FairShare(window_s=0.25)
    waits = []
    for _ in range(20):
        batches = 0
        while shares.order({"many": SOON, "one": LATE})[0] != "one":
            shares.charge("many", HEAVY_S)
            batches += 1
        shares.charge("one", LIGHT_S)
        waits.append(batches)
        shares.order({"many": SOON, "one": inf})
    assert waits[0] == 5
    assert max(waits[1:]) <= 1


def test_a_debt_is_paid_while_idle() -> None:
    shares = FairShare(window_s=0.25)
    shares.order({"a": SOON, "b": LATE})
    for _ in range(4):
        shares.charge("a", HEAVY_S)
    shares.order({"a": inf, "b": LATE})
    for _ in range(20):
        shares.charge("b", HEAVY_S)
    assert 0.0 <= shares.owed_s("a") <= HEAVY_S


def test_what_was_predicted_and_not_needed_is_given_back() -> None:
    shares = FairShare()
    shares.order({"a": SOON, "b": LATE})
    shares.charge("a", 0.4)
    shares.charge("a", -0.3)
    assert shares.owed_s("b") == pytest.approx(0.05)
    assert repr(shares) == "<FairShare owed: a -50 ms, b +50 ms>"
    shares.charge("a", inf)
    shares.charge("a", nan)
    assert shares.owed_s("b") == pytest.approx(0.05)


def test_it_says_when_one_must_go_before_all_others() -> None:
    shares = FairShare(window_s=0.1)
    assert repr(shares) == "<FairShare owed: nothing>"
    shares.order({"a": SOON, "b": LATE})
    assert not shares.is_owed("b")
    shares.charge("a", 0.3)
    assert shares.is_owed("b")
    assert not shares.is_owed("never heard of")


def test_models_of_a_modality_share_its_weight_unless_they_have_their_own() -> None:
    shares = FairShare({"text": 2.0, "special": 1.0})
    assert shares.group_of(TEXT) == "text"
    assert shares.group_of(manifest_of(name="special")) == "special"
    images = manifest_of(name="digits", cost=Cost("pixels", "ids"))
    assert (images.kind, shares.group_of(images)) == ("image", "digits")
    assert msgspec.structs.replace(images, modality="sound").kind == "sound"
    assert manifest_of(cost=Cost("items", "ids")).kind == "other"


loads = st.lists(
    st.tuples(st.sampled_from("abcde"), st.floats(min_value=0.001, max_value=0.2), st.sampled_from("abcde")),
    min_size=1,
    max_size=300,
)


@pytest.mark.slow
@given(loads, st.dictionaries(st.sampled_from("abcde"), st.floats(min_value=0.1, max_value=10.0)))
def test_nobody_with_work_is_ever_owed_much_more_than_a_window(
    events: list[tuple[str, float, str]], weights: dict[str, float]
) -> None:
    """Deadlines are as unfair as they can be: `favoured` is always due first. One of the groups may come and go."""
    shares = FairShare(weights, window_s=0.25)
    for favoured, took_s, idle in events:
        heads = {group: SOON if group == favoured else LATE for group in "abcde"}
        heads[idle] = inf
        first = shares.order(heads)[0]
        shares.charge(first, took_s)
        for group in "abcde":
            assert shares.owed_s(group) <= 0.25 + 5 * 0.2
        assert sum(shares.owed_s(group) for group in "abcde") == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@given(loads, st.floats(min_value=0.2, max_value=5.0))
def test_who_always_has_work_gets_its_weighted_share_in_any_stretch_of_time(
    events: list[tuple[str, float, str]], weight: float
) -> None:
    shares = FairShare({"a": weight}, window_s=0.25)
    total_s, had_s, everybody = 0.0, 0.0, "abcde"
    share = weight / (weight + len(everybody) - 1)
    least_behind_s = 0.0
    for favoured, took_s, _ in events:
        first = shares.order({group: SOON if group == favoured else LATE for group in everybody})[0]
        shares.charge(first, took_s)
        total_s, had_s = total_s + took_s, had_s + took_s * (first == "a")
        behind_s = share * total_s - had_s
        # From the moment at which it was best off until now.
        least_behind_s = min(least_behind_s, behind_s)
        assert behind_s - least_behind_s <= 2 * (0.25 + len(everybody) * 0.2)
