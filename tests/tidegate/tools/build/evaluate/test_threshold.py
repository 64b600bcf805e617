"""Choosing a threshold of confidence from answers whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.threshold import CalibrationGoal, GradedSamples, threshold_for, threshold_outlook


def graded(*samples: tuple[float, bool, bool]) -> GradedSamples:
    """(confidence, is the edge right, is the pool right) each."""
    sure, edge, pool = zip(*samples, strict=True)
    return GradedSamples(np.array(sure), np.array(edge), np.array(pool))


# Of ten answers the edge is wrong in the two that it is least sure of, and in one that it is quite sure of.
TEN = graded(
    (0.0, False, True),
    (0.1, False, True),
    (0.2, True, True),
    (0.3, True, False),
    (0.4, True, True),
    (0.5, True, True),
    (0.6, False, True),
    (0.7, True, True),
    (0.8, True, True),
    (0.9, True, True),
)


@pytest.mark.parametrize(("share", "threshold"), [(0.1, 0.1), (0.2, 0.2), (0.5, 0.5), (0.35, 0.3), (1.0, 1.0)])
def test_as_many_as_were_wished_are_escalated_and_no_more(share: float, threshold: float) -> None:
    found = threshold_for(CalibrationGoal("share", share), TEN)
    assert found == pytest.approx(threshold, abs=0.1)
    assert threshold_outlook(TEN, found).escalated == np.floor(share * 10) / 10


def test_as_few_as_reach_the_accuracy_are_escalated() -> None:
    found = threshold_outlook(TEN, threshold_for(CalibrationGoal("accuracy", 0.9), TEN))
    assert (found.edge, found.pool, found.combined) == (0.7, 0.9, 0.9)
    assert (found.escalated, found.samples) == (0.2, 10)


def test_an_accuracy_out_of_reach_is_refused_with_the_best_that_is_not() -> None:
    with pytest.raises(BuildError, match=r"no threshold reaches an accuracy of 95.00%.* is 90.00%, .* 20.0%"):
        threshold_for(CalibrationGoal("accuracy", 0.95), TEN)


def test_a_share_between_two_that_are_possible_is_refused_with_the_nearest() -> None:
    clumped = graded(*[(0.5, True, True)] * 5, *[(0.9, True, True)] * 5)
    with pytest.raises(BuildError, match=r"no threshold escalates 20.0%: .* nearest that can be reached is 0.0%"):
        threshold_for(CalibrationGoal("share", 0.2), clumped)
    assert threshold_outlook(clumped, threshold_for(CalibrationGoal("share", 0.5), clumped)).escalated == 0.5


def test_where_every_answer_is_certain_there_is_nothing_to_choose() -> None:
    certain = graded(*[(1.0, True, True)] * 5)
    assert threshold_for(CalibrationGoal("accuracy", 1.0), certain) <= 1.0, "the edge alone is right"
    with pytest.raises(BuildError, match=r"nearest that can be reached is 0\.0%"):
        threshold_for(CalibrationGoal("share", 0.5), certain)


def test_hard_answers_are_below_any_threshold() -> None:
    hard = graded((0.0, False, True), (0.0, False, True), (0.8, True, True), (0.9, True, True))
    assert threshold_for(CalibrationGoal("accuracy", 0.5), hard) > 0.0
    assert threshold_outlook(hard, 1e-9).escalated == 0.5


samples = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.50001, 0.9, 1.0]), st.booleans(), st.booleans()), min_size=1
)


@given(samples, st.floats(0.01, 1.0), st.sampled_from(["share", "accuracy"]))
def test_what_is_found_reaches_its_goal_or_is_refused(
    found: list[tuple[float, bool, bool]], value: float, kind: str
) -> None:
    some = graded(*found)
    try:
        threshold = threshold_for(CalibrationGoal("share" if kind == "share" else "accuracy", value), some)
    except BuildError:
        return
    assert 0.0 < threshold <= 1.0
    seen = threshold_outlook(some, threshold)
    assert seen.escalated <= value + 1e-9 if kind == "share" else seen.combined >= value - 1e-9
