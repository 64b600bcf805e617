"""A finished request in words and numbers: what was known of every target, what was chosen and why, what came of it.

Runs when somebody asks (`/debug/decisions`, `tidegate explain`), never per request. Times are milliseconds from the
request's arrival. Prices are those at the decision, worked back from the costs that were compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Final

from gateway.core.flown import Flown, Note
from gateway.core.offered import Offered
from gateway.core.placement import Ask, Candidate, Decision, Judged, misfit
from gateway.core.precision import stands_aside
from gateway.core.prices import METERED_BYTE, TIER
from gateway.core.promise import implied_chance, within_s
from gateway.core.request import Answer
from tidegate.pin import INSIDE

_BECAUSE: Final = {
    "cheapest": "it is the cheapest that is likely enough in time",
    "faster": "cheaper ones would be late, or too likely late",
    "surer": "a cheaper one is expected sooner, but less reliably in time",
    "better": "its quality is worth its price",
    "only": "nobody else takes this request",
    "pinned": "it is the best inside of the pin",
    "probe": "it kept failing, or was not asked for long, and this request can bear finding out",
    "least-request": "placement failed, and it is the least loaded for its speed",
    "demanded": "it is the best that has the demanded variant",
}


def wanted(flown: Iterable[Flown], request_id: str) -> list[Flown]:
    """Those of this id; "#7" or "7" is the gateway's own count."""
    number = request_id.removeprefix("#")
    return [one for one in flown if one.request_id == request_id or (number.isdecimal() and one.number == int(number))]


def explained(flown: Flown) -> dict[str, Any]:
    end = flown.end
    return {
        "number": flown.number,
        "id": flown.request_id,
        **(_asked(flown.decision) if flown.decision else {}),
        "sentence": sentence(flown),
        "events": [_event(note, flown) for note in flown.notes],
        "stages_ms": _stages(flown),
        "end": _answer(end) if isinstance(end, Answer) else {"error": end},
        "outcome": _outcome(flown),
        "elapsed_ms": _ms(flown.elapsed_s),
    }


def sentence(flown: Flown) -> str:
    """The choice and its reason."""
    decision = flown.decision
    if decision is None or decision.chosen is None:
        return f"Refused: {flown.end}" if isinstance(flown.end, str) else ""
    chosen, budget_s = decision.chosen, decision.ask.deadline - decision.at
    return (
        f"{chosen.target.id} in {chosen.variant.name}, because {_BECAUSE.get(decision.reason, decision.reason)}: "
        f"expected in {chosen.finish_s * 1e3:.1f} of {budget_s * 1e3:.0f} ms, in time with a chance of "
        f"{_chance(decision, chosen, budget_s):.1%}, at a cost of {chosen.cost:.2g}."
    )


def _asked(decision: Decision) -> dict[str, Any]:
    ask, budget_s = decision.ask, decision.ask.deadline - decision.at
    return {
        "model": ask.model,
        "version": ask.version,
        "units": ask.units,
        "rows": ask.rows,
        "longest_row": ask.longest_row,
        "priority": ask.priority,
        "demanded": ask.variant,
        "pin": ask.pin,
        "min_quality": ask.min_quality,
        "attested": ask.attested,
        "budget_ms": _ms(budget_s),
        "reason": decision.reason,
        "chosen": decision.chosen.target.id if decision.chosen else None,
        "prices": {**TIER, "metered_byte": METERED_BYTE, "scarcity": round(decision.scarcity, 4)},
        "candidates": [
            _candidate(candidate, ask, budget_s) | _judged(candidate, judged, budget_s)
            for candidate, judged in zip_longest(decision.candidates, decision.judged)
        ],
        "passed_over": _passed_over(decision),
    }


def _candidate(candidate: Candidate, ask: Ask, budget_s: float) -> dict[str, Any]:
    bytes_cost = candidate.target.byte_price * (ask.body_bytes + ask.answer_bytes)
    price = (candidate.cost - bytes_cost) / candidate.compute_s if candidate.compute_s > 0.0 else candidate.target.price
    return {
        "target": candidate.target.id,
        "variant": candidate.variant.name,
        "quality": candidate.offered.quality,
        "link_ms": _ms(candidate.link_s),
        "wait_ms": _ms(candidate.wait_s),
        "compute_ms": _ms(candidate.compute_s),
        "finish_ms": _ms(candidate.finish_s),
        "margin_ms": _ms(candidate.margin_s),
        "within_ms": _ms(within_s(candidate)),
        "price": round(price, 6),
        "cost": round(candidate.cost, 9),
        "trust": round(candidate.trust, 4),
        "in_time": candidate.finish_s + candidate.margin_s <= budget_s,
    }


def _judged(candidate: Candidate, judged: Judged | None, budget_s: float) -> dict[str, Any]:
    """The chance that was at hand: of a candidate that nobody judged, the one that its margin stands for."""
    if judged is None:
        return {"chance": round(implied_chance(candidate, budget_s), 4)}
    return {
        "chance": round(judged.chance, 4),
        "calibrated": round(judged.claimed, 4),
        "harm": round(judged.harm, 4),
        "value": round(judged.value, 4),
    }


def _chance(decision: Decision, chosen: Candidate, budget_s: float) -> float:
    for candidate, judged in zip_longest(decision.candidates, decision.judged):
        if judged is not None and candidate.offered is chosen.offered:
            return float(judged.claimed)
    return implied_chance(chosen, budget_s)


def _passed_over(decision: Decision) -> list[dict[str, str]]:
    """Offers that were no candidates, each with its reason; what no demand and no size explains were its failures."""
    ask, candidates = decision.ask, {id(one.offered) for one in decision.candidates}
    return [
        {
            "target": one.target.id,
            "variant": one.variant.name,
            "why_not": _why_not(one, ask),
        }
        for one in decision.considered
        if id(one) not in candidates
    ]


def _why_not(one: Offered, ask: Ask) -> str:
    if one.zone not in INSIDE[ask.pin]:
        return f"outside of the pin {ask.pin}, in zone {one.zone}"
    if ask.attested and (missing := one.target.attestation.misses(ask.deadline)):
        return f"not attested: {missing}"
    if why := misfit(one.variant, ask):
        return why
    if stands_aside(one.variant, ask.variant, ask.min_quality):
        return f"{one.variant.name} stands aside there just now ({one.variant.standing})"
    return "it kept failing, or was left out of the draw"


def _event(note: Note, flown: Flown) -> dict[str, Any]:
    event: dict[str, Any] = {"at_ms": _ms(note.at - flown.arrived_at), "what": note.what}
    if note.what != "look":
        event["attempt"] = note.attempt
    if note.candidate is not None:
        event |= {"target": note.candidate.target.id, "variant": note.candidate.variant.name}
        if note.attempt < len(flown.reasons):
            event["reason"] = flown.reasons[note.attempt]
    if note.confidence is not None:
        event["confidence"] = round(note.confidence, 4)
    if note.what == "accepted":
        event["promised_in_ms"] = _ms(note.seconds)
    if note.stages is not None:
        event["stages_ms"] = {name: _ms(took_s) for name, took_s in note.stages.items()} | {"link": _ms(note.seconds)}
    if note.words:
        event["error"] = note.words
    return event


def _stages(flown: Flown) -> dict[str, float]:
    """Of the attempt whose answer was given."""
    if not isinstance(flown.end, Answer):
        return {}
    for note in flown.notes:
        if note.what == "answered" and note.attempt == flown.end.attempt and note.stages is not None:
            return {name: _ms(took_s) for name, took_s in note.stages.items()} | {"link": _ms(note.seconds)}
    return {}


def _answer(end: Answer) -> dict[str, Any]:
    return {
        "served_by": end.candidate.target.id,
        "variant": end.candidate.variant.name,
        "reason": end.reason,
        "attempts": end.attempts,
        "hedged": end.hedged,
        "fallback": end.fallback,
        "degraded": end.degraded,
        "provisional": end.provisional,
    }


def _outcome(flown: Flown) -> str:
    if isinstance(flown.end, str):
        return flown.end.partition(":")[0]
    late = flown.decision is not None and flown.arrived_at + flown.elapsed_s > flown.decision.ask.deadline
    return "late" if late else "ok"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
