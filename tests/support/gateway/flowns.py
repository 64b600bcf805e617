"""Finished requests for tests of their records: one that went well, and others as a test describes them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gateway.core.history.decision_record import pack_decision
from gateway.core.history.recorder import AnswerRecord, RequestEvent, RequestRecord
from gateway.core.placement.placer import Placer
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tidegate.types import Route

STAGES = {"queue": 0.020, "compute": 0.030}


def given(served_by: str = "edge/a", attempt: int = 0, **more: Any) -> AnswerRecord:
    usage = more.pop("usage", None)
    return AnswerRecord(attempt, Route(served_by, "cheapest", "fp32", attempts=attempt + 1, **more), usage)


def went(attempt: int, target: str, at: float, *, acked_s: float | None = 0.004, **end: Any) -> list[RequestEvent]:
    """An attempt's notes: launched at NOW + at, acknowledged after `acked_s`, and ended as `end` says."""
    notes = [RequestEvent(NOW + at, "launched", attempt, target, "fp32", 0.05)]
    if acked_s is not None:
        notes.append(RequestEvent(NOW + at + acked_s, "accepted", attempt, seconds=0.05))
    if end:
        notes.append(RequestEvent(NOW + end.pop("ends"), end.pop("what"), attempt, **end))
    return notes


def answered(attempt: int, target: str, at: float, *, took_s: float = 0.060, **more: Any) -> list[RequestEvent]:
    """The same with an answer; what the stages leave is the link."""
    stages = more.pop("stages", STAGES)
    link_s = max(0.0, took_s - sum(stages.values())) if "compute" in stages else 0.01
    return went(attempt, target, at, ends=at + took_s, what="answered", stages=stages, seconds=link_s, **more)


def request_record(
    *, number: int = 1, end: AnswerRecord | str | None = None, notes: list[RequestEvent] | None = None, **more: Any
) -> RequestRecord:
    """One request that arrived at NOW, was placed 2 ms later and had a second; `shift_s` moves all of it in time."""
    shift_s = more.pop("shift_s", 0.0)
    fleet = more.pop("fleet", None) or fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant(compute_s=0.002))
    decision = pack_decision(Placer(fleet).decide(ask(budget_s=1.0), NOW))
    assert decision is not None
    notes = answered(0, "edge/a", 0.002) if notes is None else notes
    instants = {"arrived_at": NOW, "taken_at": NOW + 0.0005, "asked_at": NOW + 0.001, "placed_at": NOW + 0.002}
    return RequestRecord(
        number=number,
        request_id=more.pop("request_id", f"id-{number}"),
        trace_id=more.pop("trace_id", ""),
        protocol="oip-http",
        model="minilm",
        tenant=more.pop("tenant", ""),
        decision=replace(decision, at=NOW + shift_s, ask=decision.ask._replace(deadline=NOW + 1.0 + shift_s)),
        reasons=more.pop("reasons", ("cheapest", "hedge")),
        notes=tuple([replace(note, at=note.at + shift_s) for note in notes]),
        end=given() if end is None else end,
        elapsed_s=more.pop("elapsed_s", 0.0625),
        deadline=NOW + 1.0 + shift_s,
        **{name: at + shift_s for name, at in instants.items()},
        **more,
    )
