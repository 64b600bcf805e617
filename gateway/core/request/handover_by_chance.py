"""Chance handovers ask a second target to go on with an answer where its rest is worth more there than it costs.

Of an answer the caller has g tokens, the first of which came `spent` seconds ago; r more are expected, and a target
begins them in `starts` seconds and makes each in tau, log-normal.

    next     P(tau <= (next · (g - 1 + r) - spent - starts) / r)     that further tokens keep their budget on average
    whole    P(tau <= (deadline - now - starts) / r)                 both are the mean over lengths that r may have
    worth    weight · (first · next·whole + MISSED · (whole - first · next·whole))       as placement has it
             first: whether the first token was in time, which is known by now

    gain     worth there - worth here + relief - harm - LAMBDA · (cost there - cost of the rest here)⁺
             a smaller bill is no reason: idle devices took answers from pools for it, and first tokens came later
    relief   of one that waits for a slot of the first target. What the others in its batch gain is not counted: with it
             a fifth of all answers moved, and fewer were in time (`agents_lte`, 6 a second: 85.5 % of 87.5)
    harm     answers in the second target's batch that it would make late (`generation_time.made_late`)
    share    prompt₂ / whole₂ + starts / whole₁          of an attempt's work is computed twice, or in vain
    ask      where gain - share · worth of a token of the purse >= LEAST

So the work that handovers lose is bounded by the purse of hedges and races (`token_budget.py`). Of an answer that has
begun nothing is staked: one handover is tried, and no second one.

When it is asked is the other half. Where both give the same text the second catches up, if its steps are shorter. Else
the caller has to have enough tokens ahead of their budget to wait for the second one's first:

    began_at + g · next - now >= starts + margin        each token that comes early adds next - step to the left side

An answer that is slower than its budget will never be ahead of it, and misses it if it stays: a second of pause, which
is what a silence gets as well before it is a stall, is less than that.

Where an answer begins is decided as a pair: the first token at A, the rest at B from then on. It begins at A where that
is worth more than all of it at the place that was chosen.

It can be wrong where lengths are (what is short does not pay for a second prompt), and for answers to come, which have
no price here: a slot that is free soon is worth something only where somebody waits already.
Source: docs/design/routing.md, "Planned handovers". DiSCo, ACL 2025 (arXiv 2502.11417).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from math import inf
from typing import Final, NamedTuple

from gateway.core.estimate.token_calibration import GenerationBudget, TokenChances
from gateway.core.placement.ask import Ask
from gateway.core.placement.generation_time import GenerationAsk, log_normal
from gateway.core.placement.placer import Candidate, CandidateScore, Decision, sequences_at
from gateway.core.placement.probing import REASON as PROBE
from gateway.core.placement.utility import UtilityPlacer, harm_to_batch, queue_position
from gateway.core.request.handover import LONGEST_PAUSE_S, PAUSE_S, HandoverPlan
from gateway.core.request.hedge_by_chance import ChanceHedging, shown_in_s, shown_margin_s
from gateway.core.request.resumption import LEAST_S, Resumption

LEAST_GAIN: Final = 0.02  # of an ordinary answer in time
BEGINS_GAIN: Final = 0.1  # the handover that it rests on may not come about
AGAIN_S: Final = 0.25  # between two looks at an answer that stays where it is
SOONEST_AGAIN_S: Final = 0.03
MOST_BEGINNERS: Final = 4  # candidates with the best chance of a first token in time, of which one may begin
_CATCHES_UP: Final = 0.7  # of the first's steps are the second's at most, for it to catch up soon
_KNOWN_FROM: Final = 8  # tokens of an answer say how fast it is written
_FAR: Final = 3.0  # ... as far as that is no more than so many times away from what is predicted
_FIRST_S: Final = 0.5  # what an answer that waits there is taken to have for its first token
_WAITING: Final = 0.5  # of an answer in time is gained for it: it may be in time without, or late with it


class AnswerLeft(NamedTuple):
    """What is left of an answer of which its caller has a part."""

    given: float  # tokens
    spent_s: float  # since the first of them
    left_s: float  # of the whole budget
    next_s: float | None
    lengths: tuple[float, ...]  # of the rest; equally likely

    def chances(self, starts_s: float, step_s: float, sigma: float) -> tuple[float, float]:
        """That further tokens keep their budget and the whole is in time; and that the whole is."""
        kept = whole = 0.0
        for length in self.lengths:
            whole_s = (self.left_s - starts_s) / length
            in_time = log_normal(whole_s, step_s, sigma)
            whole += in_time
            if self.next_s is None:
                kept += in_time
                continue
            # next · (g - 1 + r) - spent - starts, for r tokens
            each_s = (self.next_s * (self.given - 1.0 + length) - self.spent_s - starts_s) / length
            kept += in_time if each_s >= whole_s else log_normal(each_s, step_s, sigma)
        return kept / len(self.lengths), whole / len(self.lengths)


class ChanceHandovers:
    """Mutable: the purse of the hedging that it belongs to. The rest is read from the placer's own estimates."""

    def __init__(
        self, placer: UtilityPlacer, hedging: ChanceHedging, *, overloaded: Callable[[], bool] = lambda: False
    ) -> None:
        self._placer = placer
        self._hedging = hedging
        self._overloaded = overloaded

    def may_hand_over(self, share: float) -> bool:
        return self._hedging.may_hedge(share)

    def plan(
        self, ask: Ask, speaks: Candidate, resumption: Resumption, decision: Decision, now: float
    ) -> HandoverPlan | float:
        second, rest, answer = decision.chosen, decision.ask, resumption.answer
        generation, tokens = rest.generation, None if second is None else second.tokens
        if second is None or tokens is None or generation is None or speaks.tokens is None or self._overloaded():
            return now + AGAIN_S
        if second.trust < 1.0 or answer.is_paused or second.target is speaks.target:
            return now + AGAIN_S
        given = float(len(answer))
        spent_s = answer.heard_at - answer.began_at
        left = AnswerLeft(given, spent_s, rest.deadline - now, generation.next_s, generation.lengths)
        step_s = _step_here_s(speaks, now)
        if given >= _KNOWN_FROM:  # within bounds: tokens that a link held up come at once
            step_s = min(_FAR * step_s, max(step_s / _FAR, spent_s / (given - 1.0)))
        starts_s = shown_in_s(second)
        share = min(1.0, tokens.first_s / second.compute_s + starts_s / speaks.compute_s)
        first_by = None if ask.generation is None else ask.generation.first_by
        in_time = first_by is None or answer.began_at <= first_by
        gain = self._worth(second, speaks, rest, left, starts_s, tokens.step_s, in_time=in_time)
        gain -= self._worth(speaks, second, rest, left, 0.0, step_s, in_time=in_time)
        gain += self._relief(speaks, rest, generation, step_s, now) - harm_to_batch(second, generation)
        rest_of_first = speaks.cost * min(1.0, generation.mean_length * step_s / speaks.compute_s)
        gain -= self._placer.prices.whether_of(rest) * max(0.0, second.cost - rest_of_first)
        if gain - share * self._hedging.token_worth() < LEAST_GAIN:
            return now + AGAIN_S
        return self._timed(speaks, second, resumption, step_s, share, now)

    def _timed(
        self, speaks: Candidate, second: Candidate, resumption: Resumption, step_s: float, share: float, now: float
    ) -> HandoverPlan | float:
        """The handover, if it may be now without a pause that its caller would be late by."""
        assert second.tokens is not None
        needs_s = shown_in_s(second) + shown_margin_s(second)
        ratio = second.tokens.step_s / step_s if step_s > 0.0 else 1.0
        if ratio <= _CATCHES_UP and resumption.grade(speaks, second)[0] == "exact":
            return HandoverPlan(share, None, now + max(LEAST_S, 2.0 * needs_s / (1.0 - ratio)))
        answer, next_s = resumption.answer, resumption.terms.next_s
        ahead_s = 0.0 if next_s is None else answer.began_at + len(answer) * next_s - now
        room_s = max(PAUSE_S if next_s is None or step_s <= next_s else LONGEST_PAUSE_S, ahead_s)
        if needs_s <= room_s:
            return HandoverPlan(share, now + room_s, now + max(room_s, 2.0 * needs_s))
        gains_s = 0.0 if next_s is None or step_s <= 0.0 else next_s / step_s - 1.0  # a second
        if gains_s <= 0.0:
            return now + AGAIN_S
        return now + min(AGAIN_S, max(SOONEST_AGAIN_S, (needs_s - room_s) / gains_s))

    def begins(self, ask: Ask, decision: Decision, now: float) -> Candidate | None:
        generation, chosen = ask.generation, decision.chosen
        if generation is None or chosen is None or decision.reason == PROBE or self._overloaded():
            return None
        scored = [
            (one, score) for one, score in zip(decision.candidates, decision.judged, strict=False) if _is_sound(one)
        ]
        whole = next((score for one, score in scored if one.offered is chosen.offered and score is not None), None)
        if whole is None or whole.tokens is None or len(scored) < 2:
            return None
        best, most = None, whole.value + BEGINS_GAIN
        beginners = [(self._first_chance(one, score, ask, now), one) for one, score in scored]
        for chance, first in nlargest(MOST_BEGINNERS, beginners, key=lambda pair: pair[0]):
            if first.offered is chosen.offered or chance <= whole.tokens.claims.first:
                continue
            for second, _ in scored:
                if second.target is not first.target:
                    value = self._pair_value(first, chance, second, ask, generation, now)
                    if value > most:
                        best, most = first, value
        return best

    def _first_chance(self, one: Candidate, score: CandidateScore | None, ask: Ask, now: float) -> float:
        if score is not None and score.tokens is not None:
            return score.tokens.claims.first
        return self._placer.token_claims(one, ask, now).first

    def _pair_value(
        self, first: Candidate, chance: float, second: Candidate, ask: Ask, generation: GenerationAsk, now: float
    ) -> float:
        """What an answer is worth that `first` begins, and `second` is asked to go on with at its first token."""
        assert first.tokens is not None and second.tokens is not None
        begun_s, step_s = shown_in_s(first), first.tokens.step_s
        # Until then the first writes: what it has ahead of the budget has to cover what the second needs.
        ahead_s = 0.0 if generation.next_s is None else generation.next_s / step_s - 1.0  # a second
        is_slow = generation.next_s is not None and ahead_s < 0.0
        needs_s = shown_in_s(second) + shown_margin_s(second) - (LONGEST_PAUSE_S if is_slow else PAUSE_S)
        if needs_s > 0.0 and ahead_s <= 0.0:
            return -inf
        starts_s = shown_in_s(second) + (needs_s / ahead_s if needs_s > 0.0 else 0.0)
        lengths = tuple([max(1.0, length - 1.0) for length in generation.lengths])
        left = AnswerLeft(1.0, 0.0, ask.deadline - now - begun_s, generation.next_s, lengths)
        in_time = self._worth(second, first, ask, left, starts_s, second.tokens.step_s, in_time=True)
        late = self._worth(second, first, ask, left, starts_s, second.tokens.step_s, in_time=False)
        worth = chance * in_time + (1.0 - chance) * late
        used = min(1.0, (first.tokens.first_s + starts_s) / first.compute_s)  # of what all of it would take there
        cost = second.cost + used * first.cost
        share = min(1.0, used + second.tokens.first_s / second.compute_s)
        prices, budget_s = self._placer.prices, max(ask.deadline - now, 1e-6)
        ends_s = begun_s + starts_s + second.tokens.step_s * generation.mean_length
        worth -= prices.earliness * queue_position(ask).weight * ends_s / budget_s
        harm = harm_to_batch(first, generation) * used + harm_to_batch(second, generation)
        return worth - prices.whether_of(ask) * cost - harm - share * self._hedging.token_worth()

    def _worth(
        self,
        one: Candidate,
        other: Candidate,
        ask: Ask,
        left: AnswerLeft,
        starts_s: float,
        step_s: float,
        *,
        in_time: bool,
    ) -> float:
        """Of what is left, by `one`, over a path that works: of one that is silent `resumption.py` decides.

        Args:
            in_time: whether the first token was.
        """
        assert one.tokens is not None
        kept, whole = left.chances(starts_s, step_s, one.tokens.step_sigma)
        raw = TokenChances(1.0, kept / whole if whole > 0.0 else 0.0, whole)
        claims = self._placer.tokens.claims(raw, GenerationBudget(None, left.next_s, ask.deadline))
        best = max(one.offered.quality, other.offered.quality)
        return self._placer.worth_of(one, ask, best, kept=claims.all if in_time else 0.0, whole=claims.whole)

    def _relief(self, speaks: Candidate, ask: Ask, generation: GenerationAsk, step_s: float, now: float) -> float:
        """What an answer gains that waits for a slot of the target that speaks, if this one leaves it."""
        slots = speaks.variant.slots
        if not slots or sequences_at(speaks.offered, now) <= slots:
            return 0.0
        sooner_s = generation.mean_length * step_s  # by what is left of this one
        return min(1.0, sooner_s / _FIRST_S) * queue_position(ask).weight * _WAITING

    def __repr__(self) -> str:
        return f"<ChanceHandovers {self._hedging!r}>"


def _step_here_s(speaks: Candidate, now: float) -> float:
    """A step of the target that speaks, with all that are there now."""
    pace, slots = speaks.offered.cost.pace, speaks.variant.slots
    there = max(1.0, sequences_at(speaks.offered, now))
    return pace.step_s(min(there, float(slots or there)))


def _is_sound(one: Candidate) -> bool:
    """Whether it may be a part of a pair: its times are known, and its path works."""
    return one.tokens is not None and one.trust >= 1.0 and one.compute_s > 0.0
