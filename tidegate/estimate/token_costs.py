"""What a prompt and a step cost alone, read back from the points that a generating engine's warm-up measured.

The warm-up (`tidegate/workers/generation/warmup.py`) offers its times as cost points like any other's: (work, seconds),
work being counted in tokens of an answer. One line through them serves only where a token of a prompt is worth on this
target what the manifest says, and a pool computes a prompt many times as fast beside its steps as a device does. Two of
the points have the same prompt, and `STEPS` further tokens of an answer between them: their difference is the steps',
and the others' is the prompt's.

Points that have no such pair (a foreign server's, or none at all) are read as one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

STEPS: Final = 15  # between the first token and the last of the warm-up's answers
_ROUNDING: Final = 1e-6
_LEAST_S: Final = 1e-6


class TokenCosts(NamedTuple):
    """Seconds of one sequence alone."""

    first_units: float  # the work of the shortest prompt that was measured, with its first token ...
    first_s: float  # ... and its time
    prompt_s: float  # of each further unit of a prompt's work
    step_s: float  # of each token after the first

    def prompt_takes_s(self, units: float) -> float:
        """Until the first token of a prompt with so much work."""
        return max(_LEAST_S, self.first_s + self.prompt_s * max(0.0, units - self.first_units))


def token_costs(points: Sequence[tuple[float, float]]) -> TokenCosts:
    """The costs behind such points, of which there is at least one."""
    ordered = sorted(points)
    (first_units, first_s), others = ordered[0], ordered[1:]
    steps = [point for point in others if abs(point[0] - first_units - STEPS) < _ROUNDING]
    prompts = [point for point in others if point not in steps]
    step_s = (steps[0][1] - first_s) / STEPS if steps else _slope(ordered)
    prompt_s = _slope([ordered[0], prompts[-1]]) if steps and prompts else step_s
    return TokenCosts(first_units, first_s, max(0.0, prompt_s), max(_LEAST_S, step_s))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    (near, near_s), (far, far_s) = points[0], points[-1]
    return (far_s - near_s) / (far - near) if far > near else near_s / max(1.0, near)
