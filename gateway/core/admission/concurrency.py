"""The adaptive limit bounds the requests in flight, and learns from the queues at targets alone.

A fixed number is wrong as soon as the fleet changes. By Little's law the right one is throughput times time without
queueing, and queueing is what gives a wrong one away. The usual algorithms compare an end-to-end latency with its
least; on links that jitter, that collapses the limit for the weather's sake. Our targets say how long an answer queued
and how long it was computed, so the link is left out altogether:

    stretch    Σ(queue + compute) / Σ compute over a window of answers; 1 with no queues, at most 2 is taken as usual
    usual      the windowed minimum of stretches (30 s): a batching pool queues a little even when idle
    gradient   min(1, TOLERANCE · usual / stretch), and at most DROP where targets refused more than 5 % of attempts
    limit     += SMOOTHING · (gradient · limit + √limit − limit)            between `floor` and `cap`

√limit is the room to probe in. The limit moves only while it matters (over half of it was used), and it does not fall
while queues and requests in flight move against each other: then the queues are made by others (a hot device, other
gateways), and letting fewer in would not shorten them (the correlation guard).

A generation holds a place for as long as all of its tokens take, so few end and the limit would learn slowly what
targets say outright: how many they take at a time. It never falls below that, as far as they have shown it
(`gateway/core/fleet/concurrency_credit.py`).

Chosen over AIMD because it settles instead of sawing, and over a PID since it has nothing to tune. Which requests are
refused is not its business: it is a last bound above the cut levels, with room of half as much again for the most
urgent level.

Invariants: 1 <= floor <= limit <= cap; never more than 1.5 · limit (nor than the cap) inside. O(1) per answer.
Source: Netflix concurrency-limits (Gradient2; application-limited hold), failsafe-go's adaptive limiter (correlation
of latency with in-flight requests), Uber's Cinnamon auto-tuner (time in the server instead of round trips).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import sqrt
from typing import Final

from gateway.core.estimate.windowed_min import WindowedMin

MAX_IN_FLIGHT: Final = 1024  # unless a configuration says otherwise
WINDOW_S: Final = 0.1
TOLERANCE: Final = 2.0
_MIN_SAMPLES: Final = 10
_SMOOTHING: Final = 0.2
_USUAL_AT_MOST: Final = 2.0
_USUAL_WINDOW_S: Final = 30.0
_STRETCH_AT_MOST: Final = 100.0  # more says no more
_DROP: Final = 0.9
_DROPPED_RATIO: Final = 0.05
_STEEPEST: Final = 0.5
_REMEMBERED: Final = 20  # windows, for the correlation
_AGAINST: Final = -0.3
_URGENT_ROOM: Final = 1.5
_LEAST: Final = 32
_PER_TARGET: Final = 8


class AdaptiveLimit:
    """Mutable: `try_acquire` and `release` as a fixed limit; `answered` and `dropped` teach it."""

    def __init__(
        self,
        cap: int,
        *,
        start: int = 128,
        targets: Callable[[], int] = lambda: 0,
        slots: Callable[[], int] = lambda: 0,
        fixed: bool = False,
    ) -> None:
        """Args:
        cap: the most that may ever be inside.
        targets: how many there are, each good for a few requests.
        slots: the generations that they take at a time, all together. O(1): it is asked for each request that would be
            refused.
        fixed: stay at the cap, whatever is learned.
        """
        if cap < 1:
            raise ValueError(f"a limit must let at least one in, not {cap}")
        self.cap = cap
        self.in_flight = 0
        self.limit = float(cap if fixed else min(start, cap))
        self._fixed = fixed
        self._targets = targets
        self._slots = slots
        self._usual = WindowedMin(_USUAL_WINDOW_S, _USUAL_AT_MOST)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # (in flight, stretch) of windows
        self._most_inside = 0
        self._opened_at = 0.0
        self._answers = self._drops = 0
        self._compute_s = self._spent_s = 0.0

    @property
    def floor(self) -> int:
        """The least that the limit falls to: enough for each target that its queue has a choice."""
        return min(self.cap, max(_LEAST, _PER_TARGET * self._targets()) + self._slots())

    def try_acquire(self, *, urgent: bool = False) -> bool:
        """Take a place if there is one."""
        room = _URGENT_ROOM if urgent else 1.0
        if self.in_flight >= min(self.cap, int(self.limit * room)) and not self._raised(room):
            self._most_inside = max(self._most_inside, self.in_flight)
            return False
        self.in_flight += 1
        self._most_inside = max(self._most_inside, self.in_flight)
        return True

    def _raised(self, room: float) -> bool:
        """Whether targets have come since that take more than the limit lets in."""
        self.limit = max(self.limit, float(min(self.cap, self._slots())))
        return self.in_flight < min(self.cap, int(self.limit * room))

    def release(self) -> None:
        self.in_flight -= 1

    def answered(self, queue_s: float, compute_s: float, now: float) -> None:
        """An answer came that queued and was computed for so long."""
        self._answers += 1
        self._compute_s += compute_s
        self._spent_s += queue_s + compute_s
        self._close_window(now)

    def dropped(self, now: float) -> None:
        """A target's queue refused an attempt."""
        self._drops += 1
        self._close_window(now)

    def _close_window(self, now: float) -> None:
        if now < self._opened_at + WINDOW_S or self._answers + self._drops < _MIN_SAMPLES:
            return
        if self._compute_s > 0.0:
            self._adapt(min(_STRETCH_AT_MOST, self._spent_s / self._compute_s), now)
        self._most_inside = self.in_flight
        self._opened_at = now
        self._answers = self._drops = 0
        self._compute_s = self._spent_s = 0.0

    def _adapt(self, stretch: float, now: float) -> None:
        self._usual.record(min(stretch, _USUAL_AT_MOST), now)
        self._recent.append((float(self._most_inside), stretch))
        if self._fixed or self._most_inside <= self.limit / 2.0:
            return
        gradient = max(_STEEPEST, min(1.0, TOLERANCE * self._usual.value / stretch))
        if self._drops > _DROPPED_RATIO * (self._answers + self._drops):
            gradient = min(gradient, _DROP)
        wanted = gradient * self.limit + sqrt(self.limit)
        if wanted < self.limit and _correlation(self._recent) < _AGAINST:
            return
        self.limit = min(float(self.cap), max(float(self.floor), self.limit + _SMOOTHING * (wanted - self.limit)))

    def __repr__(self) -> str:
        return f"<AdaptiveLimit {self.in_flight}/{self.limit:.0f} in flight, at most {self.cap}>"


def _correlation(pairs: deque[tuple[float, float]]) -> float:
    """Pearson's, from -1 to 1; 0 where one of the two does not vary."""
    count = len(pairs)
    mean_x, mean_y = sum(x for x, _ in pairs) / count, sum(y for _, y in pairs) / count
    spread_x, spread_y = sum((x - mean_x) ** 2 for x, _ in pairs), sum((y - mean_y) ** 2 for _, y in pairs)
    both = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return both / sqrt(spread_x * spread_y) if spread_x * spread_y > 1e-18 else 0.0
