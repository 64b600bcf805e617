"""What an attempt owes and tells, as its two shells' common evidence (`gateway/core/request/attempt.py`) sees it.

Whoever placed the attempt may have attached a toll to its candidate: it is told of the launch and of the end, once
each. So admission learns what queues do and what compute was spent without a second book-keeping in the shells.
"""

from __future__ import annotations

from typing import Protocol


class AttemptObserver(Protocol):
    """Told `launched` once, and then one of the others, once."""

    def launched(self, now: float) -> None: ...

    def answered(self, queue_s: float, compute_s: float | None, now: float) -> None:
        """`compute_s` None: the target did not say."""

    def refused(self, now: float, *, full: bool) -> None:
        """The target refused it: its queue was `full`, or held no chance to be in time."""

    def failed(self, now: float) -> None:
        """It failed, and nothing was computed that anybody knows of."""

    def cancelled(self, now: float) -> None:
        """We gave it up; it may be computed all the same."""
