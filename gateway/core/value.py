"""Where an answer is worth most: value × quality × chance of being in time, less its cost and the harm to others.

`cheapest` asks who is sure enough and takes the cheapest of them: a cliff at 95 %, on one side of which a hundredth of
a cent outweighs five requests in a hundred, and on the other nothing does. Here everything has a price:

    value = weight · [1 − RHO · (1 − quality)] · p̂ − LAMBDA · cost − harm − EPSILON · weight · finish / budget

    weight    what the answer in time is worth, by priority: 2, 1, ½, ¼ (routing.md B6)
    quality   of the variant, relative to the best that is offered for this request
    p̂         the calibrated chance of being in time (`chance`, `calibration`), one calibration per tier
    cost      price × compute: LAMBDA of 1 lets a second of the pool outweigh one ordinary answer in time
    harm      what is taken from those who already wait there (`harm`)
    EPSILON   an earlier answer is worth a little: shares the work among twins that are all sure to make it

The reason that is told is true of the choice: `cheapest` when it is of the cheapest price, `better` when a dearer one
has more quality to show than chance, else `faster`, or `surer` where it is expected later but more reliably.

Chances and harm are the dear part, and both can only lower a value. So every candidate gets its bound first (its value
if its path were sure and nobody waited), and they are judged in the order of their bounds until none that is left
could still win: the choice is the same as if all had been judged. What was worked out is kept with the decision as it
is, and nothing is formatted before somebody asks.

It can be wrong where the parts are: a calibration by tier cannot tell a reliable edge from one that is not, and the
weights are a taste. Source: routing.md B3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from gateway.core.calibration import Calibration, Prediction, calibrated
from gateway.core.chance import Timing, timing
from gateway.core.fleet import Fleet, Tier
from gateway.core.harm import Insertion, Place, insertion
from gateway.core.placement import Ask, Candidate, Choice, Judged, Placer, Stake
from tidegate.priority import level_of, order_key

WEIGHTS: Final = {1: 2.0, 2: 1.0, 3: 0.5, 4: 0.25}


class Prices(NamedTuple):
    """How much the parts of a value weigh against an ordinary answer in time."""

    cost: float = 1.0  # LAMBDA, per unit of cost: a second of the pool
    quality: float = 0.25  # RHO: losing all quality loses this share of the value
    earliness: float = 0.01  # EPSILON


class ValuePlacer(Placer):
    """Places asks where the answer is worth most. Its calibrations learn from the stakes that attempts settle."""

    def __init__(self, fleet: Fleet, prices: Prices = Prices()) -> None:  # noqa: B008  # a NamedTuple is immutable
        super().__init__(fleet)
        self.prices = prices
        self.calibrations: dict[Tier, Calibration] = {"edge": Calibration(), "pool": Calibration()}

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        place, budget_s = place_of(ask), ask.deadline - now
        best_quality = max([one.offered.quality for one in candidates])
        bounds = self._bounds(candidates, place.weight, best_quality, budget_s)
        judged: list[Judged | None] = [None] * len(candidates)
        best, best_value = 0, -inf
        for index in sorted(range(len(candidates)), key=bounds.__getitem__, reverse=True):
            if bounds[index] <= best_value:
                break  # nor can any that follow be better
            one = candidates[index]
            worth = place.weight * self._worth(one.offered.quality, best_quality)
            judged[index] = verdict = self._judge(one, bounds[index], worth, place, ask.deadline, now)
            if verdict.value > best_value:
                best, best_value = index, verdict.value
        reason = self._why(candidates, judged, best, budget_s)
        return Choice(self._staked(candidates[best], judged[best], place), reason, judged)

    def _bounds(
        self, candidates: Sequence[Candidate], weight: float, best_quality: float, budget_s: float
    ) -> list[float]:
        sure = {tier: calibrated(1.0, one.curve) for tier, one in self.calibrations.items()}
        dearness, earliness = self.prices.cost, self.prices.earliness / max(budget_s, 1e-6)
        full, rho = 1.0 - self.prices.quality, self.prices.quality / best_quality  # `_worth`, spelled out
        # One comprehension: it runs over every candidate, and a call for each would double its cost.
        return [
            weight * ((full + rho * offered.quality) * sure[offered.target.spec.tier] - earliness * one.finish_s)
            - dearness * one.cost
            for one in candidates
            for offered in (one.offered,)
        ]

    def _worth(self, quality: float, best_quality: float) -> float:
        return 1.0 - self.prices.quality * (1.0 - quality / best_quality)

    def _judge(
        self, candidate: Candidate, bound: float, worth: float, place: Place, deadline: float, now: float
    ) -> Judged:
        curve = self.calibrations[candidate.offered.target.spec.tier].curve
        wait_s, harm = _inserted(candidate, place, now)
        chance = timing_of(candidate, wait_s, now).by(deadline - now)
        claimed = calibrated(chance, curve)
        return Judged(chance, claimed, harm, bound - worth * (calibrated(1.0, curve) - claimed) - harm)

    def _staked(self, chosen: Candidate, verdict: Judged | None, place: Place) -> Candidate:
        assert verdict is not None  # the best was judged: any value is more than minus infinity
        calibration = self.calibrations[chosen.offered.target.spec.tier]
        prediction = Prediction(verdict.chance, verdict.claimed, place.deadline, calibration)
        return chosen._replace(stake=Stake(prediction, place))

    def _why(self, candidates: Sequence[Candidate], judged: Sequence[Judged | None], best: int, budget_s: float) -> str:
        """What paid for the chosen one."""
        chosen = candidates[best]
        bargain = min(range(len(candidates)), key=[one.cost for one in candidates].__getitem__)
        cheap = candidates[bargain]
        if chosen.offered.price <= cheap.offered.price:
            return "cheapest"
        by_quality = self.prices.quality * (chosen.offered.quality - cheap.offered.quality)
        by_earliness = self.prices.earliness * (cheap.finish_s - chosen.finish_s) / max(budget_s, 1e-6)
        by_chance = self._claimed(candidates, judged, best) - self._claimed(candidates, judged, bargain)
        if by_quality > max(by_chance, by_earliness):
            return "better"
        return "faster" if by_earliness > 0.0 else "surer"

    def _claimed(self, candidates: Sequence[Candidate], judged: Sequence[Judged | None], index: int) -> float:
        """The claim for one of them; of one that was not judged, the most that could have been claimed."""
        verdict = judged[index]
        if verdict is not None:
            return verdict.claimed
        return calibrated(1.0, self.calibrations[candidates[index].offered.target.spec.tier].curve)

    def __repr__(self) -> str:
        return f"<ValuePlacer {self.fleet!r} {self.calibrations}>"


def place_of(ask: Ask) -> Place:
    """The request's place in any queue of ours."""
    return Place(order_key(ask.deadline, ask.priority), ask.deadline, WEIGHTS[level_of(ask.priority)])


def timing_of(candidate: Candidate, wait_s: float, now: float) -> Timing:
    """The distribution of an attempt's time at the candidate, after `wait_s` in its queue."""
    offered = candidate.offered
    link = offered.target.link
    return timing(
        link.path(now),
        wait_s,
        candidate.compute_s,
        offered.cost.sigma,
        wire_s=candidate.link_s - link.rtt_s if link.s_per_byte else 0.0,
        trust=link.trust(now),
    )


def _inserted(candidate: Candidate, place: Place, now: float) -> Insertion:
    target = candidate.offered.target
    ledger = target.ledger
    # A foreign server's order is its own: it is taken as first come, first served.
    if ledger.in_flight < 2 or target.spec.foreign:
        return Insertion(candidate.wait_s, 0.0)
    return insertion(ledger.queue(), place, ledger.share * candidate.compute_s, candidate.wait_s, now)
