"""A name dispute keeps an agent away from the fleet after a gateway has given its name to another agent.

An agent that reconnected at once would take the name back, and both would flap for as long as both live. So it stands
down: for `FIRST_STAND_DOWN_S`, and twice as long each time that it is refused again, up to `MOST_STAND_DOWN_S`, each
jittered downwards by a quarter. It goes on serving its local callers. Then it asks again, since the other agent may
have been ended. A stretch of peace as long as the longest wait forgives the past.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from tidegate.fleet.name_conflict import FIRST_STAND_DOWN_S, MOST_STAND_DOWN_S, MOST_WORDS

_JITTER: Final = 0.25
SHOWN_S: Final = 60.0  # after the wait, for people: the next answer is not known at once


class NameDispute:
    """Mutable: `refused` notes a gateway's refusal; `standing_down` says whether to stay away now.

    Args:
        draw: chance, uniform in [0, 1).
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self.until = -inf
        self._draw = draw
        self._times = 0
        self._words = ""

    def refused(self, words: str, now: float) -> float:
        """Note a refusal; returns for how long to stay away. Several gateways refuse one attempt, which counts once."""
        self._words = words[:MOST_WORDS]
        if now < self.until:
            return self.until - now
        if now - self.until > MOST_STAND_DOWN_S:
            self._times = 0
        wait_s = min(MOST_STAND_DOWN_S, FIRST_STAND_DOWN_S * 2.0 ** min(self._times, 16))
        self._times += 1
        self.until = now + wait_s * (1.0 - _JITTER * self._draw())
        return self.until - now

    def standing_down(self, now: float) -> bool:
        return now < self.until

    def told(self, now: float) -> str:
        """The last refusal, for people; "" once it is over."""
        return self._words if now < self.until + SHOWN_S else ""

    def __repr__(self) -> str:
        return f"<NameDispute refused {self._times} times>"
