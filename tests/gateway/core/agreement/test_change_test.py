"""The sequential test against a device's own past: what it learns, how soon it sees a change, and what it leaves be."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.agreement.change_test import BLOCK, ChangeTest

LIMIT, FLOOR = 0.02, 0.002
ALARM_AT = 777_600.0
SHORT, LONG = 1, 4


def learned(apart: float = 0.008, count: int = 20 * BLOCK, sizes: tuple[int, ...] = (SHORT,)) -> ChangeTest:
    test, draw = ChangeTest(LIMIT, FLOOR), Random(3)
    for number in range(count):
        distance = apart * draw.uniform(0.5, 1.5)
        test.record(sizes[number % len(sizes)], distance, distance)
    return test


def found_after(test: ChangeTest, apart: float, size: int = SHORT, most: int = 1000) -> int | None:
    return next((number for number in range(1, most + 1) if test.record(size, apart, apart) >= ALARM_AT), None)


@pytest.mark.parametrize(("apart", "at_most"), [(1.0, 14), (0.05, 14), (0.02, 50), (0.016, 120)])
def test_a_change_is_seen_though_it_is_within_the_limit(apart: float, at_most: int) -> None:
    found = found_after(learned(), apart)
    assert found is not None and found <= at_most


@pytest.mark.parametrize("apart", [0.0, 0.004, 0.008, 0.0115])
def test_distances_up_to_half_as_far_again_are_no_change(apart: float) -> None:
    assert found_after(learned(), apart, most=3000) is None


def test_a_device_that_is_not_known_yet_has_no_evidence() -> None:
    assert found_after(ChangeTest(LIMIT, FLOOR), 1.0, most=2 * BLOCK - 1) is None
    assert found_after(learned(), 1.0, LONG, most=2 * BLOCK - 1) is None  # nor of a slice that is new


def test_little_is_known_of_a_short_past() -> None:
    short, long = (found_after(learned(count=blocks * BLOCK), 0.02) for blocks in (2, 20))
    assert long is not None and (short is None or short > 2 * long)


def test_a_fault_that_was_there_from_the_beginning_is_usual() -> None:
    assert found_after(learned(apart=0.05), 0.05) is None


def test_a_fault_is_not_learned_while_it_is_being_found() -> None:
    test = learned()
    before = repr(test).partition("against")[2]
    for _ in range(BLOCK):
        test.record(SHORT, 0.02, 0.02)
    held = repr(test).partition("against")[2]
    assert float(held.strip(" {}>").partition(": ")[2]) == pytest.approx(
        float(before.strip(" {}>").partition(": ")[2]), rel=0.05
    )


def test_each_slice_is_held_against_its_own_past() -> None:
    test, draw = ChangeTest(LIMIT, FLOOR), Random(5)
    for number in range(40 * BLOCK):
        distance = (0.004, 0.012)[number % 2] * draw.uniform(0.5, 1.5)
        assert test.record((SHORT, LONG)[number % 2], distance, distance) < ALARM_AT
    assert found_after(test, 0.012, LONG) is None
    assert found_after(test, 0.012, SHORT) is not None


@pytest.mark.slow
def test_a_heavy_tail_that_was_seldom_seen_is_no_change() -> None:
    draw, alarms = Random(7), 0
    for _ in range(10):
        test = ChangeTest(0.05, FLOOR)
        for _ in range(30 * BLOCK):
            distance = draw.uniform(0.3, 0.8) if draw.random() < 0.03 else 0.001
            alarms += test.record(SHORT, distance, distance) >= ALARM_AT
    assert alarms == 0


@pytest.mark.slow
def test_two_variants_that_are_the_same_are_held_against_what_is_never_a_disagreement() -> None:
    test = learned(apart=0.0, count=400 * BLOCK)
    assert found_after(test, 0.9 * FLOOR) is None
    assert found_after(test, 3.0 * FLOOR) is not None


def test_what_shows_a_change_is_of_the_answers_since_it_began() -> None:
    test = learned()
    for _ in range(60):
        test.record(SHORT, 0.02, 0.03)
    shown = test.shown(ALARM_AT, 0.0)
    assert shown is not None and 55 <= shown.count <= 65
    assert shown.mean == pytest.approx(0.03, rel=0.05) and shown.times == pytest.approx(0.02 / 0.012, rel=0.1)
    assert test.shown(ALARM_AT, 0.035) is None
    assert test.shown(10.0 * test.evidence, 0.0) is None


@pytest.mark.slow
def test_one_outlier_is_not_the_mean_since_a_change_that_is_over() -> None:
    test = learned(count=100 * BLOCK)
    for number in range(1500):
        test.record(SHORT, (0.0, 0.035)[number % 2], 0.0)
    for number in range(400):
        test.record(SHORT, (0.0, 0.016)[number % 2], 0.0)
    assert test.evidence > ALARM_AT  # a small stake is lost slowly
    test.record(SHORT, 1.0, 1.0)
    assert test.shown(ALARM_AT, 0.01) is None


def test_after_a_change_what_was_learned_is_kept_and_what_was_not_is_forgotten() -> None:
    test = learned()
    before = repr(test).partition("against")[2]
    for _ in range(BLOCK):
        test.record(SHORT, 0.02, 0.02)
    test.resume()
    assert test.evidence == 0.0
    for _ in range(4 * BLOCK):
        test.record(SHORT, 0.008, 0.008)
    usual, kept = (float(one.strip(" {}>").partition(": ")[2]) for one in (before, repr(test).partition("against")[2]))
    assert kept == pytest.approx(usual, rel=0.02)
    assert found_after(test, 0.02) is not None


def test_distances_have_one_scale_for_all_slices() -> None:
    test, draw = ChangeTest(LIMIT, FLOOR), Random(5)
    assert test.share(SHORT, 0.01) is None
    for number in range(40 * BLOCK):
        test.record((SHORT, LONG)[number % 2], (0.004, 0.012)[number % 2] * draw.uniform(0.5, 1.5), 0.0)
    for size, usual in ((SHORT, 0.006), (LONG, 0.018)):
        assert test.share(size, usual) == pytest.approx(test.usual_share, rel=0.05)
        assert test.share(size, nan) is not None and 0.0 < (test.share(size, nan) or 0.0) <= 1.0


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(), st.floats(0.0, 1.0)), max_size=300))
def test_evidence_is_a_finite_number_whatever_comes(answers: list[tuple[int, float, float]]) -> None:
    test = learned(count=3 * BLOCK, sizes=(0, 1, 2))
    for size, distance, score in answers:
        assert 0.0 <= test.record(size, distance, score) < inf


def test_what_is_no_distance_is_as_far_as_can_be() -> None:
    assert found_after(learned(), nan) == found_after(learned(), 1.0)
