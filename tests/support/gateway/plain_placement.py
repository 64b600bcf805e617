"""Placement as its docstrings say it, without a thought for speed: what the quick form is held against.

Every candidate is judged, each term is worked out on its own, and sums run over what they are defined over. Nothing of
`placement.estimate` and of `UtilityPlacer.choose` is used here; the parts below them (cost, insertion, congestion) are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import erf, exp, sqrt

from gateway.core.estimate.calibration import Curve, apply_curve
from gateway.core.estimate.queue_externality import insertion_cost
from gateway.core.fleet.offer_index import Offer
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import ineligible
from gateway.core.placement.utility import MOST_BILL, WHETHER, UtilityWeights, queue_position


@dataclass
class PlainLedger:
    """Mutable: the waits of a `Ledger` of an edge by their definition, from everything that ever happened to it."""

    under_way: dict[int, tuple[float, float]] = field(default_factory=dict)  # by attempt: work, key
    spoken_of: set[int] = field(default_factory=set)  # by a report
    acknowledged: set[int] = field(default_factory=set)
    report: tuple[float, float] = (0.0, 0.0)  # its instant and the delay it told
    head: tuple[int, float] | None = None  # the attempt that is computed, and since when

    def launched(self, attempt: int, work_s: float, key: float, now: float) -> None:
        self.under_way[attempt] = work_s, key
        self.head = self.head or (attempt, now)

    def ended(self, attempt: int, now: float, *, computed: bool) -> None:
        del self.under_way[attempt]
        if not self.under_way:
            self.head = None
        elif computed or self.head is None or self.head[0] == attempt:
            self.head = min(self.under_way, key=lambda one: self.under_way[one][1]), now

    def wait_s(self, now: float) -> float:
        own_s = 0.0
        if self.head is not None:
            work_s = self.under_way[self.head[0]][0]
            done_s = min(work_s, now - self.head[1])
            own_s = max(0.0, sum(one[0] for one in self.under_way.values()) - done_s)
        age_s = now - self.report[0]
        reported_s = max(0.0, self.report[1] - age_s) * (1.0 - age_s / 1.5) if age_s < 1.5 else 0.0
        since_s = sum(one[0] for key, one in self.under_way.items() if key not in self.spoken_of)
        return max(own_s, reported_s + since_s) if reported_s else own_s


@dataclass(frozen=True)
class Plain:
    """One candidate with everything that is to be known of it."""

    offered: Offer
    compute_s: float
    wait_s: float
    link_s: float
    margin_s: float
    finish_s: float
    cost: float
    trust: float
    value: float = 0.0


def plain_candidates(
    offers: Sequence[Offer], ask: Ask, prices: UtilityWeights, curve: Curve, now: float
) -> list[Plain]:
    """Those of `offers` that may take the ask, with their values."""
    seen = [_estimated(one, ask, now) for one in offers if ineligible(one.target, one.variant, ask, now) is None]
    best_quality = max((one.offered.quality for one in seen), default=1.0)
    return [_valued(one, best_quality, ask, prices, curve, now) for one in seen]


def _estimated(offered: Offer, ask: Ask, now: float) -> Plain:
    target = offered.target
    link = target.link
    compute_s = offered.cost.predict_s(ask.units)
    ahead_s = target.wait_s(now)
    wait_s = target.expected_wait_s(ahead_s, now)
    link_s = link.path(now).median_s + ask.body_bytes * link.s_per_byte
    variance = (compute_s * offered.cost.sigma) ** 2 + target.queue_estimate.error.variance(ahead_s) + link.jitter_s**2
    cost = target.price * compute_s + target.byte_price * (ask.body_bytes + ask.answer_bytes)
    finish_s = link_s + wait_s + compute_s
    return Plain(offered, compute_s, wait_s, link_s, 1.645 * sqrt(variance), finish_s, cost, target.trust(now))


def _valued(one: Plain, best_quality: float, ask: Ask, prices: UtilityWeights, curve: Curve, now: float) -> Plain:
    place, target, budget_s = queue_position(ask), one.offered.target, ask.deadline - now
    ahead_s, harm = target.wait_s(now), 0.0
    if target.queue_estimate.in_flight >= 2 and not target.spec.foreign and now >= target.refused_until:
        ahead_s, harm = insertion_cost(target.queue_estimate.queue(), place, _work(one), ahead_s, now)
    worth = place.weight * (1.0 - prices.quality * (1.0 - one.offered.quality / best_quality))
    value = (
        worth * apply_curve(_chance(one, ahead_s, budget_s, now), curve)
        - min(prices.cost, WHETHER) * one.cost
        - min(max(0.0, prices.cost - WHETHER) * one.cost, MOST_BILL * place.weight)
        - harm
        - target.queue_estimate.congestion.per_second(now) * _work(one)
        - prices.earliness * place.weight * one.finish_s / max(budget_s, 1e-6)
    )
    return Plain(*(getattr(one, name) for name in Plain.__dataclass_fields__ if name != "value"), value)


def _work(one: Plain) -> float:
    if not one.offered.target.queue_estimate.batches:
        return one.compute_s
    return max(one.compute_s - one.offered.cost.call_s(), 0.05 * one.compute_s)


def _chance(one: Plain, ahead_s: float, budget_s: float, now: float) -> float:
    target, sigma = one.offered.target, one.offered.cost.sigma
    path = target.link.path(now)
    mean_s = one.compute_s * exp(sigma * sigma / 2)
    spread_s = sqrt(mean_s * mean_s * (exp(sigma * sigma) - 1.0) + target.queue_estimate.error.variance(ahead_s))
    busy_s = one.link_s - path.median_s + target.expected_wait_s(ahead_s, now) + mean_s
    return one.trust * sum(
        weight * 0.5 * (1.0 + erf((budget_s - value_s - busy_s) / spread_s / sqrt(2.0)))
        for value_s, weight in zip(path.values_s, path.weights, strict=True)
    )
