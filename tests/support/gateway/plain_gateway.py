"""A gateway that gets its rule from a deployer, as most are: small requests to devices, large ones to the pool.

What `tests/bench/traces.py` sets beside Tidegate, with all else the same (doors, links, workers, queues, batches): up
to THRESHOLD units a request goes to the edges in turn, else to the pool. After half of its budget, or at once after a
failure or a refusal, it is tried a second time at the next target in turn, while the first try may still answer. It
knows who is up, and ejects who keeps failing; nothing is predicted, refused or priced.

The rule is in force in a gateway named "plain", so that one part of a test's fleet can be restarted as the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Final

import gateway.app
from gateway.__main__ import gateway as command
from gateway.config.gateway import GatewayConfig
from gateway.core.admission.admission import Admission
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import no_candidate_reason, variant_misfit
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision, Placer, estimate
from gateway.core.request.hedging import DeadlineHedging, Hedge, HedgePolicy, PendingAttempt
from gateway.placement_policy import fallback, guard, stacked
from tidegate.outcome import NothingAlive

NAME: Final = "plain"
THRESHOLD: Final = 128.0  # `static_threshold` of the scenario
_AGAIN_AFTER: Final = 0.5  # of the budget


class StaticPlacer(Placer):
    """By size alone, in turn."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._turns = count()

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        takers = [
            estimate(offered, ask.units, now)
            for offered in self.fleet.offered(ask.model, ask.version)
            if not variant_misfit(offered.variant, ask)
            and offered.target.allows(now)
            and offered.target.id not in exclude
        ]
        if not takers:
            return Decision(now, ask, (), None, "", NothingAlive(no_candidate_reason(self.fleet, ask, now, exclude)))
        wanted = self._of_tier(takers, "edge" if ask.units <= THRESHOLD else "pool")
        turn = next(self._turns)
        chosen = wanted[turn % len(wanted)]
        others = [one for one in takers if one is not chosen]
        second = (others[turn % len(others)],) if others else ()
        return Decision(now, ask, (chosen, *second), chosen, "static", None)

    def _of_tier(self, takers: Sequence[Candidate], tier: str) -> Sequence[Candidate]:
        return [one for one in takers if one.target.spec.tier == tier] or takers


class Retries(DeadlineHedging):
    """A second try after a fixed part of the budget."""

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        return now + _AGAIN_AFTER * (ask.deadline - now)

    def plan(self, ask: Ask, watched: PendingAttempt, decision: Decision, now: float) -> Hedge | None:
        return None if decision.chosen is None else Hedge(now)


def install() -> None:
    tidegates, stack = gateway.app.policy_of, gateway.app.placement_of

    def policy(
        config: GatewayConfig, fleet: Fleet, draw: Callable[[], float], overloaded: Callable[[], bool]
    ) -> tuple[Placer, HedgePolicy]:
        if config.name != NAME:
            return tidegates(config, fleet, draw, overloaded)
        return StaticPlacer(fleet), Retries()

    def unprobed(
        placer: Placer, fleet: Fleet, admission: Admission, draw: Callable[[], float], overloaded: Callable[[], bool]
    ) -> Placement:
        if not isinstance(placer, StaticPlacer):
            return stack(placer, fleet, admission, draw, overloaded)
        return stacked(fallback(fleet), guard(fleet, admission), inner=placer)

    gateway.app.policy_of = policy
    gateway.app.placement_of = unprobed


if __name__ == "__main__":
    install()
    command(prog_name="plain gateway")
