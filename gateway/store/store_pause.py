"""The pause after a failure of the store doubles for each silence in a row, and not for each call that met the silence.

Several calls are in flight when a store falls silent, and all of them fail within one timeout. They say one thing, so
they count once: a call that began before the last counted failure changes nothing. The next to count is one that was
let through after the pause, and failed too.

Counted one by one, eight calls in flight would make of a silence of 0.7 s a pause of LONGEST_PAUSE_S, in which a
conductor's lease runs out (`gateway/delivery/rollouts/conductor_lease.py`). Counted once, a silence that is over before
the next try costs FIRST_PAUSE_S, into which at most one of the lease's renewals falls. LONGEST_PAUSE_S with its jitter
is longer than that lease, and need not be shorter: it follows on four failures in a row, each with its pause, and in
these the lease has run out already.

Invariants: pure. No pause is over before three quarters of it, nor later than five quarters.
"""

from __future__ import annotations

from math import inf
from typing import Final

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0


class StorePause:
    """Mutable: `failed` and `answered` record what became of a call."""

    def __init__(self) -> None:
        self.length_s = 0.0  # of the last one, without its jitter; 0 once the store has answered
        self._failed_at = -inf
        self._retry_at = -inf

    def is_over(self, now: float) -> bool:
        return now >= self._retry_at

    def failed(self, *, began_at: float, now: float, draw: float) -> None:
        """Record a call that failed.

        Args:
            began_at: when it was let through.
            draw: chance, uniform in [0, 1).
        """
        if self.length_s and began_at <= self._failed_at:
            return
        self._failed_at = now
        self.length_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2.0 * self.length_s))
        self._retry_at = now + self.length_s * (0.75 + 0.5 * draw)

    def answered(self) -> None:
        self.length_s = 0.0

    def __repr__(self) -> str:
        return f"<StorePause {self.length_s:g} s>"
