"""A counterfactual is what another target would have done with a finished request, as far as that can be known.

A request tells only of where it went. But others went elsewhere at about the same time, and their answers say how long
one really queued there and how long the link really took. Each of those is a sample of what this request would have
met: its own compute there (as predicted, times how much longer than predicted others' computing took), behind the
queue and over the link that the other one met.

    would have taken = link of the other + queue of the other + predicted compute · (others' compute ÷ predicted)

Samples count the less, the further away in time they were launched (halved every `_HALF_S`, none beyond `_WITHIN_S`),
and the share of their weight that is in time is the chance that we would give now. An attempt that failed there
is a sample that never arrives; one that was given up says only that it would have taken longer than that.

What was before the decision says nothing of a path that had just fallen silent by then (its `trust` was low): of such a
candidate only attempts count that were sent there from then on.

Two doubts stay, and are reported: with little weight nothing is known (`unknown`), and a sample's queue was that of
another deadline (earliest first), so that a chance between `_UNLIKELY` and `_LIKELY` is called open and not counted as
better. Nor is it known what the request itself would have done to requests behind it there.

Better means: in time where it was not, or in time for less than it cost. `cost` is what the decision compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from statistics import median
from typing import Final, Literal, NamedTuple

from gateway.core.history.decision_record import CandidateRecord, DecisionRecord
from gateway.core.history.recorder import RequestEvent, RequestRecord

_WITHIN_S: Final = 5.0
_HALF_S: Final = 0.5
_ENOUGH: Final = 1.0  # of weight: as good as one attempt at the very same instant, or two half a second off
_LIKELY: Final = 0.8
_UNLIKELY: Final = 0.2
_TRUSTED: Final = 0.5
_CHEAPER: Final = 0.9  # of the cost: less is no difference

Chance = Literal["in time", "late", "open", "unknown"]
Verdict = Literal["best", "better", "none", "unknown", "unplaced"]


class Alternative(NamedTuple):
    """One candidate as it looks afterwards."""

    target: str
    variant: str
    cost: float
    claimed: float  # the chance that was seen at the decision
    chance: float | None  # the one that others' answers make of it; None where nothing is known
    takes_s: float | None  # the median of what it would have taken
    weight: float  # of the evidence: one attempt at the same instant is 1
    samples: int
    says: Chance


class Counterfactual(NamedTuple):
    """
    best      none that is known of would have been in time for less
    better    `better` would have been
    none      it missed, and so would it have elsewhere, as far as is known
    unknown   it missed, and nothing is known of other targets
    unplaced  it was refused before any target was looked at
    """

    verdict: Verdict
    better: Alternative | None
    alternatives: tuple[Alternative, ...]


class _NearbySample(NamedTuple):
    after_s: float  # launched so long after the decision; negative: before it
    wait_s: float  # queue and link together; inf: no answer came
    ratio: float | None  # of compute to what was predicted
    weight: float
    at_least_s: float | None = None  # it was given up after so long, and not answered by then


def counterfactual_of(record: RequestRecord, others: Iterable[RequestRecord]) -> Counterfactual:
    """Args: others: requests that were served at about the time, this one among them or not."""
    decision = record.decision
    if decision is None or not decision.rows:
        return Counterfactual("unplaced", None, ())
    tried = set(record.tried())
    near = _experiences_near(record.number, decision.at, others)
    alternatives = tuple([_alternative(one, near, decision) for one in decision.candidates if one.target not in tried])
    in_time = record.answer is not None and not record.late
    below = _CHEAPER * _paid(record, decision) if in_time else inf
    known = [one for one in alternatives if one.says == "in time" and one.cost < below]
    if known:
        return Counterfactual("better", min(known, key=lambda one: (one.cost, -(one.chance or 0.0))), alternatives)
    if in_time:
        return Counterfactual("best", None, alternatives)
    is_known = any(one.says != "unknown" for one in alternatives)
    return Counterfactual("none" if is_known or not alternatives else "unknown", None, alternatives)


def _paid(record: RequestRecord, decision: DecisionRecord) -> float:
    """What all of its attempts cost, as far as they were candidates at the decision."""
    costs = {(one.target, one.variant): one.cost for one in decision.candidates}
    return sum([costs.get((note.target, note.variant), 0.0) for note in record.notes if note.what == "launched"])


def _alternative(one: CandidateRecord, near: dict[str, list[_NearbySample]], decision: DecisionRecord) -> Alternative:
    samples = near.get(one.target, [])
    if one.trust < _TRUSTED:
        samples = [sample for sample in samples if sample.after_s >= 0.0]
    ratios = [sample.ratio for sample in samples if sample.ratio is not None]
    compute_s = one.compute_s * (median(ratios) if ratios else 1.0)
    takes = [(sample.wait_s + compute_s, sample.weight) for sample in samples if sample.at_least_s is None]
    takes += [
        (inf, sample.weight)
        for sample in samples
        if sample.at_least_s is not None and sample.at_least_s >= decision.budget_s
    ]
    weight = sum([heft for _, heft in takes])
    if weight < _ENOUGH:
        return Alternative(
            target=one.target,
            variant=one.variant,
            cost=one.cost,
            claimed=one.claimed,
            chance=None,
            takes_s=None,
            weight=weight,
            samples=len(takes),
            says="unknown",
        )
    chance = sum([heft for takes_s, heft in takes if takes_s <= decision.budget_s]) / weight
    says: Chance = "in time" if chance >= _LIKELY else "late" if chance <= _UNLIKELY else "open"
    middle_s = median([takes_s for takes_s, _ in takes])
    return Alternative(
        target=one.target,
        variant=one.variant,
        cost=one.cost,
        claimed=one.claimed,
        chance=chance,
        takes_s=middle_s,
        weight=weight,
        samples=len(takes),
        says=says,
    )


def _experiences_near(own: int, at: float, others: Iterable[RequestRecord]) -> dict[str, list[_NearbySample]]:
    """By target: what others met there."""
    found: dict[str, list[_NearbySample]] = {}
    for other in others:
        if other.number == own or not at - _WITHIN_S <= other.ended_at or other.arrived_at > at + _WITHIN_S:
            continue
        for target, sample in _experience_at(other, at):
            found.setdefault(target, []).append(sample)
    return found


def _experience_at(other: RequestRecord, at: float) -> Iterator[tuple[str, _NearbySample]]:
    for launched in other.notes:
        after_s = launched.at - at
        if launched.what == "launched" and abs(after_s) <= _WITHIN_S:
            sample = _sample(other, launched, after_s, 0.5 ** (abs(after_s) / _HALF_S))
            if sample is not None:
                yield launched.target, sample


def _sample(other: RequestRecord, launched: RequestEvent, after_s: float, weight: float) -> _NearbySample | None:
    end = next((note for note in other.notes if note.attempt == launched.attempt and note.what in _ENDS), None)
    if end is None:
        return None
    if end.what == "failed" and not end.words.startswith("deadline_exceeded"):
        return None if end.words.startswith(_OWN_FAULTS) else _NearbySample(after_s, inf, None, weight)
    if end.what != "answered":  # given up, by us or for want of time: longer than that it would have taken
        return _NearbySample(after_s, inf, None, weight, at_least_s=end.at - launched.at)
    stages = end.stages or {}
    compute_s = stages.get("compute")
    if compute_s is None:
        return None  # of a total alone it is not known how much was the other's own work
    return _NearbySample(after_s, end.seconds + stages.get("queue", 0.0), _ratio(other, launched, compute_s), weight)


_ENDS: Final = ("answered", "failed", "cancelled")
_OWN_FAULTS: Final = ("invalid_request", "too_large", "not_supported", "model_not_found")  # nothing of the target


def _ratio(other: RequestRecord, launched: RequestEvent, compute_s: float) -> float | None:
    predicted_s = other.decision.compute_s_of(launched.target, launched.variant) if other.decision else None
    return compute_s / predicted_s if predicted_s else None
