"""Help counts are what a device has asked of gateways and neighbours for its local callers, and what became of it.

`reason` is why a request needed help: `unfit` (no variant here takes it), `no-model`, `late` (by the queue here),
`busy` (no room here), `down` (its worker is away), `unsure` (of its answer). `outcome` is a label of
`tidegate.outcome.Outcome`, or `not-asked`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

HelpReason = Literal["unfit", "no-model", "late", "busy", "down", "unsure"]
NOT_ASKED: Final = "not-asked"


class HelpCounts:
    """Mutable, and read where somebody scrapes."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[HelpReason, str]] = Counter()
        self.in_flight = 0
        self.gateways = 0  # that can be asked
        self.neighbours = 0
        self.seconds = 0.0  # that answers took, together

    def __repr__(self) -> str:
        return f"<HelpCounts {self.requests.total()} requests, {self.in_flight} in flight>"
