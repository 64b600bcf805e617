"""An attempt observer hears of one attempt's launch and of its end, once each.

The placement stack may attach one to the chosen candidate, and `gateway/core/request/attempt.py` calls it. So admission
learns what queues do and what compute was spent, without book-keeping of its own in the gateway and in the simulator.
"""

from __future__ import annotations

from typing import Protocol


class AttemptObserver(Protocol):
    """Receives `launched` once, and then one of the others, once."""

    def launched(self, now: float) -> None: ...

    def answered(self, queue_s: float, compute_s: float | None, now: float) -> None:
        """An answer came. `compute_s` None: the target did not report it."""

    def refused(self, now: float, *, full: bool) -> None:
        """The target refused it: its queue was `full`, or held no chance to be in time."""

    def failed(self, now: float) -> None:
        """It failed, as far as is known without computing anything."""

    def cancelled(self, now: float) -> None:
        """We gave it up; it may be computed all the same."""
