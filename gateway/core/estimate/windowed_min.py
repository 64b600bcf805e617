"""The windowed minimum is the least value of the last seconds, in constant time per value.

Of two values the older is of no use once a newer one is as small, so only a rising sequence is kept: the front is the
minimum, and leaves when it is out of the window. When nothing is new the minimum stays: an old floor is better than
none, and it is replaced by the next value if it is out of date by then.

Invariant: after `record`, `value` is the least of the values that were recorded within the window before it.
Source: the monotone deque of BBR's windowed filters (Cardwell et al., "BBR", 2016).
"""

from __future__ import annotations

from collections import deque


class WindowedMin:
    """Mutable: `record` in order of time; `value` is the minimum, `default` before there is one."""

    __slots__ = ("_rising", "_window_s", "value")

    def __init__(self, window_s: float, default: float) -> None:
        self.value = default
        self._window_s = window_s
        self._rising: deque[tuple[float, float]] = deque()  # (instant, value)

    def record(self, value: float, now: float) -> None:
        rising = self._rising
        while rising and rising[-1][1] >= value:
            rising.pop()
        rising.append((now, value))
        while rising[0][0] <= now - self._window_s:
            rising.popleft()
        self.value = rising[0][1]

    def __repr__(self) -> str:
        return f"<WindowedMin {self.value:g} of {len(self._rising)}>"
