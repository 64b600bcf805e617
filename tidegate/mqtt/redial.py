"""Redial decides how long to wait before the next attempt at a broker, by how the last attempt ended.

One backoff for everything remembers too much. A broker that was away for a minute had taught every device to wait up to
half a minute, so the fleet came back half a minute after it; a broker that was away a few times taught them the same,
since no session between grew old enough to be forgiven. So failures of the broker are kept apart from failures that may
be ours:

    AWAY     no answer to a CONNECT (refused, hung up, silent)       short waits: an attempt costs nothing
    REFUSED  the broker refuses (password, filter, busy)             long waits: more attempts do not help
    SHORT    a session began and ended soon                          long waits: two agents that were given one name
                                                                     drift apart instead of taking turns
    HELD     a session that stood for a while                        all is forgiven

A broker that is away forgives what came before: it was the broker that ended those sessions. All waits are drawn from
zero to a ceiling that doubles (`tidegate/runtime/backoff.py`), so a fleet does not come back in one instant:

    connects a second at the broker, when it is back = devices / away cap        1,000 devices: 333 a second

It can be wrong where a broker is up for less than half a minute at a time, again and again, and never seen away
between: then each of its ends looks like our own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from tidegate.runtime.backoff import Backoff

AWAY_CAP_S: Final = 3.0
HELD_AFTER_S: Final = 30.0  # a session this old forgives the failures before it


class SessionEnd(Enum):
    """How an attempt ended."""

    AWAY = "away"
    REFUSED = "refused"
    SHORT = "short"
    HELD = "held"

    @classmethod
    def of_session(cls, age_s: float) -> SessionEnd:
        return cls.HELD if age_s >= HELD_AFTER_S else cls.SHORT


class RedialPolicy:
    """Mutable: `wait_s` notes an end.

    Args:
        draw: chance, uniform in [0, 1).
        cap_s: the longest wait for a broker that is there; for one that is away it is `AWAY_CAP_S`, if that is less.
    """

    def __init__(self, draw: Callable[[], float], base_s: float, cap_s: float) -> None:
        self._away = Backoff(draw, base_s, min(AWAY_CAP_S, cap_s))
        self._unwelcome = Backoff(draw, base_s, cap_s)

    @property
    def failures(self) -> int:
        """Attempts in vain, in a row and of one kind."""
        return self._away.failures + self._unwelcome.failures

    def wait_s(self, end: SessionEnd) -> float:
        """How long to wait before the next attempt, from now."""
        if end is SessionEnd.AWAY:
            self._unwelcome.reset()
            return self._away.next_delay_s()
        self._away.reset()
        if end is SessionEnd.HELD:
            self._unwelcome.reset()
        return self._unwelcome.next_delay_s()

    def __repr__(self) -> str:
        return f"<RedialPolicy {self._away.failures} times away, {self._unwelcome.failures} times unwelcome>"
