"""The placer chooses the target of an attempt: the cheapest one that is predicted to make the deadline.

For each variant that takes the work on each usable target:

    finish = link round trip + wait in its queue + compute       margin = 1.645 · spread

`spread` adds up what is uncertain: the compute's log-residual, the link's jitter and how far waits have been off there
(`wait_error.py`). Candidates with finish + margin within the budget are sure enough, and the cheapest of them is chosen
(`pricing.py`). Targets of about the same price share the work by earliest predicted finish: always taking the very
cheapest would queue everything at one edge while its twin idles. When none is sure enough, the earliest finish has the
best chance. A target whose link is silent, with an overdue ack, is never sure: two frozen edges would otherwise hedge
each other until no time is left. The interval that a candidate promises is computed in `interval.py`.

A target in reserve (`standby`) is no candidate while another target is sure to make it: it is warm, and its time is
kept for when the others are out or too late.

A request is refused before anything is spent when no target may take it (`NothingAlive`, with each target's reason) or
when even the fastest measured time is too long (`DeadlineExceeded`). That needs proof from measured tables; a prior is
no proof.

A policy chooses among candidates and sees nothing else. Candidates are plain numbers: a decision explains itself when
asked, and costs nothing more when it is not.

It can be wrong: margins of the parts are taken as independent, and other gateways' launches show up only in reports.
Source: docs/design/routing.md, "Placement by utility", of which this is the policy without chances.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import sqrt
from typing import Final, NamedTuple

from gateway.core.estimate.calibration import Prediction
from gateway.core.estimate.conformal import NORMAL
from gateway.core.estimate.queue_externality import QueuePosition
from gateway.core.estimate.token_calibration import TokenChances, TokenClaim
from gateway.core.estimate.token_pace import TokenPrediction
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.offer_index import Offer
from gateway.core.fleet.target import TargetView
from gateway.core.fleet.variant_rank import deferred_to
from gateway.core.placement.ask import Ask
from gateway.core.placement.attempt_observer import AttemptObserver
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.crowd import sample
from gateway.core.placement.eligibility import no_candidate_reason, variant_misfit
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.placement.shortlist import Shortlist
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import DeadlineExceeded, NothingAlive, Overloaded, ServeError
from tidegate.placement_pin import INSIDE

RETRY_SPENT_S: Final = 5.0  # about how long the price of the cloud takes to halve
MOST_CONSIDERED: Final = 64  # offers that an explanation looks at
_TWIN: Final = 1.25  # of the other's price is still the same price


class PlacementClaim(NamedTuple):
    """What a policy with chances claimed for its choice: the prediction, and the position in the queue."""

    prediction: Prediction | TokenClaim
    place: QueuePosition
    externality: float = 0.0  # on others, in ordinary answers in time


class Candidate(NamedTuple):
    """One possible place with its predictions, in seconds."""

    offered: Offer
    compute_s: float
    wait_s: float
    link_s: float
    margin_s: float
    finish_s: float  # link + wait + compute
    cost: float  # price × compute, and what the bytes cost: `prices`
    trust: float = 1.0  # that the path works now; below 1 while an attempt waits for its ack too long
    ahead_s: float = 0.0  # the wait as the ledger has it, before its error is taken out
    claim: PlacementClaim | None = None  # set on the chosen one, by policies that have one
    observer: AttemptObserver | None = None  # set on the chosen one by the admission guard
    tokens: TokenPrediction | None = None  # of a generation

    @property
    def target(self) -> TargetView:
        return self.offered.target

    @property
    def variant(self) -> VariantOffer:
        return self.offered.variant

    def observed_by(self, observer: AttemptObserver) -> Candidate:
        """The same with an observer. Spelled out, since `_replace` costs several times as much."""
        return Candidate(  # positional: hot path
            self.offered,
            self.compute_s,
            self.wait_s,
            self.link_s,
            self.margin_s,
            self.finish_s,
            self.cost,
            self.trust,
            self.ahead_s,
            self.claim,
            observer,
            self.tokens,
        )


class TokenScore(NamedTuple):
    """The three chances of a generation at one candidate: raw, and calibrated."""

    raw: TokenChances
    claims: TokenChances


class CandidateScore(NamedTuple):
    """The terms of one candidate's value, from a policy that deals in chances."""

    chance: float  # raw
    claimed: float  # calibrated
    harm: float  # taken from the requests that it would pass in the queue
    value: float
    rent: float = 0.0  # at the shadow price: what it takes from requests that are still to come
    ahead_s: float = 0.0  # of the queue, without the requests that it would pass
    tokens: TokenScore | None = None  # of a generation
    bill: float = 0.0  # the part of its cost's weight that only chooses among targets

    @property
    def worth(self) -> float:
        """The value without what only chooses among targets: the bill, and the rent, whose requests may never come."""
        return self.value + self.rent + self.bill


class Choice(NamedTuple):
    """A policy's choice. `judged` is empty, or has a score for each candidate; None: it could not have won."""

    candidate: Candidate
    reason: str
    judged: Sequence[CandidateScore | None] = ()


class Decision(NamedTuple):
    """What was decided, and why. Exactly one of `chosen` and `refusal` is set."""

    at: float
    ask: Ask
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reason: str
    refusal: ServeError | None
    judged: Sequence[CandidateScore | None] = ()
    considered: Sequence[Offer] = ()  # what was on offer, where not all of it were candidates; for explanations
    scarcity: float = 1.0  # how many times its plain price the cloud cost

    def choosing(self, chosen: Candidate) -> Decision:
        """The same for another candidate, or for the same one with more said of it. Spelled out, as above."""
        return Decision(  # positional: hot path
            self.at,
            self.ask,
            self.candidates,
            chosen,
            self.reason,
            self.refusal,
            self.judged,
            self.considered,
            self.scarcity,
        )

    def best_apart(self) -> Candidate | None:
        """The earliest finish in another tier than the chosen one's, which shares no fault with it; None: in none."""
        if self.chosen is None:
            return None
        tier = self.chosen.offered.target.spec.tier
        best = None
        for one in self.candidates:
            if one.offered.target.spec.tier != tier and (best is None or _is_sooner(one, best)):
                best = one
        return best

    def best_other(self) -> Candidate | None:
        """The earliest finish on another trusted target: where a hedge would go."""
        if self.chosen is None or len(self.candidates) < 2:
            return None
        best, taken = None, self.chosen.offered.target
        for one in self.candidates:
            if one.offered.target is not taken and (best is None or _is_sooner(one, best)):
                best = one
        return best


Policy = Callable[[Sequence[Candidate], float], tuple[Candidate, str]]


def cheapest(candidates: Sequence[Candidate], budget_s: float) -> tuple[Candidate, str]:
    """The rule: cheapest of the sure ones, else the earliest finish. A link is distrusted while it is silent."""
    # Plain loops: this runs for every request, and `min` with a key costs twice as much.
    fastest = bargain = candidates[0]
    cheap: Candidate | None = None
    for one in candidates:
        if _is_sooner(one, fastest):
            fastest = one
        if one.cost < bargain.cost:
            bargain = one
        if _is_sure(one, budget_s) and (cheap is None or one.cost < cheap.cost):
            cheap = one
    if cheap is None:
        return fastest, "faster"
    chosen = cheap
    for one in candidates:
        if one.finish_s < chosen.finish_s and _is_about_as_cheap(one, cheap) and _is_sure(one, budget_s):
            chosen = one
    return chosen, "cheapest" if _is_about_as_cheap(cheap, bargain) else "faster"


def _is_about_as_cheap(one: Candidate, of: Candidate) -> bool:
    """Whether `one` is about as cheap: devices whose batteries differ by a few percent still share the work."""
    target, other = one.offered.target, of.offered.target
    return target.price <= _TWIN * other.price and target.byte_price <= other.byte_price


def _is_sure(candidate: Candidate, budget_s: float) -> bool:
    return candidate.finish_s + candidate.margin_s <= budget_s and candidate.trust == 1.0


def _is_sooner(candidate: Candidate, than: Candidate) -> bool:
    """More trusted, or as much and sooner: frozen targets would otherwise hedge each other."""
    if candidate.trust != than.trust:
        return candidate.trust > than.trust
    return candidate.finish_s < than.finish_s


class Placer:
    """Places asks by a policy over the fleet's view."""

    def __init__(self, fleet: Fleet, policy: Policy = cheapest, cloud_budget: CloudBudget | None = None) -> None:
        self.fleet = fleet
        self.cloud_budget = cloud_budget
        self._policy = policy
        self._shortlist = Shortlist()
        self._crowd_draw: Callable[[], float] | None = None

    def share_targets(self, draw: Callable[[], float] | None) -> None:
        """From now on with many other gateways (`crowd.py`), by chance in [0, 1); None: not any more."""
        self._crowd_draw = draw

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        """Where `ask` should go now, leaving out the targets in `exclude`, which were tried already."""
        budget_s = ask.deadline - now
        if self.cloud_budget is not None:
            self.fleet.price_cloud(self.cloud_budget.factor(now))
        candidates = self.candidates(ask, now, exclude)
        if not candidates:
            return Decision(now, ask, (), None, "", NothingAlive(no_candidate_reason(self.fleet, ask, now, exclude)))
        chosen, reason, judged = self.choose(candidates, ask, now)
        # Only where the prediction is too late can the proof be: a floor is below its prediction.
        if chosen.finish_s > budget_s and (floor_s := _floor_s(candidates, ask)) > budget_s:
            return Decision(
                at=now,
                ask=ask,
                candidates=candidates,
                chosen=None,
                reason="",
                refusal=_infeasible(floor_s, budget_s),
                judged=judged,
            )
        # A sequence lives where it was begun: what its steps cost there was decided then.
        is_dear = self.fleet.scarcity > 1.0 and not ask.home
        if self.cloud_budget is not None and is_dear and _is_not_worth_it(chosen, judged):
            return Decision(
                at=now,
                ask=ask,
                candidates=candidates,
                chosen=None,
                reason="",
                refusal=_too_dear(self.cloud_budget),
                judged=judged,
            )
        if ask.home:
            reason = "bound"
        elif ask.pin != "any":
            reason = "pinned"
        elif ask.variant:
            reason = "demanded"
        elif chosen.offered.target.spec.standby:
            reason = "reserve"
        elif len(candidates) == 1:
            reason = "only"
        considered, scarcity = self._considered(ask, len(candidates)), self.fleet.scarcity
        return Decision(
            at=now,
            ask=ask,
            candidates=candidates,
            chosen=chosen,
            reason=reason,
            refusal=None,
            judged=judged,
            considered=considered,
            scarcity=scarcity,
        )

    def _considered(self, ask: Ask, candidates: int) -> Sequence[Offer]:
        offered = self.fleet.offered(ask.model, ask.version)
        return () if len(offered) == candidates else tuple(offered[:MOST_CONSIDERED])

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        """The best of the candidates, of which there is at least one."""
        return Choice(*self._policy(candidates, ask.deadline - now))

    def candidates(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> tuple[Candidate, ...]:
        """The targets that may take `ask` now, each with its predictions; of a large fleet those of a shortlist."""
        offers = self.fleet.offers(ask.model, ask.version)
        if ask.left_out:
            exclude = {*ask.left_out, *exclude}
        if ask.home:
            return self._at_home(ask, now, exclude)
        if self._crowd_draw is not None:
            found = self._fitting(sample(offers, self._crowd_draw), ask, now, exclude)
            if any(one.finish_s <= ask.deadline - now for one in found):
                return _without_reserve(found, ask.deadline - now) if self.fleet.has_reserve else found
        looked_at = self._shortlist.of(ask.model, ask.version, offers, ask.units)
        found = self._fitting(looked_at, ask, now, exclude)
        # A shortlist cannot prove that there is no candidate, so all offers are looked at, and then deferred variants.
        found = found or self._fitting(offers.all.items, ask, now, exclude)
        found = found or self._fitting(offers.all.items, ask, now, exclude, aside=True)
        return _without_reserve(found, ask.deadline - now) if self.fleet.has_reserve else found

    def _at_home(self, ask: Ask, now: float, exclude: Collection[str]) -> tuple[Candidate, ...]:
        """The candidates on the one target that will do: neither a sample nor a reserve may pass it over."""
        offers = offers_of(self.fleet, ask, ask.home)
        return self._fitting(offers, ask, now, exclude) or self._fitting(offers, ask, now, exclude, aside=True)

    def _fitting(
        self, offers: Sequence[Offer], ask: Ask, now: float, exclude: Collection[str], *, aside: bool = False
    ) -> tuple[Candidate, ...]:
        """The offers that are eligible (`eligibility.py`), each with its predictions.

        The rules are spelled out in the loop: it runs over every offer for every request, and a call of `ineligible`
        for each would add its own cost to that of `estimate`. `takes` comes late, since it may trip a mute path.
        """
        inside, attested, deadline = INSIDE[ask.pin], ask.attested, ask.deadline
        demanded, floor, generation = ask.variant, ask.min_quality, ask.generation
        return tuple(
            [
                estimate(offered, ask.units, now, ask.body_bytes, ask.answer_bytes)
                if generation is None
                else estimate_generation(offered, generation, now, ask.body_bytes, ask.answer_bytes)
                for offered in offers
                if offered.zone in inside
                and not (attested and offered.target.attestation.until < deadline)
                and not variant_misfit(offered.variant, ask)
                and (aside or not offered.variant.standing or not deferred_to(offered.variant, demanded, floor))
                and offered.target.takes(now)
                and not (exclude and offered.target.id in exclude)
            ]
        )


def offers_of(fleet: Fleet, ask: Ask, target_id: str) -> list[Offer]:
    """What a target offers of the ask's model."""
    target, indexed = fleet.targets.get(target_id), fleet.offers(ask.model, ask.version).all
    return [
        one
        for offer in (target.offers if target is not None else ())
        if (offer.name, offer.version) == (ask.model, ask.version)
        for variant in offer.variants
        if (one := indexed.get((target_id, variant.name)))
    ]


def _without_reserve(candidates: tuple[Candidate, ...], budget_s: float) -> tuple[Candidate, ...]:
    """The candidates not in reserve, if one of them is sure to make it; else all."""
    others = [one for one in candidates if not one.offered.target.spec.standby]
    return tuple(others) if any(_is_sure(one, budget_s) for one in others) else candidates


def estimate(offered: Offer, units: float, now: float, body_bytes: int = 0, answer_bytes: int = 0) -> Candidate:
    """The predictions for `units` of work in bodies of these sizes on one offered variant."""
    # This runs for every target in every decision, so the usual case (a target that is not silent, in slow start or
    # refusing) is spelled out: with a call for each part a decision over 32 targets took half as long again.
    target, cost = offered.target, offered.cost
    queue_estimate, link = target.queue_estimate, target.link
    compute_s = cost.predict_s(units)
    if now >= target.plain_from:  # no slow start and no pause: `TargetView.wait_s` and `expected_wait_s`, inlined
        ahead_s = queue_estimate.wait_s(now) + offered.variant.wait_s  # the latter of a site's variant, else 0
        wait_s = ahead_s * queue_estimate.error.factor
    else:
        ahead_s = target.wait_s(now) + offered.variant.wait_s
        wait_s = target.expected_wait_s(ahead_s, now)
    if offered.cold_s:  # its model has to come into memory first
        ahead_s, wait_s = ahead_s + offered.cold_s, wait_s + offered.cold_s
    link_s = link.path(now).median_s + body_bytes * link.s_per_byte  # round trip, and the request's time on the wire
    sigma_s, jitter_s = compute_s * cost.sigma, link.jitter_s
    return Candidate(  # positional: hot path
        offered,
        compute_s,
        wait_s,
        link_s,
        # `margin_s`, inlined: 1.645 standard deviations of compute, wait and link, taken as independent
        NORMAL * sqrt(sigma_s * sigma_s + queue_estimate.error.variance(ahead_s) + jitter_s * jitter_s),
        link_s + wait_s + compute_s,
        target.price * compute_s + target.byte_price * (body_bytes + answer_bytes),
        1.0
        if link.silent_since is None and not target.ejected and not target.refusals and not target.siblings.stalls
        else target.trust(now),
        ahead_s,
    )


def predicted(offered: Offer, ask: Ask, now: float) -> Candidate:
    """The offer as a candidate for this ask."""
    if ask.generation is None:
        return estimate(offered, ask.units, now, ask.body_bytes, ask.answer_bytes)
    return estimate_generation(offered, ask.generation, now, ask.body_bytes, ask.answer_bytes)


def estimate_generation(
    offered: Offer, ask: GenerationAsk, now: float, body_bytes: int = 0, answer_bytes: int = 0
) -> Candidate:
    """The same of a generation, by the token pace of its variant there; finish and margin are of the whole answer."""
    target, pace, slots = offered.target, offered.cost.pace, offered.variant.slots
    link = target.link
    there = sequences_at(offered, now)
    places = offered.variant.places  # of a site, whose machines share what is there; else 1
    batch = min(there / places + 1.0, float(slots or there + 1.0) / places)
    batch = batch if batch > 1.0 else 1.0
    cached_tokens = pace.prefixes.expected_tokens(ask.prefix)
    prompt_units = max(0.0, ask.prompt_units - cached_tokens * ask.token_units)
    first_s, step_s = pace.first_s(prompt_units, batch), pace.step_s(batch)
    tokens_s = step_s * (ask.mean_length - 1.0)
    compute_s = first_s + tokens_s
    ahead_s, variance = pace.wait(there, slots, compute_s)
    if now < target.plain_from:  # a pause after a refusal, or a slow start
        ahead_s = max(ahead_s, target.refused_until - now)
    wait_s = ahead_s * pace.wait_error.factor
    variance += pace.wait_error.variance(ahead_s)
    link_s = link.path(now).median_s + body_bytes * link.s_per_byte
    # Variances: of the prompt's time, of the steps', of the length, of the wait and of the link, as independent.
    lengths_s = step_s * _spread(ask.lengths)
    errs_s = pace.first.sigma * first_s + pace.step.sigma * tokens_s
    jitter_s = link.jitter_s
    return Candidate(
        offered=offered,
        compute_s=compute_s,
        wait_s=wait_s,
        link_s=link_s,
        margin_s=NORMAL * sqrt(errs_s * errs_s + lengths_s * lengths_s + variance + jitter_s * jitter_s),
        finish_s=link_s + wait_s + compute_s,
        cost=_time_or_tokens(target, ask, compute_s / max(1.0, slots / places))
        + target.byte_price * (body_bytes + answer_bytes),
        trust=target.trust(now),
        ahead_s=ahead_s,
        tokens=TokenPrediction(
            first_s=first_s,
            first_sigma=pace.first.sigma,
            step_s=step_s,
            step_sigma=pace.step.sigma,
            wait_variance=variance,
            batch=batch,
            cached_tokens=cached_tokens,
        ),
    )


def sequences_at(offered: Offer, now: float) -> float:
    """Generations that wait or run there: this gateway's, and what the target's last report has beyond them."""
    return offered.cost.pace.under_way + offered.target.queue_estimate.others(now)


def _time_or_tokens(target: TargetView, ask: GenerationAsk, share_s: float) -> float:
    """What a generation costs there: its slot's share of the device's time, or its tokens where those are paid for."""
    if target.spec.token_price.is_free:
        return target.price * share_s
    return target.token_cost(ask.prompt_tokens, ask.mean_length)


def _spread(lengths: Sequence[float]) -> float:
    """The standard deviation of equally likely lengths."""
    mean = sum(lengths) / len(lengths)
    return sqrt(sum([(one - mean) * (one - mean) for one in lengths]) / len(lengths))


def added_work_s(candidate: Candidate) -> float:
    """What the attempt adds to the wait of requests behind it: all its compute, or its part of a batched call.

    A generation holds one slot of several, and those behind it wait for any of them.
    """
    offered, compute_s = candidate.offered, candidate.compute_s
    if slots := offered.variant.slots:
        return compute_s / slots
    if not offered.target.queue_estimate.batches:
        return compute_s
    if offered.target.spec.tier == "site":
        return compute_s / max(1.0, offered.variant.places)  # of all its places together
    # In a batch the cost of the call is shared; at least a twentieth remains, where the table is flat.
    work_s, least_s = compute_s - offered.cost.call_s(), 0.05 * compute_s
    return work_s if work_s > least_s else least_s


def margin_s(offered: Offer, compute_s: float, ahead_s: float) -> float:
    """How much later than predicted the answer may come, with 95 % confidence if errors were normal."""
    target, sigma_s = offered.target, compute_s * offered.cost.sigma
    jitter_s = target.link.jitter_s
    return NORMAL * sqrt(sigma_s * sigma_s + target.queue_estimate.error.variance(ahead_s) + jitter_s * jitter_s)


def _floor_s(candidates: Sequence[Candidate], ask: Ask) -> float:
    units = ask.units if ask.generation is None else ask.generation.certain_units
    return min(one.offered.cost.floor_s(units) for one in candidates)


def _is_not_worth_it(chosen: Candidate, judged: Sequence[CandidateScore | None]) -> bool:
    """Whether the cloud would cost more than the best answer from there is worth."""
    return chosen.offered.zone == "cloud" and max([one.worth for one in judged if one is not None], default=0.0) < 0.0


def _too_dear(budget: CloudBudget) -> Overloaded:
    return Overloaded(
        f"the cloud's budget is spent ({budget.spend:.2g} of {budget.pool_s_per_s:g} pool-seconds a second): "
        "no edge could answer, and the cloud costs more now than this answer is worth",
        retry_after_s=RETRY_SPENT_S,
    )


def _infeasible(floor_s: float, budget_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"infeasible: even the fastest target needs {floor_s * 1e3:.0f} ms of compute for this work, "
        f"and {budget_s * 1e3:.0f} ms of the budget are left"
    )
