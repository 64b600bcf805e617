"""The standby policy decides when a warm reserve worker takes a share of the work, and when it rests again.

Spare capacity that always serves is no spare: it is used up by the load that it makes possible, and when a worker dies
there is none. A standby worker is loaded, warm and idle. It is called in at once when a worker is out or when the
predicted wait is over `wait_s`: late help is no help. It goes back only after `calm_s` without either, because a wait
that is short *with* its help says nothing about the wait without it: what counts then is whether the others could do
its share, so the wait must be under half of `wait_s`, and the workers that would be left must not be busy more than
`busy_ratio`.

Invariants: it changes at most once in `calm_s` from in to out; from out to in it never waits. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_BACK_RATIO: Final = 0.5


@dataclass(slots=True)
class Standby:
    """Mutable: `decide` with each look. `reason` says why it is in; empty while it rests.

    Args:
        wait_s: predicted seconds in the queue from which on the reserve helps.
        calm_s: seconds without need until the reserve rests again.
        busy_ratio: share of the other workers' time above which they could not do without the reserve.
    """

    wait_s: float
    calm_s: float = 30.0
    busy_ratio: float = 0.7
    reason: str = ""
    _needed_at: float = 0.0

    def decide(self, now: float, *, wait_s: float, missing: int, busy_without: float) -> bool:
        """Whether the reserve takes a share now.

        Args:
            wait_s: predicted wait of a request that arrives now.
            missing: workers that should serve and do not.
            busy_without: share of the other workers' time that would be taken if they did all the work.
        """
        need = self._need(wait_s, missing)
        if need:
            self.reason, self._needed_at = need, now
        elif self.reason:
            still = wait_s > _BACK_RATIO * self.wait_s or busy_without > self.busy_ratio
            self._needed_at = now if still else self._needed_at
            if now - self._needed_at >= self.calm_s:
                self.reason = ""
        return bool(self.reason)

    def _need(self, wait_s: float, missing: int) -> str:
        if missing > 0:
            return f"{missing} out"
        return f"wait of {wait_s * 1e3:.0f} ms" if wait_s > self.wait_s else ""

    def __repr__(self) -> str:
        return f"<Standby {self.reason or 'rests'}>"
