"""Chance hedging launches a second attempt when its chance has overtaken the first's and the gain pays for it.

While the first attempt is silent, the chance that it still makes the deadline falls; the chance of a fresh attempt
elsewhere falls too, as the time that is left gets shorter. The right instant is where the two curves cross: before it
the first is the better bet, and after it every millisecond is lost.

    P(u)   the first attempt's chance after u of silence    `unacknowledged` before its ack, then `chance_after_silence`
    H(u)   the second's chance with the time left at u      `CompletionTime.by` on its own candidate, calibrated
    due    the earliest u with H(u) > P(u) and gain(u) >= what a token is worth
           gain(u) = weight · (1 − P) · H − WHETHER · cost − externality (harm and rent)

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

Of a generation the first token is what is waited for, and a second attempt costs a prompt and no whole answer. With
`races` it may therefore begin before the curves cross: when that is worth most (`first_token_race.py`).

Guards, since a hedge that is not needed is load: one budget for all requests (`TokenBudget`, shared with fallbacks);
another failure domain than the first's; only last resorts while `overloaded` says so, or where most targets fail and
the second is one of them.

Last resort: where the pool is silent and no hedge pays, a cheaper target is started at the last instant at which its
answer, be it of lesser quality, would surely be here; unless the first is by then still a good bet.

It can be wrong where misses have one cause (a common uplink): two silent targets are then one, and both are paid.
Source: docs/design/routing.md, "Hedging": p95-hedging lost 1.4 points at 0.6 load, the crossing rule is neutral there
and gains elsewhere. Chakrabarty, Zhou and Lukose, "Budget constrained bidding in keyword auctions and online knapsack
problems", 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import sqrt
from typing import Final, NamedTuple

from gateway.core.estimate.calibration import apply_curve
from gateway.core.estimate.conformal import NORMAL
from gateway.core.estimate.link_estimate import BROKEN, LOST, SLACK_S
from gateway.core.estimate.token_calibration import TokenClaim
from gateway.core.fleet.target import TargetSpec, TargetView
from gateway.core.placement.ask import Ask
from gateway.core.placement.completion import CompletionTime, chance_after_silence
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.placement.utility import UtilityPlacer, first_completion, first_due, queue_position
from gateway.core.request.first_token_race import has_room, prompt_harm, race_gain, runner
from gateway.core.request.hedging import CUT_OFF, DOUBTED, HOPELESS, RACE, STALLED, Hedge, PendingAttempt
from gateway.core.request.token_budget import TokenBudget

MIN_GAIN: Final = 0.05  # with a full budget, ...
MOST_GAIN: Final = 1.5  # ... and with an empty one, in ordinary answers in time
SOONEST_S: Final = 0.006  # a timer that rings sooner costs more than it finds
LEAST_RACE_GAIN: Final = 0.01  # a race may cost a hundredth of an attempt
_SURE_BEGINNING: Final = 0.98  # a first token that is as sure as this is looked after when it is overdue
_DOUBTFUL: Final = 0.9  # claims below this are looked after at once
_SUREST: Final = 0.995  # something is always lost: a chance of 1 would be waited for to the end
_USUAL_ACK: Final = 0.9  # of acks are here by the first look
_HOPELESS: Final = 0.3  # a promise that leaves less than this is taken for a refusal
# Of an answer that is promised for later: its target may have stalled meanwhile, which others' answers show.
_STALLS_WITHIN_S: Final = 0.3
_LOOKS: Final = 8  # instants at which the crossing is sought in the time that is left


class _Bet(NamedTuple):
    """One of two attempts: how long it takes until its caller is shown something, and by when that has to be."""

    takes: CompletionTime
    by: float


class ChanceHedging:
    """Mutable: the token budget. The rest is read from the placer's own estimates."""

    def __init__(
        self,
        placer: UtilityPlacer,
        *,
        overloaded: Callable[[], bool] = lambda: False,
        tokens: TokenBudget | None = None,
        races: bool = False,
    ) -> None:
        """Args: races: whether a generation's second attempt may begin before its first one is the worse bet."""
        self.tokens = tokens or TokenBudget()
        self._placer = placer
        self._overloaded = overloaded
        self._races = races

    def arrived(self) -> None:
        self.tokens.earn()

    def may_hedge(self, share: float = 1.0) -> bool:
        return self.tokens.spend(share)

    def may_fall_back(self, share: float = 1.0) -> bool:
        return self.tokens.overdraw(share)

    def avoid(self, tried: Sequence[Candidate], *, apart: bool = False) -> Collection[str]:
        domains = {failure_domain(one.offered.target.spec) for one in tried}
        fleet = self._placer.fleet
        same = {target.id for target in fleet.targets.values() if failure_domain(target.spec) in domains}
        # A target may have gone and come back elsewhere under its old name: it had its chance all the same.
        same.update(one.offered.target.id for one in tried)
        if apart:
            tiers = {one.offered.target.spec.tier for one in tried}
            if len(tiers) > 1:
                return ()
            same.update(target.id for target in fleet.targets.values() if target.spec.tier in tiers)
        if not fleet.unhedged or _may_have_to_move(tried[-1].offered.target):
            return same
        return fleet.without_hedging(same)

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        link = chosen.offered.target.link
        is_race = self._races and _generates(chosen, other)
        if (
            claimed := _claimed_of_shown(chosen) if is_race else _claimed_of(chosen)
        ) is not None and claimed < _DOUBTFUL:
            after_s = SOONEST_S
        else:
            after_s = shown_in_s(chosen) + shown_margin_s(chosen)
            if link.acknowledges:
                after_s = min(after_s, link.path(now).quantile_s(_USUAL_ACK) + SLACK_S)
        at = now + max(SOONEST_S, after_s)
        # The first may not even be expected before it is too late for the second: look while there is a choice.
        due = first_due(other, ask, now)
        at = max(now + SOONEST_S, min(at, _last_useful(other, due)))
        # Of several others the one that is done first need not be the one that begins first: a race is looked into.
        return at if is_race or at + shown_in_s(other) < due else None

    def second_look(self, ask: Ask, watched: PendingAttempt, now: float) -> float | None:
        """When to look after an attempt that was acknowledged just now."""
        assert watched.promised_at is not None
        if self._races and ask.generation is not None:
            # The ack says that the way out works, and when the best instant for a race comes is another matter now.
            claimed = _claimed_of_shown(watched.candidate)
            return now if claimed is None or claimed < _SURE_BEGINNING else None
        takes = _completion_of_pending(watched, ask, now)
        if self._left(ask, watched, takes, first_due(watched.candidate, ask, now), now) < _DOUBTFUL:
            return now
        look_at = _promised_at(watched, watched.promised_at) + shown_margin_s(watched.candidate)
        if watched.other is not None:
            last = _last_useful(watched.other, first_due(watched.other, ask, now))
            # As the first look: while there is a choice.
            look_at = last if now + SOONEST_S < last < look_at else look_at
        return min(look_at, now + _STALLS_WITHIN_S)

    def overdue(self, watched: PendingAttempt, now: float) -> None:
        watched.candidate.offered.target.siblings.owes(now)

    def plan(self, ask: Ask, watched: PendingAttempt, decision: Decision, now: float) -> Hedge | None:
        second = decision.chosen
        if second is None:
            return None
        # What is watched is the first token of a generation, and the answer of all others.
        first_by, second_by = first_due(watched.candidate, ask, now), first_due(second, ask, now)
        last = second_by - shown_in_s(second)
        if now > last:
            return None
        first_takes = _completion_of_pending(watched, ask, now)
        doubt = 1.0 if watched.is_probe else _doubt(watched.candidate, now)
        first_takes = first_takes._replace(trust=doubt * first_takes.trust)
        second_takes = first_completion(second, ask, now)
        weight, externality = queue_position(ask).weight, second.claim.externality if second.claim is not None else 0.0
        if _is_owed_for_good(watched, now):
            fresh = self._claimed(second_takes.by(second_by - now), second)
            return Hedge(now, instead=STALLED) if fresh >= _HOPELESS else None
        beside = None
        # Where most targets fail, only one that is not among them is worth asking as well.
        fails = self._placer.fleet.balance.panic and second.offered.target.ejected
        if not fails and not self._overloaded():
            races = self._races and _generates(watched.candidate, second) and has_room(second)
            plan_beside = self._race if races else self._crossing
            beside = plan_beside(ask, watched, _Bet(first_takes, first_by), second, _Bet(second_takes, second_by), now)
        if doubt < 1.0 and not fails:
            # It has company in its silence: another one is asked in its place, with or without something to pay with.
            left = self._left(ask, watched, first_takes, first_by, now)
            fresh = self._claimed(second_takes.by(second_by - now), second)
            if left < _HOPELESS <= fresh:
                return Hedge(now, instead=DOUBTED)
        if beside is not None:
            return beside
        link = watched.candidate.offered.target.link
        if not watched.is_probe and link.silent_since is not None and link.trust(now) <= LOST:
            fresh = self._claimed(second_takes.by(second_by - now), second)
            gain = weight * fresh - self._placer.prices.whether_of(ask) * second.cost - externality
            if fresh >= _HOPELESS and gain >= MIN_GAIN:
                return Hedge(now if link.is_lost(now) else now + SLACK_S, instead=CUT_OFF)
        if second.offered.price >= watched.candidate.offered.price:
            return None
        at = max(now, second_by - shown_in_s(second) - shown_margin_s(second))
        left = self._left(ask, watched, first_takes, first_by, at)
        return Hedge(at, "last-resort") if left < _DOUBTFUL else None

    def _crossing(
        self, ask: Ask, watched: PendingAttempt, first: _Bet, second: Candidate, second_bet: _Bet, now: float
    ) -> Hedge | None:
        """The hedge at the earliest instant at which the second is the better bet, and pays."""
        weight, externality = queue_position(ask).weight, second.claim.externality if second.claim is not None else 0.0
        step_s = _step_s(second, second_bet, now)
        token_worth = self.token_worth()
        for look in range(_LOOKS + 1):
            at = now + look * step_s
            left = self._left(ask, watched, first.takes, first.by, at)
            fresh = self._claimed(second_bet.takes.by(second_bet.by - at), second)
            # weight · (1 − P) · H − WHETHER · cost − externality
            gain = weight * (1.0 - left) * fresh - self._placer.prices.whether_of(ask) * second.cost - externality
            if fresh <= left or gain < MIN_GAIN:
                continue
            if look == 0 and self._is_hopeless(watched, first.takes, first.by):
                return Hedge(at, instead=HOPELESS)
            if gain >= token_worth:
                return Hedge(at)
        return None

    def _race(
        self, ask: Ask, watched: PendingAttempt, first: _Bet, second: Candidate, second_bet: _Bet, now: float
    ) -> Hedge | None:
        """The race to the first token at the instant at which it is worth most (`first_token_race.py`)."""
        placer, chosen = self._placer, watched.candidate
        best_quality = max(chosen.offered.quality, second.offered.quality)
        runners = [runner(one, placer.answer_worth(one, ask, best_quality, now)) for one in (chosen, second)]
        harm = prompt_harm(second, ask, runners[1].worth)
        step_s, token_worth = _step_s(second, second_bet, now), self.token_worth()
        silent_now = self._silent(watched, first, now)
        best, most = None, 0.0
        for look in range(_LOOKS + 1):
            at = now + look * step_s
            left = self._left(ask, watched, first.takes, first.by, at)
            fresh = self._claimed(second_bet.takes.by(second_bet.by - at), second)
            gain, share = race_gain(runners[0], left, runners[1], fresh, dearness=placer.prices.whether_of(ask))
            gain -= harm
            if gain < LEAST_RACE_GAIN:
                continue
            if look == 0 and fresh > left and self._is_hopeless(watched, first.takes, first.by):
                return Hedge(at, instead=HOPELESS)
            # S(u) · [gain(u) − share · worth of a token]
            net = self._silent(watched, first, at) / silent_now * (gain - share * token_worth)
            if net > most:
                best, most = Hedge(at, RACE, share=share), net
        return best

    def token_worth(self) -> float:
        """MIN_GAIN with a full budget, MOST_GAIN with an empty one, in equal ratios between."""
        worth: float = MIN_GAIN * (MOST_GAIN / MIN_GAIN) ** self.tokens.spent
        return worth

    def _silent(self, watched: PendingAttempt, bet: _Bet, at: float) -> float:
        """The chance that nothing has come by `at`; above 0."""
        by_then = bet.takes.by(at - watched.launched_at)
        in_time = bet.takes.by(bet.by - watched.launched_at)
        claimed = min(_SUREST, self._claimed(in_time, watched.candidate))
        scale = min(1.0, claimed / in_time) if in_time > 0.0 else 0.0
        return max(1.0 - _SUREST, 1.0 - scale * by_then)

    def _is_hopeless(self, watched: PendingAttempt, takes: CompletionTime, deadline: float) -> bool:
        """Whether the ack's own estimate left it no chance. An attempt that is late for a good one may still come."""
        if watched.promised_at is None:
            return False
        promised = takes._replace(trust=1.0).by(deadline - watched.launched_at)
        return self._claimed(promised, watched.candidate) < _HOPELESS

    def _left(self, ask: Ask, watched: PendingAttempt, takes: CompletionTime, deadline: float, at: float) -> float:
        """The first attempt's chance, if nothing has come from it by `at`."""
        silence_s = at - watched.launched_at
        if watched.promised_at is None and watched.candidate.offered.target.link.acknowledges:
            unheard_s = max(0.0, silence_s - SLACK_S)
            return takes._replace(trust=1.0).unacknowledged(unheard_s, deadline - watched.launched_at, BROKEN)
        by_deadline = takes.by(deadline - watched.launched_at)
        claimed = min(_SUREST, self._claimed(by_deadline, watched.candidate))
        left = chance_after_silence(takes.by(silence_s), by_deadline, claimed)
        if watched.promised_at is None and watched.candidate.tokens is None:
            # No promise, and a prediction with a wide spread: what its answers have taken is the better witness.
            usual = watched.candidate.offered.cost.answer_times.usual(ask.units)
            left = left if usual is None else min(left, usual.comes_after(silence_s))
        return left

    def _claimed(self, chance: float, of: Candidate) -> float:
        placer = self._placer
        curve = placer.calibration.curve if of.tokens is None else placer.tokens.first.curve
        return max(0.0, apply_curve(chance, curve) + of.offered.target.bias.shift)

    def __repr__(self) -> str:
        return f"<ChanceHedging {self.tokens!r}>"


def failure_domain(spec: TargetSpec) -> str:
    """What fails together: targets on one machine. On loopback, or without a port, each is its own."""
    host = spec.address.rpartition(":")[0].strip("[]")
    return spec.id if host in ("", "localhost", "::1") or host.startswith("127.") else host


def _may_have_to_move(target: TargetView) -> bool:
    """Whether what is under way there may have to leave it: that is no hedge, and goes wherever it is answered."""
    return target.ejected or target.link.silent_since is not None or bool(target.siblings.stalls)


def shown_in_s(candidate: Candidate) -> float:
    """In how many seconds its answer is expected, or the first token of a generation."""
    tokens = candidate.tokens
    return candidate.finish_s if tokens is None else candidate.link_s + candidate.wait_s + tokens.first_s


def shown_margin_s(candidate: Candidate) -> float:
    """How much later that may be, with 95 % confidence: of a first token without what its length leaves open."""
    tokens = candidate.tokens
    if tokens is None:
        return candidate.margin_s
    errs_s, jitter_s = tokens.first_sigma * tokens.first_s, candidate.offered.target.link.jitter_s
    return NORMAL * sqrt(errs_s * errs_s + tokens.wait_variance + jitter_s * jitter_s)


def _last_useful(other: Candidate, due: float) -> float:
    """The instant until which the alternative would surely be in time."""
    return due - shown_in_s(other) - shown_margin_s(other)


def _claimed_of(candidate: Candidate) -> float | None:
    """The chance that was claimed of it; None: none was."""
    return None if candidate.claim is None else candidate.claim.prediction.claimed


def _claimed_of_shown(candidate: Candidate) -> float | None:
    """The same of a generation's first token."""
    prediction = None if candidate.claim is None else candidate.claim.prediction
    return prediction.claims.first if isinstance(prediction, TokenClaim) else _claimed_of(candidate)


def _generates(*candidates: Candidate) -> bool:
    """Whether all are of a generation; after placement has failed they are not known as such."""
    return all(one.tokens is not None for one in candidates)


def _step_s(second: Candidate, bet: _Bet, now: float) -> float:
    """Between two instants at which a second attempt may begin and still be in time."""
    return max((bet.by - shown_in_s(second) - now) / _LOOKS, 1e-9)


def _promised_at(watched: PendingAttempt, promised_at: float) -> float:
    """The instant for which the target promised that.

    Of a generation it promises the end with all of its tokens, whose error is longer than any wait for a slot: what was
    predicted of its first token stands.
    """
    candidate = watched.candidate
    return promised_at if candidate.tokens is None else watched.launched_at + shown_in_s(candidate)


def _completion_of_pending(watched: PendingAttempt, ask: Ask, now: float) -> CompletionTime:
    """The distribution of the attempt's whole time, by its target's promise where it gave one."""
    candidate = watched.candidate
    takes = first_completion(candidate, ask, now)
    if watched.promised_at is None:
        return takes
    promised_at = _promised_at(watched, watched.promised_at)
    # The promise is of the mean; what is uncertain of compute and wait stays as it was.
    busy_s = max(0.0, promised_at - watched.launched_at - candidate.link_s)
    # A probe that was taken has its chance: a hedge that answers first would leave the target in doubt for ever.
    return takes._replace(busy_s=busy_s, trust=1.0 if watched.is_probe else takes.trust)


def _doubt(candidate: Candidate, now: float) -> float:
    """How likely the target is not struck by what its siblings are struck by; 1 while nothing is known of them."""
    target = candidate.offered.target
    return target.siblings.trust(target.id, now) if target.siblings.stalls else 1.0


def _is_owed_for_good(watched: PendingAttempt, now: float) -> bool:
    """Whether the attempt's target has stalled; of a probe, whether it has not answered when it should have."""
    candidate, due_at = watched.candidate, watched.promised_at
    target = candidate.offered.target
    if now < target.progress.look_at or not target.progress.is_stalled(now):
        return False
    if due_at is None and not target.link.acknowledges:  # such a target promises nothing: what is predicted stands in
        due_at = watched.launched_at + candidate.finish_s
    return not watched.is_probe or (due_at is not None and now > due_at + 2.0 * candidate.margin_s)
