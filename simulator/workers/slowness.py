"""The factor by which a device is slower at an instant than at its warm-up: heat, and the scenario's faults."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tidegate.netsim.links.regime import OnOffSchedule, Windows


class SlownessPeriod(NamedTuple):
    """A stretch of time in which a device is so many times slower."""

    start: float
    end: float
    factor: float


class Slowness:
    """How many times slower a device is at an instant than it measured at its warm-up.

    `factor_of` draws one factor for each stretch, by the stretch's end, so it does not depend on when it is read.
    """

    def __init__(
        self,
        *,
        thermal: OnOffSchedule | None = None,
        factor_of: Callable[[float], float] = lambda _end: 1.0,
        faults: tuple[tuple[Windows, float], ...] = (),
    ) -> None:
        self._thermal = thermal
        self._factor_of = factor_of
        self._faults = faults
        self._episode = (0.0, 1.0)  # (end, factor)

    def at(self, now: float) -> float:
        factor = 1.0
        if self._thermal is not None and (end := self._thermal.until(now)) > now:
            if end != self._episode[0]:
                self._episode = end, self._factor_of(end)
            factor = self._episode[1]
        for windows, times in self._faults:
            if windows.until(now) > now:
                factor *= times
        return factor

    def pieces(self, until: float) -> list[SlownessPeriod]:
        """All of it from 0 up to an instant, in order."""
        ends = {0.0, until}
        if self._thermal is not None:
            at = 0.0
            while (start := self._thermal.next_on(at)) < until:
                at = self._thermal.until(start)
                ends |= {start, at}
        for windows, _ in self._faults:
            for window in windows.after(0.0):
                ends |= set(window)
        inside = sorted(end for end in ends if 0.0 <= end <= until)
        found = [SlownessPeriod(start, end, self.at(start)) for start, end in pairwise(inside)]
        return [*found[:-1], found[-1]._replace(end=inf)]

    def __repr__(self) -> str:
        return f"<Slowness thermal {self._thermal}, {len(self._faults)} faults>"
