"""A cumulative sum raises an alarm once small evidence adds up to more than chance, and clears it again.

    S ← clamp(S + clip(excess) − slack, 0, level)        on when S reaches the level, off when it is back at 0

The sum is capped at the level, so that a long storm is over as soon as a short one: what it takes to be cleared is
`level / slack` samples of normal, however long it lasted. The clip bounds what one sample can say, so that an alarm
needs several: at least `level / (clip − slack)`.

Invariants: 0 <= sum <= level; `on` changes only at the two ends. O(1), no clock.
It can be wrong where the excess of normal days is above the slack for a stretch: calibrate on recordings, not on
Gaussian tables (`tests/bench/degradation.py`).
Source: Page, "Continuous Inspection Schemes", Biometrika 1954.
"""

from __future__ import annotations

from math import inf


class Cusum:
    """Mutable: `record` each sample's excess over what is normal; `on` is the verdict."""

    __slots__ = ("clip", "level", "on", "slack", "sum")

    def __init__(self, *, slack: float, level: float, clip: float = inf) -> None:
        self.slack = slack
        self.level = level
        self.clip = clip
        self.sum = 0.0
        self.on = False

    def record(self, excess: float) -> bool:
        """Weigh one sample; returns whether the verdict changed."""
        clip = self.clip
        clipped = clip if excess > clip else -clip if excess < -clip else excess
        level = self.level
        found = self.sum + clipped - self.slack
        self.sum = found = 0.0 if found < 0.0 else level if found > level else found
        before = self.on
        self.on = found > 0.0 if before else found >= level
        return self.on is not before

    def rest(self) -> None:
        """Begin anew."""
        self.sum, self.on = 0.0, False

    def __repr__(self) -> str:
        return f"<Cusum {'on' if self.on else 'off'} {self.sum:.1f} of {self.level:.1f}>"
