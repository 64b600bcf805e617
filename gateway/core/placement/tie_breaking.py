"""Tie breaking keeps several gateways that see the same fleet from all sending to the same best target.

Each hears of the others' launches only in load reports, so between two reports all of them see one and the same idle
target. Alone, always taking the best is right; together they overrun it, see it busy, and all turn to the next: a herd.
Taking the second best now and then, the oftener the less it is worse, breaks that at the price of a little value:

    P(second) = 1 / (1 + e^(ΔU / TEMPERATURE))

so twins are taken in turn, and a target that is worse by 0.15 of an ordinary answer in time once in twenty.

Used only where several gateways are known to share targets. Source: docs/design/routing.md, "Several gateways" (top
two, ∝ exp(ΔU / 0.05)); the formula is Boltzmann's.
"""

from __future__ import annotations

from math import exp
from typing import Final

TEMPERATURE: Final = 0.05  # of an ordinary answer in time
_REACH: Final = 40.0  # temperatures: e^-40 never happens


def samples_runner_up(best: float, second: float, draw: float) -> bool:
    """Whether to take the second best of two values, the first being no less. `draw` is uniform in [0, 1)."""
    loss = (best - second) / TEMPERATURE
    return loss < _REACH and draw * (1.0 + exp(loss)) < 1.0
