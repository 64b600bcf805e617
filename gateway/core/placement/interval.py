"""The 95 % prediction interval of a candidate, and the chance of being in time that its margin stands for.

Both show how good a decision was, to explanations and evidence, and serve policies that deal in margins and not in
chances. Placement itself goes by neither.
"""

from __future__ import annotations

from math import erf, sqrt

from gateway.core.estimate.conformal import NORMAL, crowding_class
from gateway.core.placement.placer import Candidate


def p95_s(candidate: Candidate) -> float:
    """The 95 % prediction: in how many seconds ninety-five of a hundred such attempts are answered, as learned."""
    widths = candidate.offered.target.interval_width.widths
    width = widths[crowding_class(candidate.ahead_s, candidate.compute_s)]
    return candidate.finish_s + width * candidate.margin_s / NORMAL


def chance_from_margin(candidate: Candidate, budget_s: float) -> float:
    """The chance of being in time that finish and margin stand for."""
    return chance_within(candidate.finish_s, candidate.margin_s, budget_s)


def chance_within(finish_s: float, margin_s: float, budget_s: float) -> float:
    """The same of plain numbers."""
    spread_s = margin_s / NORMAL
    if spread_s <= 0.0:
        return float(finish_s <= budget_s)
    return 0.5 + 0.5 * erf((budget_s - finish_s) / (spread_s * sqrt(2.0)))
