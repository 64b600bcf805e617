"""Labels that cannot grow without end: a bounded number of names, and `rest` for all others.

A fleet has as many targets as its operator connects, and each label value is a time series that Prometheus keeps
for hours. So families by target name a bounded number of them:

    counters   the first N names that are counted keep theirs while they are there (`BoundedNames`): a counter must
               never fall, so no target moves between its own series and the rest's while it is counted
    gauges     the targets worth showing now (`worth_showing`): the troubled first, then the last busy ones. The rest
               is one series, with the worst value among them, so that an alert on it still fires

Pure. Source: Prometheus, "Instrumentation: do not overuse labels"; 10,000 agents are 10,000 series a family otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from heapq import nlargest
from typing import Final, TypeVar

REST: Final = "rest"
T = TypeVar("T")


class BoundedNames:
    """Mutable: `of` gives a name's label. `most` names have their own."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._named: set[str] = set()

    def of(self, name: str) -> str:
        """The name itself while there is room for it, else `rest`."""
        if name in self._named:
            return name
        if len(self._named) >= self.most:
            return REST
        self._named.add(name)
        return name

    def keep(self, present: Collection[str]) -> set[str]:
        """Forget names that are not there any more; the forgotten ones, whose series end with them."""
        gone = {name for name in self._named if name not in present}
        self._named -= gone
        return gone

    def __repr__(self) -> str:
        return f"<BoundedNames {len(self._named)} of {self.most}>"


def worth_showing(items: Iterable[T], most: int, rank: Callable[[T], tuple[float, ...]]) -> tuple[list[T], list[T]]:
    """The `most` highest in rank, and all others."""
    everybody = list(items)
    if len(everybody) <= most:
        return everybody, []
    chosen = {place for place, _ in nlargest(most, enumerate(everybody), key=lambda one: rank(one[1]))}
    return (
        [one for place, one in enumerate(everybody) if place in chosen],
        [one for place, one in enumerate(everybody) if place not in chosen],
    )
