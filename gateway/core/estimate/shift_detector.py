"""A shift detector finds a lasting change of what is normal: it is a CUSUM that learns its own zero.

Every device, model and path has its own normal, which is not known beforehand. The first `learn` samples make it;
later ones refine it until `most` were taken in, then it stands, or a slow decay would become the normal. A sample is
taken in only when `learn` others have come after it without an alarm: the samples that an alarm is made of are never
part of what they are held against.

Normal is the point from which samples deviate by nothing on average when each deviation is clipped (Huber's location):
a tail of one in ten at ten times the usual does not move it far.

Invariants: nothing is said before `learn` samples; normal does not change while the alarm is on. O(1) a sample.
Source: Hawkins and Olwell, "Cumulative Sum Charts and Charting for Quality Improvement", 1998, on self-starting ones;
Huber, "Robust Estimation of a Location Parameter", 1964.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from gateway.core.estimate.cusum import Cusum

_RECENT: Final = 16


class Shift:
    """Mutable: `record` each sample; `on` is the verdict, `excess` how far off it is."""

    __slots__ = ("_coming", "_cusum", "_learn", "_most", "_recent", "count", "normal")

    def __init__(self, *, slack: float, level: float, clip: float, learn: int = 60, most: int = 2000) -> None:
        self.count = 0  # samples that normal was made of
        self.normal = 0.0
        self._learn = learn
        self._most = most
        self._cusum = Cusum(slack=slack, level=level, clip=clip)
        self._coming: deque[float] = deque()  # the latest, not yet part of normal
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def on(self) -> bool:
        return self._cusum.on

    @property
    def known(self) -> bool:
        """Whether it is known what is normal."""
        return self.count >= self._learn

    @property
    def level(self) -> float:
        """Where the latest samples are: their median; the normal one while there are none."""
        return median(self._recent) if self._recent else self.normal

    @property
    def excess(self) -> float:
        """How far the latest samples are above normal; 0 while normal is not known."""
        return self.level - self.normal if self.known else 0.0

    def record(self, sample: float) -> bool:
        """Weigh one sample; returns whether the verdict changed."""
        self._recent.append(sample)
        if self.count < self._learn:
            self._take_in(sample)
            return False
        changed = self._cusum.record(sample - self.normal)
        if self._cusum.on or changed:
            self._coming.clear()
        elif self.count < self._most:
            self._coming.append(sample)
            if len(self._coming) > self._learn:
                self._take_in(self._coming.popleft())
        return changed

    def rest(self) -> None:
        """Forget what the latest samples said, but not what is normal."""
        self._cusum.rest()
        self._coming.clear()
        self._recent.clear()

    def _take_in(self, sample: float) -> None:
        self.count += 1
        clip = self._cusum.clip
        # The very first ones are taken as they are: there is nothing yet that they could be far from.
        deviation = sample - self.normal
        if self.count > 8:
            deviation = max(-clip, min(clip, deviation))
        self.normal += deviation / self.count

    def __repr__(self) -> str:
        return f"<Shift {self.excess:+.2f} over {self.normal:.2f} {self._cusum!r}>"
