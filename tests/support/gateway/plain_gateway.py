"""A gateway that gets its rule from a deployer, as most are: small requests to devices, large ones to the pool.

What `tests/bench/traces.py` sets beside Tidegate, with all else the same (doors, links, workers, queues, batches): up
to THRESHOLD units a request goes to the edges in turn, else to the pool. After half of its budget, or at once after a
failure or a refusal, it is tried a second time at the next target in turn, while the first try may still answer. It
knows who is up, and ejects who keeps failing; nothing is predicted, refused or priced.

The rule is in force in a gateway named "plain", so that one part of a test's fleet can be restarted as the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Final

from gateway.__main__ import gateway as command
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import no_candidate_reason, variant_misfit
from gateway.core.placement.placer import Candidate, Decision, Placer, estimate
from gateway.core.request.hedging import DeadlineHedging, Hedge, PendingAttempt
from tests.support.gateway.other_placement import install
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


if __name__ == "__main__":
    install({NAME: lambda fleet: (StaticPlacer(fleet), Retries())})
    command(prog_name="plain gateway")
