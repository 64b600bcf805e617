"""Neighbour counts are what other devices of the site have asked of this one, and what became of it, by outcome."""

from __future__ import annotations

from collections import Counter


class NeighbourCounts:
    """Mutable, and read where somebody scrapes."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by label of `tidegate.outcome.Outcome`
        self.in_flight = 0

    def __repr__(self) -> str:
        return f"<NeighbourCounts {self.requests.total()} requests, {self.in_flight} in flight>"
