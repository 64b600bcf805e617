"""A breaker stops calls to what keeps failing, and finds out carefully when it works again.

    CLOSED ──last straw──▶ OPEN ──cooled──▶ HALF_OPEN ──enough successes──▶ CLOSED
                            ▲ └───heard──────▶  │
                            └──────failure──────┘      (each time open for twice as long, up to a cap)

Every target has two, since a process that answers nonsense and a path that swallows frames are different faults with
different proofs and different cures (`blame` says whose an error is):

    the target's   opens on its own hard failures: `threshold` in a row, or fewer than half good of ten or more in ten
                   seconds; and when it stalls, that is promises answers and gives none (`progress.py`). Only an answer
                   speaks for it.
    the path's     opens on connections that fail, and when three attempts stay unacknowledged (`LinkEstimate.is_mute`).
                   Any frame that arrives speaks for it (`heard`): a pong proves as much as an answer.

Nothing else counts. A caller's bad request, a full queue, a budget that was too short and our own cancellations say
nothing about health, unless the target had promised its answer for an earlier instant and owes it, or called a request
invalid that another one answered: `attempt.py` then reports a failure. An Overloaded answer is load, and belongs to the
queue estimate.

While half open one attempt at a time goes through as a probe. A probe that was cancelled gives its place back.
Attempts from before it opened change nothing when they end: only probes speak for the target as it is now. They are
counted all the same: `chance` is what is left to go by when a fleet must use targets that it would rather not
(`gateway/core/fleet/ejection.py`).

Invariants: nothing but a probe is allowed while not CLOSED; the open time stays within ±20 % of min(cap, base · 2^k).
Chance is an argument. Source: docs/design/routing.md, "Breakers"; Nygard, "Release It!", chapter 5.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from gateway.core.health.success_window import SuccessWindow
from tidegate.outcome import BadAnswer, InternalError, ServeError, Unreachable


class BreakerState(IntEnum):
    """The values are those of the metric `tidegate_breaker_state`."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class AttemptVerdict(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    IGNORED = "ignored"


class Blame(NamedTuple):
    """What an attempt's end says about the process that was asked, and about the way there."""

    target: AttemptVerdict
    path: AttemptVerdict


class _BreakerEvent(StrEnum):
    SUCCESS = "success"
    ENOUGH = "enough"  # the success that makes a half-open breaker trust again
    FAILURE = "failure"
    LAST_STRAW = "last straw"  # the failure that opens a closed breaker
    COOLED = "cooled"
    HEARD = "heard"  # a sign of life that was not asked for


_NEXT: Final[dict[tuple[BreakerState, _BreakerEvent], BreakerState]] = {
    (BreakerState.CLOSED, _BreakerEvent.FAILURE): BreakerState.CLOSED,
    (BreakerState.CLOSED, _BreakerEvent.LAST_STRAW): BreakerState.OPEN,
    (BreakerState.OPEN, _BreakerEvent.COOLED): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, _BreakerEvent.HEARD): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, _BreakerEvent.SUCCESS): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, _BreakerEvent.ENOUGH): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, _BreakerEvent.FAILURE): BreakerState.OPEN,
}
_NO_FAULT: Final = Blame(AttemptVerdict.SUCCESS, AttemptVerdict.SUCCESS)
_PROBES_TO_CLOSE: Final = 2
_LEAST_CALLS: Final = 10  # before a share of successes means anything
_LEAST_SHARE: Final = 0.5


def blame(error: ServeError | None) -> Blame:
    """Whose fault an attempt's end is; None is an answer."""
    if error is None:
        return _NO_FAULT
    if isinstance(error, Unreachable):
        return Blame(AttemptVerdict.IGNORED, AttemptVerdict.FAILURE)
    return Blame(
        AttemptVerdict.FAILURE if isinstance(error, BadAnswer | InternalError) else AttemptVerdict.IGNORED,
        AttemptVerdict.IGNORED,  # an error may be of our own making: frames that came call `heard` themselves
    )


class Breaker:
    """Mutable. `allows` before placing, `launched` with each attempt, `record` at its end with what `launched` said."""

    __slots__ = (
        "_base_s",
        "_cap_now_s",
        "_cap_s",
        "_failures",
        "_on_move",
        "_openings",
        "_probing",
        "_recent",
        "_successes",
        "_threshold",
        "reason",
        "retry_at",
        "state",
        "tripped",
    )  # fmt: skip

    def __init__(
        self,
        *,
        threshold: int = 5,
        base_s: float = 0.5,
        cap_s: float = 30.0,
        on_move: Callable[[float], None] = lambda _now: None,
    ) -> None:
        """Args: on_move: called with the instant after the state has changed."""
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0  # when an open breaker lets a probe through
        self.reason = ""  # why it is not closed, in words
        self.tripped = False  # whether it opened last on other evidence than calls that failed
        self._threshold = threshold
        self._base_s = base_s
        self._cap_s = self._cap_now_s = cap_s
        self._on_move = on_move
        self._recent = SuccessWindow()
        self._failures = 0  # in a row
        self._successes = 0  # in a row, of probes
        self._openings = 0  # without a return to CLOSED in between
        self._probing = False

    @property
    def is_probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probing

    def allows(self, now: float) -> bool:
        """Whether an attempt may be launched now: any while closed, else one probe when it is due."""
        if self.state is BreakerState.CLOSED:
            return True
        return not self._probing and (self.state is BreakerState.HALF_OPEN or now >= self.retry_at)

    def launched(self, now: float) -> bool:
        """Note an attempt; returns whether it is a probe. One that `allows` did not let through is none."""
        if self.state is BreakerState.CLOSED or not self.allows(now):
            return False
        if self.state is BreakerState.OPEN:
            self._half_open(_BreakerEvent.COOLED, now)
        self._probing = True
        return True

    def record(self, outcome: AttemptVerdict, now: float, draw: float, *, probe: bool = False) -> None:
        """The end of an attempt. `draw` in [0, 1) spreads the open time, so that gateways do not probe as one."""
        if outcome is not AttemptVerdict.IGNORED:
            self._recent.add(now, success=outcome is AttemptVerdict.SUCCESS)
        if probe:
            self._probing = False
        if self.state is BreakerState.OPEN or (self.state is BreakerState.HALF_OPEN and not probe):
            return  # an attempt from before it opened: its news is old
        if outcome is AttemptVerdict.SUCCESS:
            self._succeeded(now)
        elif outcome is AttemptVerdict.FAILURE:
            self._failed(now, draw)

    def disputed(self, now: float, draw: float) -> None:
        """An attempt that had ended without a verdict was wrong, as another target's answer shows.

        It counts among the recent ones and not in a row: a few odd requests, on which two targets differ, must not take
        one of them from everybody.
        """
        self._recent.add(now, success=False)
        if self.state is BreakerState.HALF_OPEN and not self._probing:
            self._open(_BreakerEvent.FAILURE, "its probe was answered elsewhere", now, draw)
        elif self.state is BreakerState.CLOSED and (reason := self._should_open(now)):
            self.tripped = False
            self._open(_BreakerEvent.LAST_STRAW, reason, now, draw)

    def heard(self, now: float) -> None:
        """A sign of life came unasked: it counts as a good probe, and an open breaker need not cool to believe it."""
        if self.state is BreakerState.CLOSED:
            return
        if self.state is BreakerState.OPEN:
            self._half_open(_BreakerEvent.HEARD, now)
        self._succeeded(now)

    def trip(self, reason: str, now: float, draw: float, *, cap_s: float | None = None) -> None:
        """Open a closed one on other evidence than calls that ended. Nothing if it is not closed.

        Args:
            cap_s: the longest time without a probe until it is closed again; None: as ever.
        """
        if self.state is BreakerState.CLOSED:
            self._cap_now_s = self._cap_s if cap_s is None else cap_s
            self.tripped = True
            self._open(_BreakerEvent.LAST_STRAW, reason, now, draw)

    def answered_late(self, now: float) -> None:
        """An answer came to an attempt from before it opened. It contradicts a silence, and counts as a good probe."""
        if self._cap_now_s < self._cap_s:
            self.heard(now)

    def cut_short(self, now: float) -> None:
        """What made it open was mended, by what is known: the next probe is due now."""
        self.retry_at = min(self.retry_at, now)

    def retire(self) -> None:
        """It stands for no target any more: attempts from its time may still end on it, and `on_move` is not called."""
        self._on_move = lambda _now: None

    def chance(self, now: float) -> float:
        """Of calls that reach it, the share that succeed, by the last ten seconds (Laplace's rule; ½ of nothing)."""
        good, bad = self._recent.counts(now)
        return (good + 1.0) / (good + bad + 2.0)

    def _half_open(self, event: _BreakerEvent, now: float) -> None:
        self._successes = 0
        self._move(event, now)

    def _succeeded(self, now: float) -> None:
        self._failures = 0
        if self.state is not BreakerState.HALF_OPEN:
            return  # closed, and stays so: nearly every attempt ends here
        self._successes += 1
        if self._successes < _PROBES_TO_CLOSE:
            self._move(_BreakerEvent.SUCCESS, now)
            return
        self._openings = 0
        self._cap_now_s = self._cap_s
        self.reason = ""
        self._recent.clear()  # what it did before it was mended is held against it no more
        self._move(_BreakerEvent.ENOUGH, now)

    def _failed(self, now: float, draw: float) -> None:
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            return self._open(_BreakerEvent.FAILURE, "its probe failed", now, draw)
        reason = self._should_open(now)
        if not reason:
            return self._move(_BreakerEvent.FAILURE, now)
        self.tripped = False
        return self._open(_BreakerEvent.LAST_STRAW, reason, now, draw)

    def _should_open(self, now: float) -> str:
        if self._failures >= self._threshold:
            return f"{self._failures} calls in a row failed"
        good, bad = self._recent.counts(now)
        if good + bad >= _LEAST_CALLS and good < _LEAST_SHARE * (good + bad):
            return f"{bad} of {good + bad} calls failed within 10 s"
        return ""

    def _open(self, event: _BreakerEvent, reason: str, now: float, draw: float) -> None:
        open_s = min(self._cap_now_s, self._base_s * 2.0**self._openings)
        self.retry_at = now + open_s * (0.8 + 0.4 * draw)
        self.reason = reason
        self._openings = min(self._openings + 1, 30)  # 2^30 is past any cap; keeps the power finite
        self._move(event, now)

    def _move(self, event: _BreakerEvent, now: float) -> None:
        before, self.state = self.state, _NEXT[self.state, event]
        if self.state is not before:
            self._on_move(now)

    def __repr__(self) -> str:
        detail = f" retry_at={self.retry_at:.3f}" if self.state is BreakerState.OPEN else ""
        return f"<Breaker {self.state.name} {self._failures}/{self._threshold} failures{detail}>"
