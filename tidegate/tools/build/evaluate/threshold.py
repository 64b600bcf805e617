"""A confidence threshold is chosen from labelled answers: for a share to escalate, or an accuracy to reach.

Samples are put in the order of their confidence; a threshold cuts them in two, the unsure part of which the pool
answers instead. Only cuts between samples of different confidence exist, so a model that gives most of its answers the
same confidence has few, and a wish may lie between two of them: that is refused and not rounded away.

    share       the largest cut that escalates no more than was wished
    accuracy    the smallest cut at which edge and pool together are right often enough

A threshold fits the samples that it was chosen on better than others. So its figures are always shown for samples too
that were not used to choose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.tools.build.errors import BuildError

_NEAR = 0.25  # of the wished share: how far below it the largest cut may be


@dataclass(frozen=True, slots=True)
class CalibrationGoal:
    """What to reach, from 0 to 1."""

    kind: Literal["share", "accuracy"]
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class GradedSamples:
    """One entry per sample: how sure the edge was, and whether edge and pool were right."""

    confidence: NDArray[np.float64]
    edge_right: NDArray[np.bool_]
    pool_right: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ThresholdOutlook:
    """What a threshold does to some samples: the part that is escalated, and accuracies from 0 to 1."""

    samples: int
    escalated: float
    edge: float
    pool: float
    combined: float


class _Cut(NamedTuple):
    above: float  # the threshold is above this confidence ...
    up_to: float  # ... and at most this one
    share: float
    accuracy: float


def threshold_outlook(graded: GradedSamples, threshold: float) -> ThresholdOutlook:
    """What `threshold` does to these samples."""
    unsure = graded.confidence < threshold
    combined = np.where(unsure, graded.pool_right, graded.edge_right)
    means = (float(array.mean()) for array in (unsure, graded.edge_right, graded.pool_right, combined))
    return ThresholdOutlook(len(unsure), *means)


def threshold_for(goal: CalibrationGoal, graded: GradedSamples) -> float:
    """The threshold that reaches the goal on these samples. Raises BuildError: none does; it names the best one."""
    cuts = list(_cuts(graded))
    cut = (
        _by_share(goal.value, cuts, len(graded.confidence)) if goal.kind == "share" else _by_accuracy(goal.value, cuts)
    )
    return _between(cut.above, cut.up_to)


def _by_share(share: float, cuts: list[_Cut], samples: int) -> _Cut:
    below = [cut for cut in cuts if cut.share <= share + 1e-9]
    if below and below[-1].share >= min(share * (1.0 - _NEAR), share - 1.0 / samples):
        return below[-1]
    nearest = min(cuts, key=lambda cut: abs(cut.share - share))
    raise BuildError(
        f"no threshold escalates {share:.1%}: too many answers have the same confidence; "
        f"the nearest that can be reached is {nearest.share:.1%} (accuracy {nearest.accuracy:.2%})"
    )


def _by_accuracy(accuracy: float, cuts: list[_Cut]) -> _Cut:
    for cut in cuts:
        if cut.accuracy >= accuracy - 1e-9:
            return cut
    best = max(cuts, key=lambda cut: (cut.accuracy, -cut.share))
    raise BuildError(
        f"no threshold reaches an accuracy of {accuracy:.2%}; "
        f"the best that can be reached is {best.accuracy:.2%}, by escalating {best.share:.1%}"
    )


def _cuts(graded: GradedSamples) -> Iterator[_Cut]:
    """Every threshold that makes a difference, from the lowest: above 0, since what is 0 is hard for any."""
    order = np.argsort(graded.confidence, kind="stable")
    confidences = graded.confidence[order]
    edge, pool = graded.edge_right[order].astype(int), graded.pool_right[order].astype(int)
    right = np.concatenate([[edge.sum()], edge.sum() + np.cumsum(pool - edge)])
    levels, firsts = np.unique(confidences, return_index=True)
    edges = [(0.0, float(levels[0]), 0)] + [
        (float(level), float(upper), int(first))
        for level, upper, first in zip(levels, [*levels[1:], 1.0], [*firsts[1:], len(order)], strict=True)
    ]
    for above, up_to, count in edges:
        if above < up_to:
            yield _Cut(above, up_to, count / len(order), float(right[count]) / len(order))


def _between(above: float, up_to: float) -> float:
    """The number with the fewest decimals in (above, up_to]: a manifest is for people."""
    middle = (above + up_to) / 2
    return next((short for short in (round(middle, n) for n in range(1, 17)) if above < short <= up_to), up_to)
