"""The utility placer chooses the target where an answer is worth most, less its cost and the harm to others.

`cheapest` takes the cheapest target that is sure enough, which is a cliff at 95 %: on one side of it a hundredth of a
cent outweighs five requests in a hundred, and on the other nothing does. Here everything has a price:

    value = weight · [1 − RHO · (1 − quality)] · p̂ − LAMBDA · cost − harm − rent − EPSILON · weight · finish / budget

    weight    worth of an answer in time: 2, 1, ½, ¼ (docs/design/routing.md, "Priorities") times its tenant's weight
    quality   of the variant, relative to the best that is offered for this request
    p̂         the calibrated chance of being in time (`completion.py`, `calibration.py`)
    cost      price × compute: LAMBDA of 10 lets a second of the pool outweigh ten ordinary answers in time; of a
              generation, which computes for seconds, a third of one. It is the operator's knob (`cost_weight`)
    harm      what is taken from requests that already wait there (`queue_externality.py`), or from answers that are
              being written there (`generation_time.py`)
    rent      the shadow price (`shadow_price.py`) of what it adds to the queue, of a generation that of its slot: taken
              from requests still to come
    EPSILON   an earlier answer is worth a little: shares the work among twins that are all sure to make it, and leaves
              time for a second attempt

LAMBDA decides where a request goes and never whether it is answered: a second attempt, and what is refused as not worth
it, weigh cost with `WHETHER` at most. A bill that is to be small would else be paid with answers that only the dear
target can give: the largest requests were refused in overload, and silent attempts were not hedged. For the same reason
what LAMBDA adds to WHETHER is never more than MOST_BILL of the answer's own weight: a device that has stalled would be
a better place else than a pool whose call costs more than an answer.

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

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from gateway.core.estimate.calibration import Calibration, Prediction, apply_curve
from gateway.core.estimate.queue_externality import InsertionCost, QueuePosition, insertion_cost
from gateway.core.estimate.shadow_price import slot_price
from gateway.core.estimate.token_calibration import (
    GenerationBudget,
    TokenCalibration,
    TokenChances,
    TokenClaim,
)
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.completion import CompletionTime, completion_time
from gateway.core.placement.generation_time import (
    GenerationAsk,
    GenerationTime,
    begin_by,
    generation_time,
    made_late,
)
from gateway.core.placement.placer import (
    Candidate,
    CandidateScore,
    Choice,
    PlacementClaim,
    Placer,
    TokenScore,
    added_work_s,
    margin_s,
    sequences_at,
)
from tidegate.priority import WEIGHTS, level_of, order_key
from tidegate.token_sink import TokenObjectives

_NO_HARM: Final = 0.05  # of an ordinary answer: a batch that is near nobody's budget
_GOES_ON_S: Final = 0.5  # urgent: about the least budget of a first token, chosen
_MISSED: Final = 0.3  # of its worth is left to a generation that is whole in time, and whose tokens were late


COST_WEIGHT: Final = 10.0  # chosen on the frontier of `tests.bench.frontier`: docs/placement.md, "The bill"
WHETHER: Final = 3.0  # the weight at which the rules for second attempts and for overload were set
MOST_BILL: Final = 0.25  # of an answer's weight: so much chance, at most, is given up for the bill's sake


class UtilityWeights(NamedTuple):
    """How much the parts of a value weigh against an ordinary answer in time."""

    cost: float = COST_WEIGHT  # LAMBDA, per unit of cost: a second of the pool
    quality: float = 0.25  # RHO: losing all quality loses this share of the value
    earliness: float = 0.06  # EPSILON
    generation_cost: float = (
        0.3  # LAMBDA of generations, which compute for seconds where single answers take a tenth of one
    )

    @classmethod
    def weighing(cls, cost_weight: float) -> UtilityWeights:
        """The weights with an operator's word on cost, which holds for generations in proportion."""
        usual = cls()
        return usual._replace(cost=cost_weight, generation_cost=usual.generation_cost * cost_weight / usual.cost)

    def whether_of(self, ask: Ask) -> float:
        """What a unit of cost weighs for this request where it is asked whether an attempt is made at all."""
        return min(WHETHER, self.cost) if ask.generation is None else self.generation_cost

    @property
    def where_only(self) -> float:
        """How much more a unit of cost weighs in the choice among targets than in the choice whether to ask one."""
        return max(0.0, self.cost - WHETHER)


class AnswerWorth(NamedTuple):
    """What a generation is worth once it is known whether its first token was in time, in ordinary answers in time."""

    in_time: float
    late: float  # 0 where a late first token makes the whole late


class UtilityPlacer(Placer):
    """Places asks where the answer is worth most. Its calibration learns from how the claims of attempts end."""

    def __init__(
        self,
        fleet: Fleet,
        prices: UtilityWeights = UtilityWeights(),  # noqa: B008  # a NamedTuple is immutable
        cloud_budget: CloudBudget | None = None,
    ) -> None:
        super().__init__(fleet, cloud_budget=cloud_budget)
        self.prices = prices
        self.calibration = Calibration()
        self.tokens = TokenCalibration()  # of generations

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        place, budget_s = queue_position(ask), ask.deadline - now
        generation = ask.generation
        budget = None if generation is None else generation.budget(ask.deadline)
        # Where unsure answers are escalated, those that stand are as good as the best variant's.
        qualities = [1.0 if ask.escalates else one.offered.quality for one in candidates]
        best_quality = max(qualities)
        rents = [shadow_cost(one, now) for one in candidates]
        sure = self.calibration.surest if budget is None else self._surest_of_tokens(budget)
        bounds = self._bounds(candidates, qualities, rents, sure * place.weight, place.weight, budget_s, ask)
        harms: Sequence[float] = ()
        has_room = False
        if generation is not None:
            harms = [harm_to_batch(one, generation) for one in candidates]
            has_room = any(one.ahead_s <= 0.0 and harm <= _NO_HARM for one, harm in zip(candidates, harms, strict=True))
        judged: list[CandidateScore | None] = [None] * len(candidates)
        best, best_value = 0, -inf
        for index in sorted(range(len(candidates)), key=bounds.__getitem__, reverse=True):
            if bounds[index] <= best_value:
                break  # bounds fall from here on: none that follows can be better
            one = candidates[index]
            worth = place.weight * self._worth(qualities[index], best_quality)
            if generation is None or budget is None:
                verdict = self._judge(one, bounds[index], rents[index], worth, place, now, best_value)
            else:
                verdict = self._judge_generation(
                    one, bounds[index] - worth * sure, rents[index], worth, generation, budget, now, harms[index],
                    has_room=has_room,
                )  # fmt: skip
            judged[index] = verdict
            if verdict is None:
                continue
            if verdict.value > best_value:
                best, best_value = index, verdict.value
        reason = self._why(candidates, qualities, judged, best, budget_s)
        return Choice(self._staked(candidates[best], judged[best], place, budget, now), reason, judged)

    def _bounds(
        self,
        candidates: Sequence[Candidate],
        qualities: Sequence[float],
        rents: Sequence[float],
        surest_worth: float,
        weight: float,
        budget_s: float,
        ask: Ask,
    ) -> list[float]:
        dearness, earliness = self.prices.whether_of(ask), weight * self.prices.earliness / max(budget_s, 1e-6)
        bill, most = 0.0 if ask.generation is not None else self.prices.where_only, MOST_BILL * weight
        # weight · p̂(1) · [1 − RHO · (1 − quality / best)] = full + rho · quality: `_worth` with all that is constant
        rho = surest_worth * self.prices.quality / max(qualities)
        full = surest_worth * (1.0 - self.prices.quality)
        # One comprehension: it runs over every candidate, and a call for each would double its cost.
        return [
            full
            + rho * quality
            - earliness * one.finish_s
            - dearness * one.cost
            - (bill * one.cost if bill * one.cost < most else most)
            - rent
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
        value = sure_value + worth * claimed
        bill = min(self.prices.where_only * candidate.cost, MOST_BILL * place.weight)
        return CandidateScore(chance, claimed, harm, value, rent, ahead_s, bill=bill)

    def answer_worth(self, candidate: Candidate, ask: Ask, best_quality: float, now: float) -> AnswerWorth:
        """What a generation by this candidate is worth. Args: best_quality: of those that it is compared with."""
        prediction = None if candidate.claim is None else candidate.claim.prediction
        claims = prediction.claims if isinstance(prediction, TokenClaim) else TokenChances(1.0, 1.0, 1.0)
        kept, first_by = claims.next * claims.whole, None if ask.generation is None else ask.generation.first_by
        worth = self.worth_of(candidate, ask, best_quality, kept=kept, whole=claims.whole)
        has_first = first_by is not None and first_by > now
        late = self.worth_of(candidate, ask, best_quality, kept=0.0, whole=claims.whole) if has_first else 0.0
        return AnswerWorth(worth, late)

    def worth_of(self, candidate: Candidate, ask: Ask, best_quality: float, *, kept: float, whole: float) -> float:
        """What a generation by this candidate is worth, in ordinary answers in time.

        Args:
            best_quality: of those that it is compared with.
            kept: the chance that it keeps all of its budgets; whole: that it is whole in time.
        """
        weight = queue_position(ask).weight
        if not ask.escalates:
            weight *= self._worth(candidate.offered.quality, best_quality)
        return weight * (kept + _MISSED * (whole - kept))

    def token_claims(self, candidate: Candidate, ask: Ask, now: float) -> TokenChances:
        """The three chances of a generation there, as calibrated."""
        assert ask.generation is not None
        budget = ask.generation.budget(ask.deadline)
        return self.tokens.claims(generation_completion(candidate, ask.generation, now).chances(budget, now), budget)

    def _surest_of_tokens(self, budget: GenerationBudget) -> float:
        """The most that a generation's worth is multiplied with (`_judge_generation`)."""
        surest = self.tokens.surest(budget)
        return surest + _MISSED * (self.tokens.whole.surest - surest)

    def _judge_generation(
        self,
        candidate: Candidate,
        sure_value: float,
        rent: float,
        worth: float,
        ask: GenerationAsk,
        budget: GenerationBudget,
        now: float,
        harm: float,
        *,
        has_room: bool,
    ) -> CandidateScore:
        """The same of a generation.

        Args:
            sure_value: everything but worth · p̂ and harm.
            has_room: whether a candidate has a slot where it would harm nobody. Where none has, harm counts only as far
                as this answer is expected to be in time: somebody is hurt wherever it goes, and one that is lost
                anyway would else go to the queue of a full target, whose harm to those that come later has no price.
        """
        raw = generation_completion(candidate, ask, now).chances(budget, now)
        claims = self.tokens.claims(raw, budget)
        claimed = max(0.0, claims.all + candidate.offered.target.bias.shift)
        if not has_room:
            harm *= claimed
        # What misses an objective of its tokens and is whole in time is worth a part of what keeps all three.
        value = sure_value - harm + worth * (claimed + _MISSED * max(0.0, claims.whole - claimed))
        tokens = TokenScore(raw, claims)
        return CandidateScore(raw.all, claimed, harm, value, rent, ahead_s=candidate.ahead_s, tokens=tokens)

    def _staked(
        self,
        chosen: Candidate,
        verdict: CandidateScore | None,
        place: QueuePosition,
        budget: GenerationBudget | None,
        now: float,
    ) -> Candidate:
        """The chosen candidate with its claim, and its times at its own position in the queue instead of at the end."""
        assert verdict is not None  # the best was judged: any value is more than minus infinity
        bias = chosen.offered.target.bias
        prediction: Prediction | TokenClaim
        if verdict.tokens is None or budget is None:
            prediction = Prediction(verdict.chance, verdict.claimed, place.deadline, self.calibration, bias)
            claim = PlacementClaim(prediction, place, verdict.harm + verdict.rent)
        else:
            raw, claims = verdict.tokens
            prediction = TokenClaim(raw, claims, verdict.claimed, budget, self.tokens, bias)
            # Without the rent: of two attempts the first token leaves one, so that a second takes no slot for long.
            claim = PlacementClaim(prediction, place, verdict.harm)
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
            None,
            chosen.tokens,
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


def generation_completion(candidate: Candidate, ask: GenerationAsk, now: float) -> GenerationTime:
    """The distribution of a generation's time at the candidate."""
    target, tokens = candidate.offered.target, candidate.tokens
    assert tokens is not None  # each candidate that was judged for a generation has them
    return generation_time(target.link.path(now), candidate.wait_s, tokens, ask.lengths, trust=candidate.trust)


def first_completion(candidate: Candidate, ask: Ask, now: float) -> CompletionTime:
    """The distribution of the time until the caller is shown something: the answer, or a generation's first token."""
    if ask.generation is None or candidate.tokens is None:  # none: placement had failed, and this is its fallback
        return candidate_completion(candidate, candidate.ahead_s, now)
    return generation_completion(candidate, ask.generation, now).first


def first_due(candidate: Candidate, ask: Ask, now: float) -> float:
    """The instant by which that has to be."""
    if ask.generation is None or candidate.tokens is None:
        return ask.deadline
    return begin_by(ask.generation, candidate.tokens, ask.deadline, now)


def token_objectives(candidate: Candidate, ask: Ask, now: float, *, goes_on: bool = False) -> TokenObjectives | None:
    """What the target is told of the budgets of tokens; None: there are none.

    Both ways of the link are taken off the first one: a token that is made in time there is in time here.

    Args:
        goes_on: with an answer whose caller has its beginning, and sees it stand still.
    """
    generation = ask.generation
    if generation is None or (generation.first_by is None and generation.next_s is None):
        return None
    first_by = now + _GOES_ON_S + candidate.link_s if goes_on else generation.first_by
    return TokenObjectives(None if first_by is None else max(0.0, first_by - now - candidate.link_s), generation.next_s)


def harm_to_batch(candidate: Candidate, ask: GenerationAsk) -> float:
    """What is taken from the answers that are being written there: as many ordinary ones as become late by it."""
    tokens = candidate.tokens
    assert tokens is not None
    if tokens.batch <= 1.0:
        return 0.0
    return made_late(ask, tokens, candidate.offered.cost.pace.step_s(tokens.batch - 1.0))


def shadow_cost(candidate: Candidate, now: float) -> float:
    """What is taken from requests that are still to come: the target's shadow price × the work that is added.

    Of a generation the price of its slot. Those who hold one are in the harm.
    """
    if candidate.tokens is not None:
        return slot_price(sequences_at(candidate.offered, now), candidate.variant.slots)
    queue_estimate = candidate.offered.target.queue_estimate
    return queue_estimate.congestion.per_second(now) * (
        added_work_s(candidate) if queue_estimate.batches else candidate.compute_s
    )


def _is_fixed(candidate: Candidate, now: float) -> bool:
    """Whether urgency shortens no wait there: after a refusal, for a model that has to come into memory, at a site."""
    target = candidate.target
    return now < target.refused_until or candidate.offered.cold_s > 0.0 or target.spec.tier == "site"


def _insertion_cost_at(candidate: Candidate, place: QueuePosition, now: float) -> InsertionCost:
    target = candidate.offered.target
    queue_estimate = target.queue_estimate
    # A foreign server's order is its own and is taken as first come, first served. So is that of a target that has just
    # refused: its pause is no position in a queue, and urgency does not shorten it. A site has many queues.
    # A request that is due after all that are under way, as most are where budgets are alike, passes none of them.
    if place.key >= queue_estimate.last_key or target.spec.foreign or _is_fixed(candidate, now):
        return InsertionCost(candidate.ahead_s, 0.0)
    return insertion_cost(queue_estimate.queue(), place, added_work_s(candidate), candidate.ahead_s, now)
