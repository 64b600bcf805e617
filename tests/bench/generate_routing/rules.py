"""A gateway in which another rule stands in the place of Tidegate's placement: the one that it is named after.

`edge-only`, `pool-only`, `least-loaded` and `p90` are said in the package's words. Each sees which targets may be
asked, and may try a failed request elsewhere; none hedges or sheds. `p90` is given Tidegate's own predictions, by
target: the predictor that it is named after has one model for targets that are all alike.

Source of p90: "Predicted latency-based scheduling" of llm-d (https://llm-d.ai/docs/guides/predicted-latency): targets
with room in both objectives are packed, `least` room first, weighted 0.8 for the first token and 0.2 for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import exp, sqrt
from typing import Final

from gateway.__main__ import gateway as command
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import no_candidate_reason, variant_misfit
from gateway.core.placement.placer import Candidate, Decision, Placer, predicted, sequences_at
from gateway.core.request.hedging import DeadlineHedging
from tests.support.gateway.other_placement import Policy, install
from tidegate.outcome import NothingAlive

Rule = Callable[[Sequence[Candidate], Ask, float], Candidate]
_P90: Final = 1.282  # standard deviations
_FIRST, _NEXT = 0.8, 0.2  # llm-d's weights of the two headrooms


class RulePlacer(Placer):
    """One target by a rule, and no other to hedge with."""

    def __init__(self, fleet: Fleet, rule: Rule, tiers: Collection[str]) -> None:
        super().__init__(fleet)
        self._rule = rule
        self._tiers = tiers

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        takers = [
            predicted(offered, ask, now)
            for offered in self.fleet.offered(ask.model, ask.version)
            if offered.target.spec.tier in self._tiers
            and not variant_misfit(offered.variant, ask)
            and offered.target.allows(now)
            and offered.target.id not in exclude
        ]
        if not takers:
            return Decision(now, ask, (), None, "", NothingAlive(no_candidate_reason(self.fleet, ask, now, exclude)))
        chosen = self._rule(takers, ask, now)
        return Decision(now, ask, (chosen,), chosen, "static", None)


def least_loaded(takers: Sequence[Candidate], _ask: Ask, now: float) -> Candidate:
    """The least of its slots taken, by what this gateway has under way there and by the target's own reports."""

    def taken(one: Candidate) -> float:
        return (sequences_at(one.offered, now) + 1.0) / (one.variant.slots or 1)

    return min(takers, key=taken)


def p90(takers: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
    rooms = [(_rooms(one, ask, now), one) for one in takers]
    keeping = [(_FIRST * first + _NEXT * next_, one) for (first, next_), one in rooms if first > 0.0 and next_ > 0.0]
    if keeping:
        return min(keeping, key=lambda pair: pair[0])[1]
    return max(rooms, key=lambda pair: _FIRST * min(0.0, pair[0][0]) + _NEXT * min(0.0, pair[0][1]))[1]


def _rooms(one: Candidate, ask: Ask, now: float) -> tuple[float, float]:
    """What of the two budgets is left at the 90th percentile, as a share of each."""
    tokens, generation = one.tokens, ask.generation
    assert tokens is not None and generation is not None
    err_s = tokens.first_s * tokens.first_sigma
    spread_s = sqrt(err_s * err_s + tokens.wait_variance + one.target.link.jitter_s**2)
    first_s = one.link_s + one.wait_s + tokens.first_s + _P90 * spread_s
    next_s = tokens.step_s * exp(_P90 * tokens.step_sigma)
    due_s = (generation.first_by if generation.first_by is not None else ask.deadline) - now
    each_s = generation.next_s if generation.next_s is not None else max(1e-3, ask.deadline - now)
    return (due_s - first_s) / max(due_s, 1e-3), (each_s - next_s) / each_s


_EVERYWHERE: Final = ("edge", "pool")
RULES: Final[dict[str, tuple[Rule, Collection[str]]]] = {
    "edge-only": (least_loaded, ("edge",)),
    "pool-only": (least_loaded, ("pool",)),
    "least-loaded": (least_loaded, _EVERYWHERE),
    "p90": (p90, _EVERYWHERE),
}


def policy_of(rule: str) -> Policy:
    return lambda fleet: (RulePlacer(fleet, *RULES[rule]), DeadlineHedging())


if __name__ == "__main__":
    install({rule: policy_of(rule) for rule in RULES})
    command(prog_name="gateway with another rule")
