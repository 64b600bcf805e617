"""A tally of lost workers says how often a place lost its worker against its will, when it last did, and why.

A watchdog that ends a hung worker mends the fault and hides it: a second later the model is ready. Without a tally an
operator sees a device that is slow now and then, and nothing that says so. A worker that is replaced on purpose, for
its memory or its age, is not counted.

The tally is what an agent's doctor reads (`GET /v1/state`), and, as a `WorkerReport` in the model's offer, what
gateways hear of it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.fleet.offers import REASON_CHARS, WorkerReport


class LostWorkers:
    """Mutable: `lost` with each worker that ended against its owner's will."""

    __slots__ = ("at", "count", "reason")

    def __init__(self) -> None:
        self.count = 0
        self.at = 0.0  # of the last
        self.reason = ""  # of the last

    def lost(self, reason: str, now: float) -> None:
        self.count, self.at, self.reason = self.count + 1, now, reason

    def __repr__(self) -> str:
        return f"<LostWorkers {self.count}{f', last at {self.at:.3f}: {self.reason}' if self.count else ''}>"


def report_of(tallies: Iterable[LostWorkers]) -> WorkerReport | None:
    """What several places lost together; None where none lost any."""
    losers = [one for one in tallies if one.count]
    if not losers:
        return None
    last = max(losers, key=lambda one: one.at)
    return WorkerReport(sum(one.count for one in losers), last.reason[:REASON_CHARS])
