"""The explanation of a finished request as JSON: every candidate, the choice with its reason, and the outcome.

It is made on demand (`/debug/decisions`, `tidegate explain`), never per request. Times are milliseconds from the
request's arrival. All of it was recorded at the request's end (`gateway/core/history/decision_record.py`) and nothing
is the present state; hindsight compares requests of about that time (`gateway/core/history/counterfactual.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Final

from gateway.core.fleet.pricing import METERED_BYTE, TIER
from gateway.core.history.counterfactual import Alternative, Counterfactual, counterfactual_of
from gateway.core.history.decision_record import CandidateRecord, DecisionRecord, TokenRecord
from gateway.core.history.recorder import AnswerRecord, RequestEvent, RequestRecord
from gateway.core.history.waterfall import AttemptBar, WaterfallStage, waterfall
from tidegate.generate.budgets_kept import each_token_s
from tidegate.types import Resumed, Route, SplitNote

_BECAUSE: Final = {
    "cheapest": "it is the cheapest that is likely enough in time",
    "faster": "cheaper ones would be late, or too likely late",
    "surer": "a cheaper one is expected sooner, but less reliably in time",
    "better": "its quality is worth its price",
    "only": "no other target takes this request",
    "pinned": "it is the best inside of the pin",
    "probe": "it kept failing, or was not asked for long, and this request can bear finding out",
    "least-request": "placement failed, and it is the least loaded for its speed",
    "demanded": "it is the best that has the demanded variant",
}


def matching_records(record: Iterable[RequestRecord], request_id: str, run: str = "") -> list[RequestRecord]:
    """Return the records of an id: the caller's, the answer's, a trace-id, or this gateway's number ("#7")."""
    number = request_id.removeprefix("#")
    if run and request_id.startswith(f"{run}-"):
        number = request_id[len(run) + 1 :]
    trace_id = request_id.lower()
    return [
        one
        for one in record
        if one.request_id == request_id
        or (number.isdecimal() and one.number == int(number))
        or (one.trace_id and one.trace_id == trace_id)
    ]


def explanation_json(
    record: RequestRecord, others: Sequence[RequestRecord] | None = None, run: str = ""
) -> dict[str, Any]:
    """Return a record as JSON.

    Args:
        others: the records to compare with; None: without hindsight.
    """
    end, falls = record.end, waterfall(record)
    return {
        "number": record.number,
        "id": record.request_id,
        "answered_as": f"{run}-{record.number}" if run else "",
        "trace_id": record.trace_id,
        "protocol": record.protocol,
        "model": record.model,
        "tenant": record.tenant,
        **({"asked_by": record.asker} if record.asker else {}),
        **(_demands_json(record.decision) if record.decision else {}),
        "sentence": choice_sentence(record),
        **({} if record.half is None else {"split": _split(record.half)}),
        "events": [_event(note, record) for note in record.notes],
        "stages_ms": _stages(record),
        "waterfall": {
            "path": [_stage(stage) for stage in falls.path],
            "unaccounted_ms": _ms(falls.unaccounted_s),
            "attempts": [_bar(bar) for bar in falls.bars],
        },
        **({} if others is None else {"hindsight": _hindsight(counterfactual_of(record, others), record)}),
        "end": _answer(end.route) if isinstance(end, AnswerRecord) else {"error": end},
        **({} if (usage := _usage(record)) is None else {"tokens": usage}),
        **({"wasted_tokens": record.wasted_tokens} if record.wasted_tokens else {}),
        **({} if (budgets := _budgets(record)) is None else {"budgets": budgets}),
        "outcome": record.outcome,
        "ended": record.ended,
        "tried": list(record.tried()),
        "late": record.late,
        "elapsed_ms": _ms(record.elapsed_s),
    }


def _split(half: SplitNote) -> dict[str, str]:
    return {"of": half.of, "role": half.role, "layer": half.layer, "why": half.why}


def _usage(record: RequestRecord) -> dict[str, Any] | None:
    """What a generation took; None of any other request."""
    usage = None if record.answer is None else record.answer.usage
    if usage is None:
        return None
    return {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "completion": usage.completion_tokens,
        "finish_reason": usage.finish_reason,
        "prefill_ms": _ms(usage.prefill_s),
        "decode_ms": _ms(usage.decode_s),
    }


def _budgets(record: RequestRecord) -> dict[str, Any] | None:
    """The three budgets of a generation, and what came; None of any other request."""
    generation = None if record.decision is None else record.decision.ask.generation
    if generation is None:
        return None
    answer = record.answer
    begun_at = next((note.at for note in record.notes if note.what == "begun"), None)
    first_s = None if begun_at is None else begun_at - record.arrived_at
    made = 0 if answer is None or answer.usage is None else answer.usage.completion_tokens
    each_s = None if first_s is None else each_token_s(first_s, record.elapsed_s, made)
    first_by, whole_by = generation.first_by, record.deadline
    return {
        "first_ms": None if first_by is None else _ms(first_by - record.arrived_at),
        "next_ms": None if generation.next_s is None else _ms(generation.next_s),
        "whole_ms": None if whole_by is None else _ms(whole_by - record.arrived_at),
        "first_token_ms": None if first_s is None else _ms(first_s),
        "each_token_ms": None if each_s is None else _ms(each_s),
        "expected_tokens": round(generation.mean_length, 1),
        "most_tokens": generation.max_tokens,
    }


def choice_sentence(record: RequestRecord) -> str:
    """Return the choice and its reason as one sentence."""
    decision = record.decision
    chosen = decision.choice if decision else None
    if decision is None or chosen is None:
        if not isinstance(record.end, str):
            return ""
        return f"{record.ended.capitalize()}: {record.end.removeprefix('cancelled: ')}"
    return (
        f"{chosen.target} in {chosen.variant}, because {_BECAUSE.get(decision.reason, decision.reason)}: "
        f"expected in {chosen.finish_s * 1e3:.1f} of {decision.budget_s * 1e3:.0f} ms, in time with a chance of "
        f"{chosen.claimed:.1%}, at a cost of {chosen.cost:.2g}.{_token_words(chosen)}"
    )


def _token_words(chosen: CandidateRecord) -> str:
    tokens = chosen.tokens
    if tokens is None:
        return ""
    return (
        f" Of its budgets: the first token with {tokens.first:.1%}, each further one, of {tokens.step_s * 1e3:.1f} ms, "
        f"with {tokens.next:.1%}, the whole with {tokens.whole:.1%}."
    )


def _demands_json(decision: DecisionRecord) -> dict[str, Any]:
    ask, chosen = decision.ask, decision.choice
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
        "budget_ms": _ms(decision.budget_s),
        "reason": decision.reason,
        "chosen": chosen.target if chosen else None,
        "prices": {**TIER, "metered_byte": METERED_BYTE, "scarcity": round(decision.scarcity, 4)},
        "candidates": [_candidate(one, decision.budget_s) for one in decision.candidates],
        "passed_over": [one._asdict() for one in decision.passed_over],
        "more_passed_over": decision.more_passed_over,
    }


def _candidate(one: CandidateRecord, budget_s: float) -> dict[str, Any]:
    judged = {"calibrated": round(one.claimed, 4), "harm": round(one.harm, 4), "value": round(one.value, 4)}
    return {
        "target": one.target,
        "variant": one.variant,
        "quality": one.quality,
        "link_ms": _ms(one.link_s),
        "wait_ms": _ms(one.wait_s),
        "compute_ms": _ms(one.compute_s),
        "finish_ms": _ms(one.finish_s),
        "margin_ms": _ms(one.margin_s),
        "within_ms": _ms(one.within_s),
        "price": round(one.price, 6),
        "cost": round(one.cost, 9),
        "trust": round(one.trust, 4),
        "in_time": one.finish_s + one.margin_s <= budget_s,
        "chance": round(one.chance, 4),
        **(judged if one.judged else {}),
        **({} if one.tokens is None else {"tokens": _token_chances(one.tokens)}),
    }


def _token_chances(one: TokenRecord) -> dict[str, float]:
    return {
        "first_ms": _ms(one.first_s),
        "step_ms": _ms(one.step_s),
        "batch": round(one.batch, 1),
        "first": round(one.first, 4),
        "next": round(one.next, 4),
        "whole": round(one.whole, 4),
    }


def _event(note: RequestEvent, record: RequestRecord) -> dict[str, Any]:
    event: dict[str, Any] = {"at_ms": _ms(note.at - record.arrived_at), "what": note.what}
    if note.what != "look":
        event["attempt"] = note.attempt
    if note.what == "launched":
        event |= {"target": note.target, "variant": note.variant, "predicted_ms": _ms(note.seconds)}
        if note.attempt < len(record.reasons):
            event["reason"] = record.reasons[note.attempt]
    if note.confidence is not None:
        event["confidence"] = round(note.confidence, 4)
    if note.what == "accepted":
        event["promised_in_ms"] = _ms(note.seconds)
    if note.what == "lent":
        event["age_ms"] = _ms(note.seconds)
    if note.stages is not None:
        event["stages_ms"] = _stage_times(note)
    if note.words:
        event["error"] = note.words
    return event


def _stages(record: RequestRecord) -> dict[str, float]:
    """Return the stage times of the attempt that answered the caller."""
    if not isinstance(record.end, AnswerRecord):
        return {}
    for note in record.notes:
        if note.what == "answered" and note.attempt == record.end.attempt and note.stages is not None:
            return _stage_times(note)
    return {}


def _stage_times(note: RequestEvent) -> dict[str, float]:
    return {name: _ms(took_s) for name, took_s in (note.stages or {}).items()} | {"link": _ms(note.seconds)}


def _stage(stage: WaterfallStage) -> dict[str, Any]:
    rendered = {"stage": stage.name, "start_ms": _ms(stage.start_s), "took_ms": _ms(stage.took_s)}
    return rendered | ({"words": stage.words} if stage.words else {})


def _bar(bar: AttemptBar) -> dict[str, Any]:
    return {
        "attempt": bar.attempt,
        "target": bar.target,
        "variant": bar.variant,
        "reason": bar.why,
        "start_ms": _ms(bar.start_s),
        "took_ms": _ms(bar.took_s),
        "predicted_ms": _ms(bar.predicted_s),
        "end": bar.end,
        "error": bar.words,
        "stages": [_stage(stage) for stage in bar.stages],
    }


def _hindsight(found: Counterfactual, record: RequestRecord) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "sentence": _in_hindsight(found, record),
        "better": found.better.target if found.better else None,
        "alternatives": [_alternative(one) for one in found.alternatives],
    }


def _alternative(one: Alternative) -> dict[str, Any]:
    takes_ms = None if one.takes_s is None or not isfinite(one.takes_s) else _ms(one.takes_s)
    return {
        "target": one.target,
        "variant": one.variant,
        "cost": round(one.cost, 9),
        "claimed": round(one.claimed, 4),
        "chance": None if one.chance is None else round(one.chance, 4),
        "takes_ms": takes_ms,
        "samples": one.samples,
        "weight": round(one.weight, 2),
        "says": one.says,
    }


def _in_hindsight(found: Counterfactual, record: RequestRecord) -> str:
    better = found.better
    if better is not None:
        took = "" if better.takes_s is None else f" in about {better.takes_s * 1e3:.0f} ms"
        odds = f"{better.chance or 0.0:.0%} of what {better.samples} others met there at about that time"
        price = f"at a cost of {better.cost:.2g}" + ("" if record.missed else " instead")
        return f"{better.target} in {better.variant} would have answered{took}, in time by {odds}, {price}."
    match found.verdict:
        case "best":
            unknown = [one.target for one in found.alternatives if one.says == "unknown"]
            doubt = f"; of {_some(unknown)} it cannot be known, no request was sent there then" if unknown else ""
            return f"No target that is known of would have been in time for less{doubt}."
        case "none":
            late = [one.target for one in found.alternatives if one.says in ("late", "open")]
            tried = f": {_some(late)} would have been late, or might have" if late else ": there was no other target"
            return f"No target that is known of would have been in time{tried}."
        case "unknown":
            return (
                "It cannot be known whether another would have been in time: "
                "no request was sent to one at about that time."
            )
    return "It was never placed, so there is nothing to compare."


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _answer(route: Route) -> dict[str, Any]:
    resumed = {"resumed": [_resumed(one) for one in route.resumed]} if route.resumed else {}
    head = route.head
    cut = {} if head is None else {"head": {"served_by": head.served_by, "variant": head.variant, "layer": head.layer}}
    return {
        **resumed,
        **cut,
        "served_by": route.served_by,
        "variant": route.variant,
        "reason": route.reason,
        "attempts": route.attempts,
        "hedged": route.hedged,
        "fallback": route.fallback,
        "degraded": route.degraded,
        "provisional": route.provisional,
    }


def _resumed(one: Resumed) -> dict[str, Any]:
    return {
        "from": one.lost,
        "to": one.by,
        "at": one.at,
        "gap_ms": _ms(one.gap_s),
        "grade": one.grade,
        "reason": one.why,
        "because": one.because,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
