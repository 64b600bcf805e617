"""The admission guard charges tenants for what placement decides, observes it, and refuses what is not worth it.

It is a part of the placement stack around the placer, so hedges and fallbacks pass it as first attempts do:

    charged     a request whose tenant cannot pay on the chosen tier goes to the other tier; on none, it is refused
    observed    the chosen candidate gets an observer, by which admission learns of queues and of compute spent
    worth it    first attempts in overload are refused when their claimed chance is below 5 % or their value below 0

The chance is the one that the policy claimed, which is calibrated by outcomes; for a policy without claims, the one
that its margin implies. Uncalibrated, early shedding costs more than it saves (docs/design/routing.md, "Load shedding":
−2 to −4 points), so it is never done outside of overload, when no other request would need the time more.

"Worth it" looks at the candidates that have a score, and takes one without a score for no help: that is an edge whose
rent is so high that even a target at which hardly anything is answered is a better choice. So while a pool refuses
everything, long requests are refused here instead of filling edges that short ones need. Scoring those edges without
their rent, and sending long requests there, was simulated (eight paced edges, twelve seeds, a pool that refuses for
1 s): 75 % of all in time instead of 86 %, of the documents 62 % instead of 76 %.

    strain   the share of the time to spare that the chosen target's queue takes: wait / (budget − link − compute)
    loss     the chance of being late, where the queue has a part in it; what the link does is no reason to shed

Of an attempt after a connection that ended only a full queue tells something: the time that it lacks went by elsewhere.
Where all connections of a fleet were reset, what was late for it was taken for overload, and work with room was shed.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import TenantQuota
from gateway.core.estimate.calibration import apply_curve
from gateway.core.estimate.token_calibration import TokenClaim
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.pricing import Tier
from gateway.core.placement.ask import Ask
from gateway.core.placement.interval import chance_from_margin
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision, added_work_s
from gateway.core.placement.utility import candidate_completion
from tidegate.outcome import ServeError

LEAST_CHANCE: Final = 0.05
_STRAINED: Final = 0.1  # below this the queue has no part in being late
_STRAIN_OF_LOST: Final = 0.25
_EARLY_S: Final = 0.001


class AdmissionGuard:
    """Places asks by `placement` under what `admission` knows."""

    def __init__(self, placement: Placement, fleet: Fleet, admission: Admission) -> None:
        self.fleet = fleet
        self.admission = admission
        self._placement = placement

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        """As the placer decides, but refused where it cannot be paid or is not worth it."""
        quota = self.admission.tenants.paying(ask.tenant, ask.also_pays)
        decision = self._affordable(self._placement.decide(ask, now, exclude), quota, now, exclude)
        chosen = decision.chosen
        if chosen is None:
            return decision
        strain = queue_pressure(chosen, ask.deadline - now)
        if not (exclude or ask.again):
            refusal = self._judge(decision, chosen, strain, now)
            if refusal is not None:
                return _refused(decision, refusal)
        target = chosen.offered.target
        if target.refusals and target.expects_refusal(now):
            decision, chosen = self._elsewhere(decision, chosen, quota, now, exclude)
            strain = queue_pressure(chosen, ask.deadline - now)
        observer = TenantCharge(self.admission, quota, chosen, ask.deadline, None if ask.again else strain)
        return decision.choosing(chosen.observed_by(observer))

    def _elsewhere(
        self, decision: Decision, chosen: Candidate, quota: TenantQuota, now: float, exclude: Collection[str]
    ) -> tuple[Decision, Candidate]:
        """The next best target for a request that the chosen one would refuse, which would cost a round trip."""
        other = self._placement.decide(decision.ask, now, {*exclude, chosen.target.id})
        if other.chosen is not None and _can_pay(quota, other.chosen, now):
            return other, other.chosen
        return decision, chosen

    def _affordable(self, decision: Decision, quota: TenantQuota, now: float, exclude: Collection[str]) -> Decision:
        chosen = decision.chosen
        if chosen is None or _can_pay(quota, chosen, now):
            return decision
        tier = chosen.target.spec.tier
        beyond = {*exclude, *(one.id for one in self.fleet.targets.values() if one.spec.tier == tier)}
        other = self._placement.decide(decision.ask, now, beyond)
        if other.chosen is not None and _can_pay(quota, other.chosen, now):
            return other
        cost_s = charged_cost_s(chosen)
        lacks = quota.lacks_compute(tier, cost_s, now)
        return _refused(decision, self.admission.refuse_over_budget(lacks, quota.refuse(tier, cost_s, now)))

    def _judge(self, decision: Decision, chosen: Candidate, strain: float, now: float) -> ServeError | None:
        ask = decision.ask
        chance = claimed_chance(chosen, ask.deadline - now)
        self.admission.placed(chosen.wait_s, strain, queue_loss(chosen, chance, ask.deadline - now, now))
        if not (self.admission.overloaded() and self.admission.sheds):
            return None
        if chance < LEAST_CHANCE:
            return self.admission.refuse_not_worth_it(f"its chance to be in time is {chance:.0%}")
        worth = max((one.worth for one in decision.judged if one is not None), default=0.0)
        return (
            self.admission.refuse_not_worth_it("it would take more from others than it is worth")
            if worth < 0.0
            else None
        )

    def __repr__(self) -> str:
        return f"<AdmissionGuard {self._placement!r} {self.admission!r}>"


class TenantCharge:
    """Observes one attempt: its tenant pays, and admission learns. See `attempt_observer.py`.

    Args: strain: None: a connection had ended under an attempt before it.
    """

    __slots__ = ("_admission", "_charged_s", "_deadline", "_quota", "_share", "_strain", "_tier")

    def __init__(
        self, admission: Admission, quota: TenantQuota, candidate: Candidate, deadline: float, strain: float | None
    ) -> None:
        self._admission = admission
        self._quota = quota
        self._tier = candidate.offered.target.spec.tier
        self._charged_s = charged_cost_s(candidate)
        self._share = self._charged_s / candidate.compute_s
        self._deadline = deadline
        self._strain = strain

    @property
    def quota(self) -> TenantQuota:
        """The quota that pays."""
        return self._quota

    @property
    def tier(self) -> Tier:
        """The tier of the target, whose bucket pays."""
        return self._tier

    @property
    def charged_s(self) -> float:
        """The seconds of compute that are charged at the launch."""
        return self._charged_s

    @property
    def share(self) -> float:
        """The attempt's share of the compute of the call that answers it."""
        return self._share

    def launched(self, now: float) -> None:
        self._quota.spend(self._tier, self._charged_s, now)

    def answered(self, queue_s: float, compute_s: float | None, now: float) -> None:
        if compute_s is not None:
            self._quota.spend(self._tier, self._share * compute_s - self._charged_s, now)
            self._admission.limit.answered(queue_s, compute_s, now)
        self._admission.overload.attempt_ended(lost=self._strain is not None and 0.0 < now - self._deadline < queue_s)

    def refused(self, now: float, *, full: bool) -> None:
        self._quota.spend(self._tier, -self._charged_s, now)
        # Where no queue was seen, it was the link that took the time which was missing at the target.
        lost = full or self._is_strained()
        self._admission.overload.attempt_ended(lost=lost)
        if lost:
            self._admission.limit.dropped(now)

    def failed(self, now: float) -> None:
        self._quota.spend(self._tier, -self._charged_s, now)

    def cancelled(self, now: float) -> None:
        """What was charged stays charged: whether it was computed is not known. At the deadline it is a miss."""
        if now >= self._deadline - _EARLY_S:
            self._admission.overload.attempt_ended(lost=self._is_strained())

    def _is_strained(self) -> bool:
        return self._strain is not None and self._strain > _STRAIN_OF_LOST

    def __repr__(self) -> str:
        return f"<TenantCharge {self._quota.name} {self._charged_s:.4f} s on {self._tier}>"


def queue_pressure(candidate: Candidate, budget_s: float) -> float:
    """The share of the time to spare that the queue takes; infinite where there is a queue and no time to spare."""
    if candidate.wait_s <= 0.0:
        return 0.0
    slack_s = budget_s - candidate.link_s - candidate.compute_s
    return candidate.wait_s / slack_s if slack_s > 0.0 else inf


def claimed_chance(candidate: Candidate, budget_s: float) -> float:
    """The chance that was claimed for it, or what its margin implies."""
    return chance_from_margin(candidate, budget_s) if candidate.claim is None else candidate.claim.prediction.claimed


def queue_loss(candidate: Candidate, chance: float, budget_s: float, now: float) -> float:
    """How much of its chance the queue takes."""
    if candidate.wait_s <= 0.0:
        return 0.0
    if candidate.claim is None or isinstance(candidate.claim.prediction, TokenClaim):
        alone = chance_from_margin(candidate._replace(finish_s=candidate.finish_s - candidate.wait_s), budget_s)
    else:
        raw = candidate_completion(candidate, 0.0, now).by(budget_s)
        alone = apply_curve(raw, candidate.claim.prediction.calibration.curve)
    return max(0.0, alone - chance)


def charged_cost_s(candidate: Candidate) -> float:
    """Seconds of its tier's compute that a tenant is charged for it."""
    return added_work_s(candidate)


def _can_pay(quota: TenantQuota, candidate: Candidate, now: float) -> bool:
    return quota.limitless or quota.affords(candidate.target.spec.tier, charged_cost_s(candidate), now)


def _refused(decision: Decision, refusal: ServeError) -> Decision:
    return decision._replace(chosen=None, reason="", refusal=refusal)
