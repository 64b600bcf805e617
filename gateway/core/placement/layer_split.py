"""A model that is cut between layers has one more candidate, weighed by the link: head on an edge, tail in a pool.

For each cut of the model, and each pair of an edge for the head and a pool for the tail:

    finish = head there + (activations + what was asked for) on the wire + tail there
    margin = √(margin of the head² + margin of the tail²)                           both ends as independent

Either end is predicted by the function that predicts whole attempts (`placer.estimate`), so that the present round trip
and bandwidth of each link, the queue at each end and the tables measured there are all in it. A thin link makes the
whole in the pool late by the bytes of its input, and a cut by those of its activations; a slow edge makes the whole
there late by all layers, and a cut by those of its head only. So the best cut moves with the link.

The pair is compared with the whole as placement would place it, in the same currency (`utility.py`, with a chance from
the normal distribution that finish and margin stand for, and the rents and costs of both ends). Whether to cut is a
question like whether to make a second attempt, so costs weigh as they do there: what only chooses among targets, to
keep a bill small, is left out. The cut must be worth `GAIN` more: two attempts can fail in more ways than one, which no
term of the value has, and a few milliseconds of the pool's time are no reason to cut.

`edge-input` keeps the input itself on edges: the whole may be computed there only, and the tail anywhere, except that a
tail which takes inputs of the whole beside the activations takes masks at most. A pin to the edge, and a demanded
variant, leave nothing to cut.

The link is not taken from the candidate's own prediction. That is right for one more request of the usual size; but
where whole inputs have filled a thin link it says that everything is late there, and cuts, which would empty it, were
never made. So the time on the wire of whole and cut alike is

    calm round trip + (our bytes that are still ahead + its own bytes) · the link's pace        `WireCapacity`

and a link's jitter counts as far as bytes that are ahead do not explain it. On a link with a queue each body has a
rent, as each second of a device's queue has: what is behind it waits as much longer,

    rent = 3 · weight · min(1, bytes ahead · pace / budget) · (own bytes · pace / budget)

so that where nothing can be in time any more, what clears the link is preferred to what fills it.

Pure: nothing is sent. What is decided is carried out by `gateway/serving/split_execution.py`.
It can be wrong where an end's queue changes while the other one computes: the tail is placed anew when its activations
are there, and this choice only says that it is worth cutting. A link's bandwidth is known once a body of 32 KiB has
crossed it (`link_estimate.py`); before that every link is taken as wide, and the whole in the pool is tried.
Source: Kang et al., "Neurosurgeon: Collaborative Intelligence Between the Cloud and Mobile Edge", ASPLOS 2017, section
5 (choose the cut by predicted latency of layers and the present bandwidth); Hu et al., DADS, INFOCOM 2019 (load as well
as bandwidth); Laskaridis et al., SPINN, MobiCom 2020 (the choice at run time, by what was observed).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, sqrt
from typing import Final, NamedTuple

from gateway.core.estimate.conformal import NORMAL
from gateway.core.fleet.target import TargetView
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import ineligible
from gateway.core.placement.placer import Candidate, Placer, predicted
from gateway.core.placement.utility import UtilityPlacer, UtilityWeights, queue_position, shadow_cost

GAIN: Final = 0.05  # of an ordinary answer in time: what a cut has to be worth more than the whole
_ENDS: Final = 3  # edges and pools that are paired for each cut: the soonest ones
_LEAST_SPREAD_S: Final = 1e-4
_LINK_RENT: Final = 3.0  # requests behind a body on a link with a queue, about
_PACE_SPREAD: Final = 0.1  # of the time on the wire: how far the pace of a link is off


class CutTerms(NamedTuple):
    """One cut of the request's model, as far as placement needs to know it."""

    layer: str
    head: str  # models
    tail: str
    tail_units: float  # of work, in the tail's own unit
    between_bytes: int  # of activations, from head to tail
    keeps_input: bool  # whether nothing of the input but masks gets past it


class SplitOption(NamedTuple):
    """A cut with the best pair of ends for it now, and what it is expected to bring. Times in seconds."""

    cut: CutTerms
    head: Candidate
    tail: Candidate
    finish_s: float
    margin_s: float
    chance: float
    value: float


class SplitDecision(NamedTuple):
    """What was weighed. `chosen` None: the whole is the better one."""

    at: float
    chosen: SplitOption | None
    options: tuple[SplitOption, ...]  # the best pair of each cut that can be made now
    whole: Candidate | None  # where placement would have the whole computed; None: nowhere
    whole_value: float

    @property
    def best(self) -> SplitOption | None:
        return max(self.options, key=lambda one: one.value, default=None)


def choose_split(placer: Placer, ask: Ask, cuts: Sequence[CutTerms], now: float) -> SplitDecision:
    """Whether the request is better cut now, and where.

    Args:
        ask: of the whole model.
    """
    value = _SplitValue(placer, ask, now)
    whole = placer.decide(ask, now).chosen
    quality = 1.0 if whole is None else whole.offered.quality
    pairs = (_best_pair(placer, ask, cut, value, quality) for cut in cuts if is_allowed(cut, ask))
    options = tuple(one for one in pairs if one is not None)
    whole_value = 0.0 if whole is None else value.of_whole(whole)
    best = max(options, key=lambda one: one.value, default=None)
    gain = GAIN * value.weight
    chosen = best if best is not None and best.value > whole_value + gain else None
    return SplitDecision(now, chosen, options, whole, whole_value)


def is_allowed(cut: CutTerms, ask: Ask) -> bool:
    """Whether what the caller demands of the whole can be kept by this cut."""
    if ask.variant or ask.generation is not None or ask.pin == "edge":
        return False
    return ask.pin != "edge-input" or cut.keeps_input


def head_ask(cut: CutTerms, ask: Ask) -> Ask:
    """The head as placement sees it: the whole's work, on an edge."""
    return ask._replace(model=cut.head, pin="edge", answer_bytes=cut.between_bytes, escalates=False)


def tail_ask(cut: CutTerms, ask: Ask) -> Ask:
    """The tail as placement sees it: the activations, as far as the whole may go."""
    return ask._replace(
        model=cut.tail,
        pin="any" if ask.pin == "edge-input" else ask.pin,
        units=cut.tail_units,
        body_bytes=cut.between_bytes,
        escalates=False,
    )


def head_deadline(option: SplitOption, ask: Ask, now: float) -> float:
    """By when the head has to be done: the tail's time is left, and the head has what it is expected to need."""
    needed_s = option.head.finish_s + option.head.margin_s
    return min(ask.deadline, max(ask.deadline - option.tail.finish_s, now + needed_s))


def insure_at(placer: Placer, ask: Ask, expected_by: float, now: float) -> float | None:
    """The last instant at which an edge is expected to make the whole; None: none is, or the tail is due later.

    Expected and not sure: where an edge were sure to make the whole it would not have been cut.

    Args:
        ask: of the whole model.
        expected_by: when the tail's answer is here, at the latest that is expected.
    """
    edges = placer.candidates(ask._replace(pin="edge"), now)
    if not edges:
        return None
    last = ask.deadline - min(one.finish_s for one in edges)
    return last if last >= expected_by else None


def _best_pair(placer: Placer, ask: Ask, cut: CutTerms, value: _SplitValue, quality: float) -> SplitOption | None:
    """The pair of ends that is worth most. Args: quality: of the whole, as it would be computed."""
    heads = _soonest(placer.candidates(head_ask(cut, ask), value.now))
    tails = _soonest(_tails(placer, tail_ask(cut, ask), value.now)) if heads else ()
    best: SplitOption | None = None
    for head in heads:
        # The prediction of an attempt has the way of its body in it; here the answer is the larger of the two.
        back_s = cut.between_bytes * head.target.link.s_per_byte
        for tail in tails:
            option = value.of_pair(cut, head, tail, back_s, quality)
            if best is None or option.value > best.value:
                best = option
    return best


def _tails(placer: Placer, ask: Ask, now: float) -> Sequence[Candidate]:
    """The pools for a tail; where all are out, those whose probe is due, which a tail then is (`probing.py`).

    A pool that was lost under whole inputs is else never asked again where edges take all that comes, in time or not.
    """
    found = placer.candidates(ask, now)
    if found:
        return found
    due = placer.fleet.offers(ask.model, ask.version).all.items
    usable = TargetView.allows
    return [
        predicted(one, ask, now) for one in due if ineligible(one.target, one.variant, ask, now, usable=usable) is None
    ]


def _soonest(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    return sorted(candidates, key=lambda one: (-one.trust, one.finish_s + one.margin_s))[:_ENDS]


def _on_the_wire(one: Candidate, body_bytes: int, now: float) -> tuple[float, float]:
    """(finish, margin) of a candidate, with the time on the wire by the link's pace."""
    link = one.offered.target.link
    wire = link.wire
    if not wire.s_per_byte:
        return one.finish_s, one.margin_s
    wire_s = (wire.ahead_bytes(now) + body_bytes) * wire.s_per_byte
    calm_s = link.calm_s
    explained_s = min(link.jitter_s, wire_s)
    variance = (one.margin_s / NORMAL) ** 2 - link.jitter_s**2 + (link.jitter_s - explained_s) ** 2
    spread_s = sqrt(max(variance, 0.0) + (_PACE_SPREAD * wire_s) ** 2)
    return one.wait_s + one.compute_s + calm_s + wire_s, NORMAL * spread_s


def _trust(one: Candidate, now: float) -> float:
    """That the path works now. While a large body is on its way no ack is due, and a silence is no sign of trouble."""
    target = one.offered.target
    link = target.link
    if one.trust == 1.0 or target.ejected or target.refusals or link.silent_since is None:
        return one.trust
    overdue_s = now - max(link.silent_since, link.wire.through_at())
    return link.answers_after(overdue_s, now) if link.acknowledges else one.trust


class _SplitValue:
    """The currency of `utility.py` for one request, applied to wholes and to pairs alike."""

    def __init__(self, placer: Placer, ask: Ask, now: float) -> None:
        self.now = now
        self.weight = queue_position(ask).weight
        self._prices = placer.prices if isinstance(placer, UtilityPlacer) else UtilityWeights()
        self._whether = self._prices.whether_of(ask)
        self._budget_s = max(ask.deadline - now, 1e-6)
        self._body_bytes = ask.body_bytes

    def of_whole(self, one: Candidate) -> float:
        finish_s, margin_s = _on_the_wire(one, self._body_bytes, self.now)
        chance = self._chance(finish_s, margin_s, _trust(one, self.now))
        rent = shadow_cost(one, self.now) + self._link_rent(one, self._body_bytes)
        return self._value(chance, finish_s, one.cost, 1.0) - rent

    def of_pair(
        self, cut: CutTerms, head: Candidate, tail: Candidate, back_s: float, whole_quality: float
    ) -> SplitOption:
        first_s, first_margin_s = _on_the_wire(head, self._body_bytes, self.now)
        # While the head is computed the link goes on with what is ahead.
        last_s, last_margin_s = _on_the_wire(tail, cut.between_bytes, self.now + first_s)
        finish_s = first_s + back_s + last_s
        margin_s = sqrt(first_margin_s * first_margin_s + last_margin_s * last_margin_s)
        chance = self._chance(finish_s, margin_s, _trust(head, self.now) * _trust(tail, self.now))
        # Better than the whole's counts as much as worse: an edge's int8 beside a pool's layers.
        value = self._value(chance, finish_s, head.cost + tail.cost, head.offered.quality / whole_quality)
        value -= shadow_cost(head, self.now) + self._link_rent(head, self._body_bytes)
        value -= shadow_cost(tail, self.now) + self._link_rent(tail, cut.between_bytes)
        return SplitOption(cut, head, tail, finish_s=finish_s, margin_s=margin_s, chance=chance, value=value)

    def _link_rent(self, one: Candidate, body_bytes: int) -> float:
        wire = one.offered.target.link.wire
        queue = min(1.0, wire.ahead_bytes(self.now) * wire.s_per_byte / self._budget_s)
        return _LINK_RENT * self.weight * queue * body_bytes * wire.s_per_byte / self._budget_s

    def _chance(self, finish_s: float, margin_s: float, trust: float) -> float:
        spread_s = max(margin_s / NORMAL, _LEAST_SPREAD_S)
        return trust * 0.5 * (1.0 + erf((self._budget_s - finish_s) / (spread_s * sqrt(2.0))))

    def _value(self, chance: float, finish_s: float, cost: float, quality: float) -> float:
        worth = 1.0 - self._prices.quality * (1.0 - quality)
        earliness = self._prices.earliness * finish_s / self._budget_s
        return self.weight * (worth * chance - earliness) - self._whether * cost
