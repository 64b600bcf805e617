"""A request placed by value on the first of some fresh targets, and the crossing that watches it."""

from __future__ import annotations

from typing import Any

from gateway.core.placement.placer import Candidate, Decision
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import Hedge, PendingAttempt
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import Unreachable

GONE = Unreachable("connection refused")


class Scene:
    """A placer by value over fresh targets, and a request that was placed on the first of them."""

    def __init__(self, *, budget_s: float = 1.0, priority: int = 0, **variants: VariantOffer) -> None:
        offers: dict[str, Any] = {**variants}
        self.fleet = fleet_of(**offers)
        for target in self.fleet.targets.values():
            for index in range(8):
                target.link.record(0.010, NOW - 1.0 + index / 100)
        self.placer = UtilityPlacer(self.fleet)
        self.crossing = ChanceHedging(self.placer)
        self.ask = ask(budget_s=budget_s)._replace(priority=priority)
        self.first = self.placed(next(iter(self.fleet.targets)))

    def placed(self, target_id: str) -> Candidate:
        others = [one for one in self.fleet.targets if one != target_id]
        chosen = self.placer.decide(self.ask, NOW, others).chosen
        assert chosen is not None
        return chosen

    def elsewhere(self, now: float) -> Decision:
        return self.placer.decide(self.ask, now, self.crossing.avoid([self.first]))

    def plan(self, after_s: float, promised_in_s: float | None = None) -> Hedge | None:
        promised_at = None if promised_in_s is None else NOW + promised_in_s
        now = NOW + after_s
        return self.crossing.plan(self.ask, PendingAttempt(self.first, NOW, promised_at), self.elsewhere(now), now)


def edge_and_pool(**more: float) -> Scene:
    return Scene(edge_a=variant("int8", compute_s=0.100), pool_main=variant(compute_s=0.050), **more)  # type: ignore[arg-type]
