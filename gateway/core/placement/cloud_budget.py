"""The cloud budget raises the price of the cloud while more is spent there than the operator allows.

An operator sets how many seconds of the pool may be spent in a second (`cloud_budget: 0.3`, less than a third of one
device). A fixed limit would serve the first that come; a price serves the requests that are worth it. While more is
spent than the budget, a second of the cloud gets dearer; while less is, cheaper, down to its plain price:

    every 200 ms    λ ← [ λ + η · (1 + λ) · (spend / budget − 1) ]₊   at most CAP        price of the cloud · (1 + λ)

`η` is such that spending twice the budget doubles the price in 5 s, wherever it stands (a step in proportion to the
price: the price that balances a fleet may be 2 or 2,000 times the plain one, and has to be found in seconds either
way). At zero spend it halves in as long. Placement does the rest: a request that gains little from the cloud goes to an
edge, and a request for which even an answer in time is worth less than its price is refused (429) before it is sent;
those of high priority weigh more, so they stay longest.

Spend is counted when an answer comes, as its share of the compute of its batch, and smoothed over a second, so one
large batch is no alarm. What was computed in vain (a late answer, a lost hedge) is not known here and not counted:
the pool's own meter reads a little more.

Gateways side by side spend from one budget: each adds what the others say that they spend, and draws its price towards
theirs, so that a second of the cloud costs the same wherever a request comes in. One that lives and says nothing counts
as one that spends its equal part.

Invariants: 1 ≤ factor ≤ 1 + CAP; a tick costs O(1), and an idle hour no more than `_MOST_TICKS` of them.
Source: docs/design/routing.md, "Cloud budget"; Low and Lapsley, "Optimization Flow Control, I", IEEE/ACM ToN 1999.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import Final

from gateway.core.peers.peers import CloudSpend

CAP: Final = 10_000.0
_TICK_S: Final = 0.2
_DOUBLES_IN_S: Final = 5.0
_STEP: Final = 2.0 ** (_TICK_S / _DOUBLES_IN_S) - 1.0  # η
_SMOOTH_S: Final = 1.0
_MOST_OVER: Final = 10.0  # one tick can raise the price by no more than so many times what a 2-fold overspend does
_AGREEMENT: Final = 0.2  # of the distance between the own price and the mean is gone with each round of reports
_MOST_TICKS: Final = 1000  # of silence: after them the price is the plain one whatever it was


class CloudBudget:
    """Mutable: `spent` adds up, `factor` says how many times its plain price the cloud costs now.

    Args:
        pool_s_per_s: seconds of pools' compute that all gateways together may spend in a second, on average; above 0.
    """

    def __init__(self, pool_s_per_s: float) -> None:
        self.pool_s_per_s = pool_s_per_s
        self.spend = 0.0  # pool-seconds a second, smoothed
        self._elsewhere = 0.0  # by other gateways
        self._factor = 1.0
        self._unbooked_s = 0.0
        self._ticked_at: float | None = None

    def spent(self, pool_s: float) -> None:
        """An answer came for which a pool has computed so long."""
        self._unbooked_s += pool_s

    def beside(self, others: Sequence[CloudSpend], unknown: int) -> None:
        """What other gateways have said of themselves; `unknown` live and have not."""
        part = self.pool_s_per_s / (1 + len(others) + unknown)
        self._elsewhere = sum(one.spend for one in others) + unknown * part
        if others:
            mean = fmean([log(one.factor) for one in others] + [log(self._factor)])
            self._factor *= (exp(mean) / self._factor) ** _AGREEMENT

    def told(self, now: float) -> CloudSpend:
        """What the others should know."""
        return CloudSpend(self.spend, self.factor(now))

    def factor(self, now: float) -> float:
        """1 + λ."""
        if self._ticked_at is None:
            self._ticked_at = now
        ticks = int((now - self._ticked_at) / _TICK_S)
        if ticks > 0:
            self._advance(ticks)
            self._ticked_at += ticks * _TICK_S
        return self._factor

    def _advance(self, ticks: int) -> None:
        # When it was spent since the last look is not known: it is spread over the ticks.
        rate = self._unbooked_s / (ticks * _TICK_S)
        self._unbooked_s = 0.0
        for _ in range(min(ticks, _MOST_TICKS)):
            self.spend += (_TICK_S / _SMOOTH_S) * (rate - self.spend)  # exponential smoothing
            over = min((self.spend + self._elsewhere) / self.pool_s_per_s - 1.0, _MOST_OVER)
            self._factor = min(1.0 + CAP, max(1.0, self._factor * (1.0 + _STEP * over)))

    def __repr__(self) -> str:
        return f"<CloudBudget {self.spend:.3g} of {self.pool_s_per_s:g} pool-s/s, cloud at {self._factor:.3g} times>"
