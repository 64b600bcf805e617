"""The utility placer chooses the target where an answer is worth most, less its cost and the harm to others.

`cheapest` takes the cheapest target that is sure enough, which is a cliff at 95 %: on one side of it a hundredth of a
cent outweighs five requests in a hundred, and on the other nothing does. Here everything has a price:

    value = weight · [1 − RHO · (1 − quality)] · p̂ − LAMBDA · cost − harm − rent − EPSILON · weight · finish / budget

    weight    worth of an answer in time: 2, 1, ½, ¼ (docs/design/routing.md, "Priorities") times its tenant's weight
    quality   of the variant, relative to the best that is offered for this request
    p̂         the calibrated chance of being in time (`completion.py`, `calibration.py`)
    cost      price × compute: LAMBDA of 3 lets a second of the pool outweigh three ordinary answers in time
    harm      what is taken from requests that already wait there (`queue_externality.py`)
    rent      the shadow price (`shadow_price.py`) of what it adds to the queue: taken from requests still to come
    EPSILON   an earlier answer is worth a little: shares the work among twins that are all sure to make it, and leaves
              time for a second attempt

The reason that is reported is true of the choice: `cheapest` when it is of the cheapest price, `better` when a dearer
one has more quality to show than chance, else `faster`, or `surer` where it is expected later but more reliably.

Chances and harm are expensive to compute, and both can only lower a value. So every candidate gets its bound first (its
value if its path were sure and its queue empty), and candidates are judged in the order of their bounds until none that
is left could still win. A candidate that could not win even if every round trip were as short as the shortest
(`CompletionTime.at_most`) is not judged to the end: with little time left hardly any is sure, bounds lie close
together, and all would be judged. The choice is the same as if all had been. Scores are kept with the decision as they
are, and formatted only for an explanation.

One calibration serves all targets, so it never changes their order by chance: a calibration for each tier made an idle
edge look worse than a busy pool for as long as some other edge's misfortune was remembered. What one target does worse
than its claims is its own (`TargetBias`), lowers its claims alone, and is 0 unless it is beyond chance.

It can be wrong where the parts are, and the weights are a taste. Source: docs/design/routing.md, "Placement by
utility".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from gateway.core.estimate.calibration import Calibration, Prediction, apply_curve
from gateway.core.estimate.queue_externality import InsertionCost, QueuePosition, insertion_cost
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.completion import CompletionTime, completion_time
from gateway.core.placement.placer import (
    Candidate,
    CandidateScore,
    Choice,
    PlacementClaim,
    Placer,
    added_work_s,
    margin_s,
)
from gateway.core.placement.tie_breaking import samples_runner_up
from tidegate.priority import WEIGHTS, level_of, order_key


class UtilityWeights(NamedTuple):
    """How much the parts of a value weigh against an ordinary answer in time."""

    cost: float = 3.0  # LAMBDA, per unit of cost: a second of the pool
    quality: float = 0.25  # RHO: losing all quality loses this share of the value
    earliness: float = 0.06  # EPSILON


class UtilityPlacer(Placer):
    """Places asks where the answer is worth most. Its calibration learns from how the claims of attempts end."""

    def __init__(
        self,
        fleet: Fleet,
        prices: UtilityWeights = UtilityWeights(),  # noqa: B008  # a NamedTuple is immutable
        cloud_budget: CloudBudget | None = None,
        *,
        tie_breaking_draw: Callable[[], float] | None = None,
    ) -> None:
        """Args: tie_breaking_draw: chance, where other gateways share the targets (`tie_breaking.py`)."""
        super().__init__(fleet, cloud_budget=cloud_budget)
        self.prices = prices
        self._tie_breaking_draw = tie_breaking_draw
        self.calibration = Calibration()

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        place, budget_s = queue_position(ask), ask.deadline - now
        # Where unsure answers are escalated, those that stand are as good as the best variant's.
        qualities = [1.0 if ask.escalates else one.offered.quality for one in candidates]
        best_quality = max(qualities)
        rents = [_shadow_cost(one, now) for one in candidates]
        bounds = self._bounds(candidates, qualities, rents, place.weight, budget_s)
        judged: list[CandidateScore | None] = [None] * len(candidates)
        best, best_value, second, second_value = 0, -inf, 0, -inf
        for index in sorted(range(len(candidates)), key=bounds.__getitem__, reverse=True):
            at_least = best_value if self._tie_breaking_draw is None else second_value
            if bounds[index] <= at_least:
                break  # bounds fall from here on: none that follows can be better
            one = candidates[index]
            worth = place.weight * self._worth(qualities[index], best_quality)
            judged[index] = verdict = self._judge(one, bounds[index], rents[index], worth, place, now, at_least)
            if verdict is None:
                continue
            if verdict.value > best_value:
                best, best_value, second, second_value = index, verdict.value, best, best_value
            elif verdict.value > second_value:
                second, second_value = index, verdict.value
        if self._tie_breaking_draw is not None and samples_runner_up(
            best_value, second_value, self._tie_breaking_draw()
        ):
            best = second
        reason = self._why(candidates, qualities, judged, best, budget_s)
        return Choice(self._staked(candidates[best], judged[best], place, now), reason, judged)

    def _bounds(
        self,
        candidates: Sequence[Candidate],
        qualities: Sequence[float],
        rents: Sequence[float],
        weight: float,
        budget_s: float,
    ) -> list[float]:
        sure = self.calibration.surest
        dearness, earliness = self.prices.cost, weight * self.prices.earliness / max(budget_s, 1e-6)
        # weight · p̂(1) · [1 − RHO · (1 − quality / best)] = full + rho · quality: `_worth` with all that is constant
        full, rho = weight * sure * (1.0 - self.prices.quality), weight * sure * self.prices.quality / max(qualities)
        # One comprehension: it runs over every candidate, and a call for each would double its cost.
        return [
            full + rho * quality - earliness * one.finish_s - dearness * one.cost - rent
            for one, quality, rent in zip(candidates, qualities, rents, strict=True)
        ]

    def _worth(self, quality: float, best_quality: float) -> float:
        return 1.0 - self.prices.quality * (1.0 - quality / best_quality)

    def _judge(
        self,
        candidate: Candidate,
        bound: float,
        rent: float,
        worth: float,
        place: QueuePosition,
        now: float,
        at_least: float,
    ) -> CandidateScore | None:
        """The score; None where it is clear before the chance is known that the value is no more than `at_least`."""
        curve, budget_s = self.calibration.curve, place.deadline - now
        ahead_s, harm = _insertion_cost_at(candidate, place, now)
        takes = candidate_completion(candidate, ahead_s, now, trust=candidate.trust)
        sure_value = bound - worth * self.calibration.surest - harm  # everything but worth · p̂
        if sure_value + worth * apply_curve(takes.at_most(budget_s), curve) <= at_least:
            return None
        chance = takes.by(budget_s)
        claimed = max(0.0, apply_curve(chance, curve) + candidate.offered.target.bias.shift)
        return CandidateScore(chance, claimed, harm, sure_value + worth * claimed, rent, ahead_s)

    def _staked(self, chosen: Candidate, verdict: CandidateScore | None, place: QueuePosition, now: float) -> Candidate:
        """The chosen candidate with its claim, and its times at its own position in the queue instead of at the end."""
        assert verdict is not None  # the best was judged: any value is more than minus infinity
        bias = chosen.offered.target.bias
        prediction = Prediction(verdict.chance, verdict.claimed, place.deadline, self.calibration, bias)
        claim = PlacementClaim(prediction, place, verdict.harm + verdict.rent)
        offered, ahead_s = chosen.offered, verdict.ahead_s
        wait_s, finish_s, margin = chosen.wait_s, chosen.finish_s, chosen.margin_s
        if ahead_s != chosen.ahead_s:  # it passes others
            wait_s = offered.target.expected_wait_s(ahead_s, now)
            finish_s = chosen.finish_s + wait_s - chosen.wait_s
            margin = margin_s(offered, chosen.compute_s, ahead_s)
        return Candidate(  # positional: hot path
            offered,
            chosen.compute_s,
            wait_s,
            chosen.link_s,
            margin,
            finish_s,
            chosen.cost,
            chosen.trust,
            ahead_s,
            claim,
        )

    def _why(
        self,
        candidates: Sequence[Candidate],
        qualities: Sequence[float],
        judged: Sequence[CandidateScore | None],
        best: int,
        budget_s: float,
    ) -> str:
        """The reason: by which term the chosen candidate makes up for its price."""
        chosen = candidates[best]
        costs = [one.cost for one in candidates]
        bargain = costs.index(min(costs))
        cheap = candidates[bargain]
        if chosen.offered.price <= cheap.offered.price:
            return "cheapest"
        by_quality = self.prices.quality * (qualities[best] - qualities[bargain])
        by_earliness = self.prices.earliness * (cheap.finish_s - chosen.finish_s) / max(budget_s, 1e-6)
        by_chance = self._claimed(candidates, judged, best) - self._claimed(candidates, judged, bargain)
        if by_quality > max(by_chance, by_earliness):
            return "better"
        return "faster" if by_earliness > 0.0 else "surer"

    def _claimed(self, candidates: Sequence[Candidate], judged: Sequence[CandidateScore | None], index: int) -> float:
        """The claim for one of them; of one that was not judged, the most that could have been claimed."""
        verdict = judged[index]
        if verdict is not None:
            return verdict.claimed
        return self.calibration.surest

    def __repr__(self) -> str:
        return f"<UtilityPlacer {self.fleet!r} {self.calibration!r}>"


def queue_position(ask: Ask) -> QueuePosition:
    """The request's place in any queue of ours."""
    return QueuePosition(
        order_key(ask.deadline, ask.priority), ask.deadline, ask.weight * WEIGHTS[level_of(ask.priority)]
    )


def candidate_completion(
    candidate: Candidate, ahead_s: float, now: float, *, trust: float | None = None
) -> CompletionTime:
    """The distribution of an attempt's time at the candidate, with so much ahead of it in the queue.

    Args:
        trust: that the path works now, where that is known already.
    """
    offered = candidate.offered
    target = offered.target
    link, path = target.link, target.link.path(now)
    return completion_time(
        path,
        target.expected_wait_s(ahead_s, now),
        target.queue_estimate.error.variance(ahead_s),
        candidate.compute_s,
        offered.cost.sigma,
        wire_s=candidate.link_s - path.median_s if link.s_per_byte else 0.0,
        trust=target.trust(now) if trust is None else trust,
    )


def _shadow_cost(candidate: Candidate, now: float) -> float:
    """What is taken from requests that are still to come: the target's shadow price × the work that is added."""
    queue_estimate = candidate.offered.target.queue_estimate
    return queue_estimate.congestion.per_second(now) * (
        added_work_s(candidate) if queue_estimate.batches else candidate.compute_s
    )


def _insertion_cost_at(candidate: Candidate, place: QueuePosition, now: float) -> InsertionCost:
    target = candidate.offered.target
    queue_estimate = target.queue_estimate
    # A foreign server's order is its own and is taken as first come, first served. So is that of a target that has just
    # refused: its pause is no position in a queue, and urgency does not shorten it.
    # A request that is due after all that are under way, as most are where budgets are alike, passes none of them.
    if place.key >= queue_estimate.last_key or target.spec.foreign or now < target.refused_until:
        return InsertionCost(candidate.ahead_s, 0.0)
    return insertion_cost(queue_estimate.queue(), place, added_work_s(candidate), candidate.ahead_s, now)
