"""Recorded delays: round trips with their instants, each delay drawn from the samples around its own instant.

A distribution over a whole recording would spread a bad minute over the hour, and bad minutes are what matters. So a
delay at an instant is drawn from the `_NEAREST` samples around it: what jittered jitters, and what was slow from the
twentieth to the fortieth second is slow again. Half of a round trip goes each way.

Beyond the recording's end it is as it was at the end. It can be wrong where little was sent: then the samples nearest
in time may be far off, and of a time without any link nothing is known (a replay cuts the link there).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from tidegate.netsim.links.distributions import Draw

_NEAREST: Final = 8


class RecordedDelay:
    """A stage. `jitter_times` scales what is above the least round trip."""

    __slots__ = ("_at_s", "_draw", "_ways_s")

    def __init__(
        self, at_s: Sequence[float], rtts_s: Sequence[float], *, draw: Draw, jitter_times: float = 1.0
    ) -> None:
        least_s = min(rtts_s)
        self._at_s = list(at_s)
        # Half of each round trip; only what exceeds the least one is jitter.
        self._ways_s = [0.5 * (least_s + jitter_times * (rtt_s - least_s)) for rtt_s in rtts_s]
        self._draw = draw

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        ways_s = self._ways_s
        # The window of samples around the instant, moved inwards at both ends of the recording.
        first = min(max(0, bisect_left(self._at_s, enters_at) - _NEAREST // 2), max(0, len(ways_s) - _NEAREST))
        nearest = ways_s[first : first + _NEAREST]
        return enters_at + nearest[int(self._draw() * len(nearest))]

    def __repr__(self) -> str:
        return f"<RecordedDelay of {len(self._ways_s)} round trips>"
