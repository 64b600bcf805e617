"""Full-jitter exponential backoff: how long to wait before the next try.

Waits are drawn uniformly from [0, base · 2^k], capped, so that a fleet that lost its gateway in one instant does not
come back in one instant. Randomness is an argument. Call `reset` after a stretch of health, not after the first
success, so that a link that flaps keeps its distance.

Source: Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Mutable: `next_delay_s` counts a failure."""

    draw: Callable[[], float]  # uniform in [0, 1)
    base_s: float = 0.5
    cap_s: float = 30.0
    failures: int = 0

    def next_delay_s(self) -> float:
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return self.draw() * ceiling

    def next_delay_after_s(self, ran_s: float, steady_s: float) -> float:
        """As `next_delay_s`, of something that ran for so long: failures before a run of `steady_s` count no more."""
        if ran_s >= steady_s:
            self.reset()
        return self.next_delay_s()

    def reset(self) -> None:
        self.failures = 0
