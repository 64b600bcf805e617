"""The help breaker keeps a device from asking a gateway that does not answer again and again.

    CLOSED    asked; after `FAILURES` questions in a row without any answer: OPEN
    OPEN      not asked until its pause is over, which doubles from `FIRST_PAUSE_S` up to `LONGEST_PAUSE_S`
    PROBING   one question is under way that decides: an answer closes it, silence opens it for longer

An answer is whatever shows that the gateway is well, also a refusal. A gateway that refuses for lack of room says when
to come back; it is left alone until then, LONGEST_PAUSE_S at most. So a gateway that is gone or stuck costs its few
first callers their budgets, then one caller for each pause, and all others nothing.

Pure; instants are arguments.
Source: Nygard, "Release It!", 2nd edition 2018, "Circuit Breaker".
"""

from __future__ import annotations

from math import inf
from typing import Final

FAILURES: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class HelpBreaker:
    """Mutable: `asking` before each question, then one of `answered`, `unanswered` and `left`."""

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._open_until = -inf
        self._refuses_until = -inf
        self._is_probing = False

    def why_not(self, now: float) -> str:
        """Why the gateway is not asked now; "" where it is."""
        if now < self._refuses_until:
            return f"it has no room, and says so for {self._refuses_until - now:.1f} s more"
        if self._failures < FAILURES:
            return ""
        if now < self._open_until:
            return f"{self._failures} questions had no answer; the next is tried in {self._open_until - now:.1f} s"
        return "another question tries whether it answers again" if self._is_probing else ""

    def asking(self) -> None:
        """A question is on its way."""
        self._is_probing = self._failures >= FAILURES

    def answered(self, now: float, retry_after_s: float = 0.0) -> None:
        """The gateway answered. Args: retry_after_s: it has no room for so long."""
        self._failures, self._is_probing = 0, False
        if retry_after_s > 0.0:
            self._refuses_until = now + min(retry_after_s, LONGEST_PAUSE_S)

    def unanswered(self, now: float) -> None:
        """The question ended without any answer: out of time, or the link was lost."""
        self._failures += 1
        self._is_probing = False
        if self._failures >= FAILURES:
            pause_s = FIRST_PAUSE_S * 2.0 ** min(self._failures - FAILURES, 16)
            self._open_until = now + min(pause_s, LONGEST_PAUSE_S)

    def left(self) -> None:
        """The caller has left, which shows nothing."""
        self._is_probing = False

    def __repr__(self) -> str:
        state = "CLOSED" if self._failures < FAILURES else "PROBING" if self._is_probing else "OPEN"
        return f"<HelpBreaker {state} {self._failures} without an answer>"
