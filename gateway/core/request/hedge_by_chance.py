"""Chance hedging launches a second attempt when its chance has overtaken the first's and the gain pays for it.

While the first attempt is silent, the chance that it still makes the deadline falls; the chance of a fresh attempt
elsewhere falls too, as the time that is left gets shorter. The right instant is where the two curves cross: before it
the first is the better bet, and after it every millisecond is lost.

    P(u)   the first attempt's chance after u of silence    `unacknowledged` before its ack, then `chance_after_silence`
    H(u)   the second's chance with the time left at u      `CompletionTime.by` on its own candidate, calibrated
    due    the earliest u with H(u) > P(u) and gain(u) >= what a token is worth
           gain(u) = weight · (1 − P) · H − LAMBDA · cost − externality (harm and rent)

No chance is worked out while an attempt may still be in its usual time. The first look is when its answer is overdue,
or when nine of ten acks would have been here, whichever comes first; only an attempt that was a doubtful bet from the
start is looked after at once. The ack brings the second look: it carries the target's own estimate of its queue. One
that leaves the first attempt next to no chance is as good as a refusal, only that it was not refused yet: then the
first is taken out of that queue, and the second goes *instead* of it. That is no extra load, and costs no token.

Tokens are worth the more the fewer are left, from MIN_GAIN to MOST_GAIN in equal ratios: the rule of the online
knapsack. With one threshold a stormy minute spends its tokens on hedges that hardly gain, and the next attempt that is
surely lost finds none (simulated, four-fold jitter at 0.6 of the knee: one point of attainment for no extra load).

An attempt whose target has stalled (`health/progress.py`) is as good as refused too, and moves at every load: it is not
computed where it is.

So does one whose path has gone silent for longer than its round trips explain (`LinkEstimate.is_lost`), where no hedge
is to be had and another target is worth what it takes from others: what is on its way there is not answered in time.

Guards, since a hedge that is not needed is load: one budget for all requests (`TokenBudget`, shared with fallbacks);
another failure domain than the first's; only last resorts while `overloaded` says so.

Last resort: where the pool is silent and no hedge pays, a cheaper target is started at the last instant at which its
answer, be it of lesser quality, would surely be here; unless the first is by then still a good bet.

It can be wrong where misses have one cause (a common uplink): two silent targets are then one, and both are paid.
Source: docs/design/routing.md, "Hedging": p95-hedging lost 1.4 points at 0.6 load, the crossing rule is neutral there
and gains elsewhere. Chakrabarty, Zhou and Lukose, "Budget constrained bidding in keyword auctions and online knapsack
problems", 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from gateway.core.estimate.calibration import apply_curve
from gateway.core.estimate.link_estimate import BROKEN, LOST, SLACK_S
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.completion import CompletionTime, chance_after_silence
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.placement.utility import UtilityPlacer, candidate_completion, queue_position
from gateway.core.request.hedging import CUT_OFF, HOPELESS, STALLED, Hedge, PendingAttempt
from gateway.core.request.token_budget import TokenBudget

MIN_GAIN: Final = 0.05  # with a full budget, ...
MOST_GAIN: Final = 1.5  # ... and with an empty one, in ordinary answers in time
SOONEST_S: Final = 0.006  # a timer that rings sooner costs more than it finds
_DOUBTFUL: Final = 0.9  # claims below this are looked after at once
_SUREST: Final = 0.995  # something is always lost: a chance of 1 would be waited for to the end
_USUAL_ACK: Final = 0.9  # of acks are here by the first look
_HOPELESS: Final = 0.3  # a promise that leaves less than this is taken for a refusal
_LOOKS: Final = 8  # instants at which the crossing is sought in the time that is left


class ChanceHedging:
    """Mutable: the token budget. The rest is read from the placer's own estimates."""

    def __init__(
        self,
        placer: UtilityPlacer,
        *,
        overloaded: Callable[[], bool] = lambda: False,
        tokens: TokenBudget | None = None,
    ) -> None:
        self.tokens = tokens or TokenBudget()
        self._placer = placer
        self._overloaded = overloaded

    def arrived(self) -> None:
        self.tokens.earn()

    def may_hedge(self) -> bool:
        return self.tokens.spend()

    def may_fall_back(self) -> bool:
        return self.tokens.overdraw()

    def avoid(self, tried: Sequence[Candidate]) -> Collection[str]:
        domains = {failure_domain(one.offered.target.spec) for one in tried}
        fleet = self._placer.fleet
        same = {target.id for target in fleet.targets.values() if failure_domain(target.spec) in domains}
        # A target may have gone and come back elsewhere under its old name: it had its chance all the same.
        same.update(one.offered.target.id for one in tried)
        return fleet.without_hedging(same) if fleet.unhedged else same

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        link = chosen.offered.target.link
        if chosen.claim is not None and chosen.claim.prediction.claimed < _DOUBTFUL:
            after_s = SOONEST_S
        else:
            after_s = chosen.finish_s + chosen.margin_s
            if link.acknowledges:
                after_s = min(after_s, link.path(now).quantile_s(_USUAL_ACK) + SLACK_S)
        at = now + max(SOONEST_S, after_s)
        # The first may not even be expected before it is too late for the second: look while there is a choice.
        at = max(now + SOONEST_S, min(at, ask.deadline - other.finish_s - other.margin_s))
        return at if at + other.finish_s < ask.deadline else None

    def second_look(self, ask: Ask, watched: PendingAttempt, now: float) -> float | None:
        """When to look after an attempt that was acknowledged just now."""
        assert watched.promised_at is not None
        if self._left(watched, _completion_of_pending(watched, now), ask.deadline, now) < _DOUBTFUL:
            return now
        return watched.promised_at + watched.candidate.margin_s

    def plan(self, ask: Ask, watched: PendingAttempt, decision: Decision, now: float) -> Hedge | None:
        second = decision.chosen
        if second is None:
            return None
        last = ask.deadline - second.finish_s
        if now > last:
            return None
        first_takes = _completion_of_pending(watched, now)
        second_takes = candidate_completion(second, second.ahead_s, now)
        weight, externality = queue_position(ask).weight, second.claim.externality if second.claim is not None else 0.0
        if _is_owed_for_good(watched, now):
            fresh = self._claimed(second_takes.by(ask.deadline - now), second)
            return Hedge(now, instead=STALLED) if fresh >= _HOPELESS else None
        step_s = max((last - now) / _LOOKS, 1e-9)
        # MIN_GAIN with a full budget, MOST_GAIN with an empty one, in equal ratios between
        token_worth = MIN_GAIN * (MOST_GAIN / MIN_GAIN) ** self.tokens.spent
        for look in range(0 if self._overloaded() else _LOOKS + 1):
            at = now + look * step_s
            left = self._left(watched, first_takes, ask.deadline, at)
            fresh = self._claimed(second_takes.by(ask.deadline - at), second)
            # weight · (1 − P) · H − LAMBDA · cost − externality
            gain = weight * (1.0 - left) * fresh - self._placer.prices.cost * second.cost - externality
            if fresh <= left or gain < MIN_GAIN:
                continue
            if look == 0 and self._is_hopeless(watched, first_takes, ask.deadline):
                return Hedge(at, instead=HOPELESS)
            if gain >= token_worth:
                return Hedge(at)
        link = watched.candidate.offered.target.link
        if not watched.is_probe and link.silent_since is not None and link.trust(now) <= LOST:
            fresh = self._claimed(second_takes.by(ask.deadline - now), second)
            gain = weight * fresh - self._placer.prices.cost * second.cost - externality
            if fresh >= _HOPELESS and gain >= MIN_GAIN:
                return Hedge(now if link.is_lost(now) else now + SLACK_S, instead=CUT_OFF)
        if second.offered.price >= watched.candidate.offered.price:
            return None
        at = max(now, ask.deadline - second.finish_s - second.margin_s)
        left = self._left(watched, first_takes, ask.deadline, at)
        return Hedge(at, "last-resort") if left < _DOUBTFUL else None

    def _is_hopeless(self, watched: PendingAttempt, takes: CompletionTime, deadline: float) -> bool:
        """Whether the ack's own estimate left it no chance. An attempt that is late for a good one may still come."""
        if watched.promised_at is None:
            return False
        promised = takes._replace(trust=1.0).by(deadline - watched.launched_at)
        return self._claimed(promised, watched.candidate) < _HOPELESS

    def _left(self, watched: PendingAttempt, takes: CompletionTime, deadline: float, at: float) -> float:
        """The first attempt's chance, if nothing has come from it by `at`."""
        silence_s = at - watched.launched_at
        if watched.promised_at is None and watched.candidate.offered.target.link.acknowledges:
            unheard_s = max(0.0, silence_s - SLACK_S)
            return takes._replace(trust=1.0).unacknowledged(unheard_s, deadline - watched.launched_at, BROKEN)
        by_deadline = takes.by(deadline - watched.launched_at)
        claimed = min(_SUREST, self._claimed(by_deadline, watched.candidate))
        return chance_after_silence(takes.by(silence_s), by_deadline, claimed)

    def _claimed(self, chance: float, of: Candidate) -> float:
        return max(0.0, apply_curve(chance, self._placer.calibration.curve) + of.offered.target.bias.shift)

    def __repr__(self) -> str:
        return f"<ChanceHedging {self.tokens!r}>"


def failure_domain(spec: TargetSpec) -> str:
    """What fails together: targets on one machine. On loopback, or without a port, each is its own."""
    host = spec.address.rpartition(":")[0].strip("[]")
    return spec.id if host in ("", "localhost", "::1") or host.startswith("127.") else host


def _completion_of_pending(watched: PendingAttempt, now: float) -> CompletionTime:
    """The distribution of the attempt's whole time, by its target's promise where it gave one."""
    candidate = watched.candidate
    takes = candidate_completion(candidate, candidate.ahead_s, now)
    if watched.promised_at is None:
        return takes
    # The promise is of the mean; what is uncertain of compute and wait stays as it was.
    busy_s = max(0.0, watched.promised_at - watched.launched_at - candidate.link_s)
    # A probe that was taken has its chance: a hedge that answers first would leave the target in doubt for ever.
    return CompletionTime(takes.path, busy_s, takes.spread_s, 1.0 if watched.is_probe else takes.trust)


def _is_owed_for_good(watched: PendingAttempt, now: float) -> bool:
    """Whether the attempt's target has stalled; of a probe, whether it has not answered when it should have."""
    candidate, due_at = watched.candidate, watched.promised_at
    target = candidate.offered.target
    if now < target.progress.look_at or not target.progress.is_stalled(now):
        return False
    if due_at is None and not target.link.acknowledges:  # such a target promises nothing: what is predicted stands in
        due_at = watched.launched_at + candidate.finish_s
    return not watched.is_probe or (due_at is not None and now > due_at + 2.0 * candidate.margin_s)
