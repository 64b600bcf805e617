"""The stall cost tells whether a process's event loop, held up, cost deadlines, which makes it a condition.

Everything in a process waits for its loop, so one that is held up (a computation on it, a full garbage collection, a
machine without a core to give) makes every request late, and none of their own times says why. Most stalls cost
nothing, so that each of them as a condition would be noise. Two signs count:

    a deadline was missed, and the loop was held up for SHARE of the time that the request had
    one stall of LONG_S: requests that waited in the sockets had aged before anything here knew of them

The condition holds until HOLD_S after the last sign, as conditions of targets do. Its evidence covers WINDOW_S.

Pure, with bounded memory: `stalled`, `missed`, and then `look` a few times a second with non-decreasing `now`. A miss
may be told before the stall that caused it, since after a stall everything that is due runs at once, in any order.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

SHARE: Final = 0.25
LONG_S: Final = 1.0
HOLD_S: Final = 10.0
WINDOW_S: Final = 60.0
_MOST: Final = 256  # stalls, and misses that were not judged yet


class LoopStall(NamedTuple):
    """When the loop was held up. `collecting_s` of it was garbage collection."""

    began_at: float
    ended_at: float
    collecting_s: float = 0.0

    @property
    def took_s(self) -> float:
        return self.ended_at - self.began_at

    def overlap_s(self, began_at: float, ended_at: float) -> float:
        return max(0.0, min(self.ended_at, ended_at) - max(self.began_at, began_at))


class StallCost:
    """Mutable. `evidence` is "" while stalls cost nothing; `since` is the instant from which they did."""

    def __init__(self) -> None:
        self.evidence = ""
        self.since = 0.0
        self.held_up_s = 0.0  # of the last WINDOW_S, while the condition holds
        self._stalls: deque[LoopStall] = deque(maxlen=_MOST)
        self._misses: deque[tuple[float, float]] = deque(maxlen=_MOST)  # (arrived, ended) since the last look
        self._costly_at: deque[float] = deque(maxlen=_MOST)  # when deadlines were lost to stalls
        self._last_sign_at: float | None = None

    def stalled(self, stall: LoopStall) -> None:
        """The loop was held up."""
        self._stalls.append(stall)
        if stall.took_s >= LONG_S:
            self._last_sign_at = stall.ended_at

    def missed(self, arrived_at: float, ended_at: float) -> None:
        """A request was not answered by its deadline."""
        self._misses.append((arrived_at, ended_at))

    def look(self, now: float) -> bool:
        """Judge what was told since the last look; whether the condition begins or ends now."""
        while self._stalls and self._stalls[0].ended_at < now - WINDOW_S:
            self._stalls.popleft()
        while self._costly_at and self._costly_at[0] < now - WINDOW_S:
            self._costly_at.popleft()
        while self._misses:
            arrived_at, ended_at = self._misses.popleft()
            lost_s = sum(stall.overlap_s(arrived_at, ended_at) for stall in self._stalls)
            if lost_s > 0.0 and lost_s >= SHARE * (ended_at - arrived_at):
                self._costly_at.append(ended_at)
                self._last_sign_at = now
        before = bool(self.evidence)
        if self._last_sign_at is None or now - self._last_sign_at >= HOLD_S:
            self.evidence, self.held_up_s, self._last_sign_at = "", 0.0, None
        else:
            self.evidence, self.held_up_s = self._words(), sum(stall.took_s for stall in self._stalls)
            self.since = self.since if before else now
        return bool(self.evidence) != before

    def _words(self) -> str:
        stalls = self._stalls
        total_s, longest_s = sum(one.took_s for one in stalls), max((one.took_s for one in stalls), default=0.0)
        collecting_s = sum(one.collecting_s for one in stalls)
        words = f"its event loop was held up for {total_s:.1f} s of the last minute, {longest_s:.1f} s at once"
        if collecting_s >= SHARE * total_s > 0.0:
            words += f", {collecting_s:.1f} s of it by garbage collection"
        lost = len(self._costly_at)
        return f"{words}; {lost} {'deadline was' if lost == 1 else 'deadlines were'} missed by it" if lost else words

    def __repr__(self) -> str:
        return f"<StallCost {self.evidence or 'none'}>"
