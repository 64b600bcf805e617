"""Siblings are the processes of one gateway (`workers`), which divide among themselves what the gateway may use.

Shares come in two steps, so that every process and every other gateway computes them from the same numbers:

    among gateways    each counts as one, with what is asked of all its processes together (`combined`)
    among siblings    the gateway's share, by what is asked of each

To other gateways one with many processes is one that is asked much. Which siblings live is known from their parent, so
none is waited for when it has died; one that lives and has not said anything counts as one that takes an equal part.

Pure: `now` does not decrease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import fmean

from gateway.core.peers.demand_terms import pooled
from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import FRESH_S, CloudSpend, PeerReport


class Siblings:
    """Mutable: `alive` and `report` fold what is heard; the rest reads it."""

    def __init__(self) -> None:
        self._alive: frozenset[str] = frozenset()
        self._reports: dict[str, tuple[PeerReport, float]] = {}

    def alive(self, names: Iterable[str]) -> None:
        """Those that live beside this process, by all that is known now."""
        self._alive = frozenset(names)
        self._reports = {name: one for name, one in self._reports.items() if name in self._alive}

    def report(self, name: str, report: PeerReport, now: float) -> None:
        if name in self._alive:
            self._reports[name] = (report, now)

    @property
    def count(self) -> int:
        """How many live beside this one."""
        return len(self._alive)

    def reports(self, now: float) -> list[PeerReport]:
        """What they say, of those that have said it lately."""
        return [report for report, at in self._reports.values() if now - at <= FRESH_S]

    def unknown(self, now: float) -> int:
        """How many live and have not."""
        return self.count - len(self.reports(now))

    def __repr__(self) -> str:
        return f"<Siblings {', '.join(sorted(self._alive)) or 'none'}>"


def combined(reports: Sequence[PeerReport]) -> PeerReport:
    """What these processes of one gateway say as that gateway; at least one."""
    asked: dict[str, dict[str, QuotaUse]] = {}
    for report in reports:
        for name, kinds in report.asked.items():
            held = asked.setdefault(name, {})
            for kind, one in kinds.items():
                before = held.get(kind, QuotaUse(0.0, 0.0))
                held[kind] = QuotaUse(before.asked + one.asked, before.used + one.used)
    needs = [report.need for report in reports if report.need is not None]
    spends = [report.cloud for report in reports if report.cloud is not None]
    cloud = None
    if spends:
        # Prices are multiplied, so their mean is the geometric one (gateway/core/placement/cloud_budget.py).
        cloud = CloudSpend(sum(one.spend for one in spends), exp(fmean(log(one.factor) for one in spends)))
    return PeerReport(asked, pooled(needs) if needs else None, cloud)
