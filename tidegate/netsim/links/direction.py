"""One direction of a link: bytes go through its stages one after another and come out in order.

`delivered_at(size, now)` is the instant at which the last of these bytes is at the other end; infinity while a
blackhole has no end. Stages may be exchanged at any time (`change`): what was sent before keeps its instant, and what
is sent after comes no earlier.

A direction is one connection's: where several share a link, each has its own by `connection`.

Invariants: delivery is not before sending and never overtakes; no bytes are lost or made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol


class LinkStage(Protocol):
    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        """When the last of `size_bytes` that enter at this instant has left; called in order of entering."""
        ...


class Direction:
    """Mutable. `sent_bytes` counts all that ever entered."""

    __slots__ = ("_entered_at", "_last_at", "_stages", "sent_bytes")

    def __init__(self, stages: Sequence[LinkStage] = ()) -> None:
        self._stages = tuple(stages)
        self._entered_at = -inf
        self._last_at = -inf
        self.sent_bytes = 0

    def delivered_at(self, size_bytes: int, now: float) -> float:
        """When these bytes, sent now, are all at the other end."""
        self.sent_bytes += size_bytes
        at = self._entered_at = max(now, self._entered_at)
        for stage in self._stages:
            at = stage.leaves_at(size_bytes, at)
        self._last_at = max(at, self._last_at)
        return self._last_at

    def connection(self) -> Direction:
        """A stream of its own over the same link: it shares the capacity and the weather, but what another connection
        lost does not hold it up."""
        return Direction(self._stages)

    def change(self, stages: Sequence[LinkStage]) -> None:
        """From now on these stages. What a blackhole holds for ever is set free: a link is changed to heal it."""
        self._stages = tuple(stages)
        if self._last_at == inf:
            self._last_at = self._entered_at

    def __repr__(self) -> str:
        return f"<Direction {' → '.join(repr(stage) for stage in self._stages) or 'at once'}, {self.sent_bytes} bytes>"
