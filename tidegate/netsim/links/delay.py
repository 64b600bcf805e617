"""Propagation: a base delay, jitter on top, and a multiple of both while the weather is bad.

Bytes of a stream stay in order, so the jitter of one holds up the bytes behind it (`Direction` sees to it); that is
what TCP makes of a network that reorders. Delay takes no capacity: any amount may be on its way.
"""

from __future__ import annotations

from tidegate.netsim.links.distributions import Distribution, Draw
from tidegate.netsim.links.regime import OnOffSchedule


class Delay:
    """A stage. `bad` is when it takes `bad_scale` times as long."""

    __slots__ = ("_bad", "_bad_scale", "_base_s", "_draw", "_jitter")

    def __init__(
        self,
        base_s: float,
        *,
        jitter: Distribution | None = None,
        bad: OnOffSchedule | None = None,
        bad_scale: float = 1.0,
        draw: Draw,
    ) -> None:
        self._base_s = base_s
        self._jitter = jitter
        self._bad = bad
        self._bad_scale = bad_scale
        self._draw = draw

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        delay_s = self._base_s
        if self._jitter is not None:
            delay_s += self._jitter.sample_s(self._draw)
        if self._bad is not None and self._bad.until(enters_at) > enters_at:
            delay_s *= self._bad_scale
        return enters_at + delay_s

    def __repr__(self) -> str:
        return f"<Delay {self._base_s * 1e3:g} ms + {self._jitter}>"
