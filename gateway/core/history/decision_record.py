"""A decision record holds every candidate's predictions at the time, packed into a few hundred bytes.

A live decision holds candidates that hold targets with their estimators. Kept for thousands of requests that would keep
every device alive that ever left, and a garbage collector busy; so what was known is written down at the request's end
as plain numbers and as names. They are unpacked when they are read.

Of the offers that were no candidates the first few are kept with the reason, in words, as it was then. The chosen
candidate is always kept, and of the others at most `MOST_CANDIDATES`: as many as a decision looks at in a large fleet
(`gateway/core/placement/shortlist.py`).

Invariants: holds no target, no offer and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.core.estimate.conformal import NORMAL, crowding_class
from gateway.core.fleet.offer_index import Offer
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import broken_promise, variant_ineligible
from gateway.core.placement.interval import chance_within
from gateway.core.placement.placer import Candidate, CandidateScore, Decision
from gateway.core.placement.shortlist import MOST

MOST_CANDIDATES: Final = MOST
MOST_PASSED: Final = 8  # of those passed over; the others are counted
_UNJUDGED: Final = (NORMAL, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class CandidateRecord(NamedTuple):
    """One candidate: where, and what was predicted of it. Times in seconds."""

    target: str
    variant: str
    quality: float
    compute_s: float
    wait_s: float
    link_s: float
    margin_s: float
    finish_s: float  # link + wait + compute
    within_s: float  # ninety-five of a hundred are answered within
    cost: float
    price: float  # of a second of compute there
    trust: float
    chance: float  # of being in time, raw
    claimed: float  # the same, calibrated; that of the margin where there was no score
    judged: float  # 1: a policy gave it a score; 0: none did, and the three that follow are not known
    harm: float
    value: float
    rent: float
    tokens: TokenRecord | None = None  # of a generation that was judged


class TokenRecord(NamedTuple):
    """What was predicted of a generation at one candidate, in seconds, and the three chances that were claimed."""

    first_s: float  # in its slot, until the first token
    step_s: float  # for each further one
    batch: float  # sequences there, this one included
    first: float
    next: float
    whole: float


class PassedOffer(NamedTuple):
    """An offer that was no candidate."""

    target: str
    variant: str
    why_not: str


# A candidate as it is kept: target, variant, `compute_s` to `trust` as it has them, quality, and the price of a byte.
Row = tuple[str, str, float, float, float, float, float, float, float, float, float]
# What goes with one that was judged, and with the choice: the width of its 95 %, `chance` to `rent`, and 1.0 or 0.0.
Verdict = tuple[float, float, float, float, float, float, float]


class DecisionRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at: float
    ask: Ask
    reason: str
    chosen: int  # its place among the candidates; -1: none was
    rows: Sequence[Row]
    verdicts: Mapping[int, Verdict]  # by place
    passed_over: tuple[PassedOffer, ...]
    more_passed_over: int
    scarcity: float
    tokens: Mapping[int, TokenRecord] = {}  # by place: of a generation

    @property
    def budget_s(self) -> float:
        return self.ask.deadline - self.at

    @property
    def candidates(self) -> tuple[CandidateRecord, ...]:
        return tuple([self._candidate(place) for place in range(len(self.rows))])

    @property
    def choice(self) -> CandidateRecord | None:
        return None if self.chosen < 0 else self._candidate(self.chosen)

    @property
    def promised_s(self) -> float:
        """The choice's `within_s`, without unpacking the rest. There must be one."""
        _, _, _, _, _, margin_s, finish_s, *_ = self.rows[self.chosen]
        return finish_s + self.verdicts[self.chosen][0] * margin_s / NORMAL

    def compute_s_of(self, target: str, variant: str) -> float | None:
        """What was predicted of its compute; None where it was no candidate."""
        for row in self.rows:
            if row[:2] == (target, variant):
                return row[2]
        return None

    def _candidate(self, place: int) -> CandidateRecord:
        row = self.rows[place]
        target, variant, compute_s, wait_s, link_s, margin_s, finish_s, cost, trust, quality, byte_price = row
        width, chance, claimed, harm, value, rent, judged = self.verdicts.get(place, _UNJUDGED)
        if not judged:  # the chance is the one that its margin stands for
            chance = claimed = chance_within(finish_s, margin_s, self.budget_s)
        # The price as it was then, worked back from the costs that were compared.
        bytes_cost = byte_price * (self.ask.body_bytes + self.ask.answer_bytes)
        price = (cost - bytes_cost) / compute_s if compute_s > 0.0 else 0.0
        within_s = finish_s + width * margin_s / NORMAL
        return CandidateRecord(
            target=target,
            variant=variant,
            quality=quality,
            compute_s=compute_s,
            wait_s=wait_s,
            link_s=link_s,
            margin_s=margin_s,
            finish_s=finish_s,
            within_s=within_s,
            cost=cost,
            price=price,
            trust=trust,
            chance=chance,
            claimed=claimed,
            judged=judged,
            harm=harm,
            value=value,
            rent=rent,
            tokens=self.tokens.get(place),
        )


def pack_decision(decision: Decision | None) -> DecisionRecord | None:
    """The decision as it may be kept."""
    if decision is None:
        return None
    candidates, judged = _kept_candidates(decision)
    chosen, place = decision.chosen, -1
    own = None if chosen is None else chosen.offered
    rows: list[Row] = []
    verdicts: dict[int, Verdict] = {}
    tokens: dict[int, TokenRecord] = {}
    for index, one in enumerate(candidates):
        verdict = judged[index] if judged else None
        offered = one.offered
        target = offered.target
        if offered is own and chosen is not None:
            # Its own times are those at its place in the queue, and not at the queue's end.
            place, one = index, chosen  # noqa: PLW2901
        # For every candidate of every request, so a slice.
        rows.append((target.spec.id, offered.variant.name, *one[1:8], offered.quality, target.byte_price))
        if verdict is not None or offered is own:
            width = target.interval_width.widths[crowding_class(one.ahead_s, one.compute_s)]
            verdicts[index] = (width, *(_UNJUDGED[1:] if verdict is None else (*verdict[:5], 1.0)))
        if one.tokens is not None and verdict is not None and verdict.tokens is not None:
            predicted = one.tokens
            tokens[index] = TokenRecord(predicted.first_s, predicted.step_s, predicted.batch, *verdict.tokens.claims)
    passed, more = _passed_over(decision)
    return DecisionRecord(
        at=decision.at,
        ask=_kept_ask(decision.ask),
        reason=decision.reason,
        chosen=place,
        rows=rows,
        verdicts=verdicts,
        passed_over=passed,
        more_passed_over=more,
        scarcity=decision.scarcity,
        tokens=tokens,
    )


def _kept_ask(ask: Ask) -> Ask:
    """The ask without what its prompt was known by."""
    if ask.generation is None or not ask.generation.prefix:
        return ask
    return ask._replace(generation=ask.generation._replace(prefix=()))


def _kept_candidates(decision: Decision) -> tuple[Sequence[Candidate], Sequence[CandidateScore | None]]:
    """At most so many of the candidates, with what was found of each; the judged first, the chosen one always."""
    candidates, judged = decision.candidates, decision.judged
    if len(candidates) <= MOST_CANDIDATES:
        return candidates, judged
    places = [place for place, one in enumerate(judged) if one is not None][:MOST_CANDIDATES]
    places = places or list(range(MOST_CANDIDATES))
    chosen = decision.chosen
    if chosen is not None:
        own = [place for place, one in enumerate(candidates) if one.offered is chosen.offered]
        places = sorted({*places[: MOST_CANDIDATES - 1], *own})
    return [candidates[place] for place in places], [judged[place] for place in places] if judged else ()


def _passed_over(decision: Decision) -> tuple[tuple[PassedOffer, ...], int]:
    """Offers that were no candidates, each with its reason; what no demand and no size explains were its failures."""
    if not decision.considered:
        return (), 0
    ask, candidates = decision.ask, {id(one.offered) for one in decision.candidates}
    others = [one for one in decision.considered if id(one) not in candidates]
    named = [PassedOffer(one.target.id, one.variant.name, _why_not(one, ask)) for one in others[:MOST_PASSED]]
    return tuple(named), len(others) - len(named)


def _why_not(one: Offer, ask: Ask) -> str:
    """The rule that left the offer out. The target's own state is not looked at: it may have changed since."""
    excluded = broken_promise(one.target, ask) or variant_ineligible(one.variant, ask)
    return "it kept failing, or was left out of the draw" if excluded is None else excluded.why
