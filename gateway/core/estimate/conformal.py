"""Conformal widths are learned so that of all 95 % predictions ninety-five in a hundred come true.

A margin of 1.645 standard deviations holds 95 % of a normal distribution that is known. Ours is neither: computing is
log-normal and at times throttled, links have tails and outages, and the deviation itself is an estimate. In simulation,
such margins held 88 %. No better formula mends that for every fleet, so the width is learned from how often
predictions came true, whatever the reason that they did not: adaptive conformal inference, in the form that tracks the
quantile itself.

    prediction = finish + width · spread      width ← width + STEP · ([it came later] − 5 %), within LEAST and MOST

A late one widens by nineteen times what a timely one narrows, so the width rests where one in twenty is late. However
the fleet changes, the share that was late over n predictions is within (MOST − LEAST) / (STEP · n) of 5 %, as long as
the width is not at its bounds.

There is a width for each tier and each third of crowding, that is of the share of its time that an attempt would wait:
an idle edge errs by its links and its heat, a crowded pool by its batch-mates. They are shared by all
targets of a tier, since one target has too few answers to find one in twenty.

    counted    an answer; and an attempt that was given up when its prediction was over, or that failed for lack of time
    unknown    one that was given up before: it may still have come. One that was refused: it never began

An outage is many attempts and one cause. MOST keeps it from widening predictions out of all proportion: nothing that is
launched into a dead path comes in time, however much it was given; that is what trust (`link_estimate.py`) and breakers
are for. So coverage stays below 95 % by about the share that outages take.

Placement's own rules (which target is sure, when to look after an attempt) keep the margin of 1.645. With learned
widths `cheapest` lost three to five points of attainment at 1.2 of the knee: where nearly all are late, widths are at
their most, no target is sure any more, and all requests go to the fastest.

Invariants: LEAST <= width <= MOST; 0 <= crowding <= 2. O(1), no clock.
Source: Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021; Angelopoulos, Candès
and Tibshirani, "Conformal PID Control for Time Series Prediction", NeurIPS 2023 (quantile tracking);
docs/design/routing.md, "Confidence width".
"""

from __future__ import annotations

from typing import Final

MISSES: Final = 0.05
NORMAL: Final = 1.645  # where 95 % of a normal distribution end
LEAST: Final = 1.0
MOST: Final = 4.0
_FIRST: Final = 2.33  # before anything is known: what would be 99 %, as few answers are no certainty
_STEP: Final = 0.1  # standard deviations: some 200 answers unlearn one


class IntervalWidth:
    """Mutable: `record` how a prediction ended; `widths` by crowding, in standard deviations, for the next ones."""

    __slots__ = ("widths",)

    def __init__(self) -> None:
        self.widths = [_FIRST, _FIRST, _FIRST]

    def record(self, crowding: int, *, late: bool) -> None:
        """Learn from a prediction that was made at this crowding, and whether its answer came later than it said."""
        width = self.widths[crowding] + _STEP * (late - MISSES)
        self.widths[crowding] = min(MOST, max(LEAST, width))

    def __repr__(self) -> str:
        return f"<IntervalWidth {' '.join(f'{width:.2f}' for width in self.widths)}>"


def crowding_class(wait_s: float, compute_s: float) -> int:
    """In which third the share of its time lies that an attempt would wait. `compute_s` is above 0."""
    if 2.0 * wait_s < compute_s:
        return 0
    return 1 if wait_s < 2.0 * compute_s else 2
