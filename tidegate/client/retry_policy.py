"""Whether a failed call is tried again, and after which wait.

A refusal that says when to come back (`retry-after-ms`) is taken at its word, and a little more by chance, so that a
crowd that was refused together does not come back together. Without a word the wait doubles from try to try, with full
jitter. No try begins that its budget could not pay for, and the caller's own faults are never tried again.

How it can be wrong: a connection that broke behind the request may have been answered all the same. Inference has no
effects beside its cost, but a step of a sequence has, and so has a request that a device is to keep: such calls are not
tried again once they may have been done (`refusals.may_have_been_done`).

Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.outcome import NothingAlive, Overloaded, ServeError, Unreachable

RETRIED: Final = (Overloaded, NothingAlive, Unreachable)
_SPREAD: Final = 0.1  # of a wait that the refusal named


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a client is. `tries=1` never tries again."""

    tries: int = 3
    first_wait_s: float = 0.05
    longest_wait_s: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1 or self.first_wait_s < 0 or self.longest_wait_s < 0:
            raise ValueError(f"tries has to be 1 or more, and no wait negative: {self}")

    def wait_s(self, error: ServeError, failed: int, left_s: float | None, draw: float) -> float | None:
        """Seconds until the next try; None: there is none, and the error is the answer.

        Args:
            failed: tries so far, at least 1.
            left_s: what is left of the budget; None without one.
            draw: of chance, in [0, 1).
        """
        if not isinstance(error, RETRIED) or failed >= self.tries:
            return None
        if error.retry_after_s is not None:
            wait_s = error.retry_after_s * (1.0 + _SPREAD * draw)
        else:
            wait_s = min(self.first_wait_s * 2.0 ** (failed - 1), self.longest_wait_s) * draw
        if wait_s > self.longest_wait_s or (left_s is not None and wait_s >= left_s):
            return None
        return wait_s
