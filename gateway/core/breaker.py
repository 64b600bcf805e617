"""Stop calling a target that keeps failing, and find out carefully when it works again.

    CLOSED ──last straw──▶ OPEN ──cooled──▶ HALF_OPEN ──enough successes──▶ CLOSED
                            ▲                   │
                            └──────failure──────┘      (each time open for twice as long, up to a cap)

Only a target's own fault counts. A caller's bad request, a full queue, a budget that was too short and our own
cancellations say nothing about its health: `verdict` sorts an error into success, failure or ignored. An Overloaded
answer is load, and belongs to the ledger.

While half open one attempt at a time goes through as a probe. A probe that was cancelled gives its place back.
Attempts from before it opened change nothing when they end: only probes speak for the target as it is now.

Invariants: nothing but a probe is allowed while not CLOSED; the open time stays within ±20 % of min(cap, base · 2^k).
Chance is an argument. Source: routing.md B5; Nygard, "Release It!", chapter 5.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

from tidegate.outcome import InternalError, PeerError, ServeError


class State(IntEnum):
    """The values are those of the metric `tidegate_breaker_state`."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class Verdict(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    IGNORED = "ignored"


class _Event(StrEnum):
    SUCCESS = "success"
    ENOUGH = "enough"  # the success that makes a half-open breaker trust again
    FAILURE = "failure"
    LAST_STRAW = "last straw"  # the failure that opens a closed breaker
    COOLED = "cooled"


_NEXT: Final[dict[tuple[State, _Event], State]] = {
    (State.CLOSED, _Event.SUCCESS): State.CLOSED,
    (State.CLOSED, _Event.FAILURE): State.CLOSED,
    (State.CLOSED, _Event.LAST_STRAW): State.OPEN,
    (State.OPEN, _Event.COOLED): State.HALF_OPEN,
    (State.HALF_OPEN, _Event.SUCCESS): State.HALF_OPEN,
    (State.HALF_OPEN, _Event.ENOUGH): State.CLOSED,
    (State.HALF_OPEN, _Event.FAILURE): State.OPEN,
}
_PROBES_TO_CLOSE: Final = 2


def verdict(error: ServeError | None) -> Verdict:
    """What an attempt's end says about the target's health; None is an answer."""
    if error is None:
        return Verdict.SUCCESS
    return Verdict.FAILURE if isinstance(error, PeerError | InternalError) else Verdict.IGNORED


class Breaker:
    """Mutable. `allows` before placing, `launched` with each attempt, `record` at its end with what `launched` said."""

    __slots__ = (
        "_base_s", "_cap_s", "_failures", "_openings", "_probing", "_successes", "_threshold", "retry_at", "state",
    )  # fmt: skip

    def __init__(self, *, threshold: int = 5, base_s: float = 0.5, cap_s: float = 30.0) -> None:
        self.state = State.CLOSED
        self.retry_at = 0.0  # when an open breaker lets a probe through
        self._threshold = threshold
        self._base_s = base_s
        self._cap_s = cap_s
        self._failures = 0  # in a row
        self._successes = 0  # in a row, of probes
        self._openings = 0  # without a return to CLOSED in between
        self._probing = False

    def allows(self, now: float) -> bool:
        """Whether an attempt may be launched now."""
        if self.state is State.CLOSED:
            return True
        return not self._probing and (self.state is State.HALF_OPEN or now >= self.retry_at)

    def launched(self) -> bool:
        """Note an attempt that `allows` let through; returns whether it is a probe."""
        if self.state is State.CLOSED:
            return False
        if self.state is State.OPEN:
            self._move(_Event.COOLED)
            self._successes = 0
        self._probing = True
        return True

    def record(self, outcome: Verdict, now: float, draw: float, *, probe: bool = False) -> None:
        """The end of an attempt. `draw` in [0, 1) spreads the open time, so that gateways do not probe as one."""
        if probe:
            self._probing = False
        elif self.state is not State.CLOSED:
            return  # an attempt from before it opened: its news is old
        if outcome is Verdict.SUCCESS:
            self._succeeded()
        elif outcome is Verdict.FAILURE:
            self._failed(now, draw)

    def _succeeded(self) -> None:
        self._failures = 0
        if self.state is not State.HALF_OPEN:
            return self._move(_Event.SUCCESS)
        self._successes += 1
        if self._successes < _PROBES_TO_CLOSE:
            return self._move(_Event.SUCCESS)
        self._openings = 0
        return self._move(_Event.ENOUGH)

    def _failed(self, now: float, draw: float) -> None:
        self._failures += 1
        last_straw = self.state is State.CLOSED and self._failures >= self._threshold
        self._move(_Event.LAST_STRAW if last_straw else _Event.FAILURE)
        if self.state is State.OPEN:
            open_s = min(self._cap_s, self._base_s * 2.0**self._openings)
            self.retry_at = now + open_s * (0.8 + 0.4 * draw)
            self._openings = min(self._openings + 1, 30)  # 2^30 is past any cap; keeps the power finite

    def _move(self, event: _Event) -> None:
        self.state = _NEXT[self.state, event]

    def __repr__(self) -> str:
        detail = f" retry_at={self.retry_at:.3f}" if self.state is State.OPEN else ""
        return f"<Breaker {self.state.name} {self._failures}/{self._threshold} failures{detail}>"
