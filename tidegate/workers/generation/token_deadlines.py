"""Which sequences are due first: the one whose next token has the earliest deadline.

    first token      due at arrival + its `first_token_s`
    each other one   due at the last token + its `token_interval_s`
    after a pause    as after a token: what its reader let pass is not caught up with

A sequence with a long interval would wait for ever behind others that are always more urgent, so waiting makes urgent:
after `STARVED_S` without a token a sequence counts as due then, whatever its interval. Paused sequences are left out.

Pure. Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973
(earliest deadline first).
"""

from __future__ import annotations

from typing import Final

STARVED_S: Final = 1.0  # half a second is a pause that readers notice, two are a fault


class TokenDeadlines:
    """Mutable: `begin`, `token`, `pause` and `resume` as they happen, `forget` at the end; `order` says who is next."""

    __slots__ = ("_intervals_s", "_urgency")

    def __init__(self) -> None:
        self._intervals_s: dict[int, float] = {}
        self._urgency: dict[int, float] = {}  # of those that are not paused: the instant at which each is due

    def begin(self, sequence: int, now: float, *, first_token_s: float, token_interval_s: float) -> None:
        self._intervals_s[sequence] = min(token_interval_s, STARVED_S)
        self._urgency[sequence] = now + min(first_token_s, STARVED_S)

    def token(self, sequence: int, now: float) -> None:
        """It got a token."""
        if sequence in self._urgency:
            self._urgency[sequence] = now + self._intervals_s[sequence]

    def pause(self, sequence: int) -> None:
        self._urgency.pop(sequence, None)

    def resume(self, sequence: int, now: float) -> None:
        if sequence not in self._urgency:
            self._urgency[sequence] = now + self._intervals_s[sequence]

    def forget(self, sequence: int) -> None:
        self._urgency.pop(sequence, None)
        self._intervals_s.pop(sequence, None)

    def order(self) -> list[int]:
        """Those that may go on, the most urgent first; of equals the one that began first."""
        return sorted(self._urgency, key=self._urgency.__getitem__)

    def __bool__(self) -> bool:
        return bool(self._urgency)

    def __len__(self) -> int:
        return len(self._intervals_s)

    def __repr__(self) -> str:
        return f"<TokenDeadlines {len(self._urgency)} due, {len(self._intervals_s) - len(self._urgency)} paused>"
