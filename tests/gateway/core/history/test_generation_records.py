"""A generation's decision is kept with its budgets and its three chances, and without what its prompt was known by."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.commands.explain import _tokens as printed_tokens
from gateway.core.history.decision_record import pack_decision
from gateway.core.history.recorder import RequestEvent, pack_record, unpack_record
from gateway.core.history.trace_format import request_line
from gateway.core.placement.utility import UtilityPlacer
from gateway.operate.explanation import explanation_json
from tests.gateway.core.placement.test_generation_time import asking, fleet
from tests.support.gateway.fleets import NOW
from tests.support.gateway.flowns import answered, given, request_record
from tidegate.generate.usage import Usage


def test_its_explanation_has_what_was_asked_claimed_and_came() -> None:
    asked = asking(first_by=NOW + 0.5, next_s=0.05, prefix=tuple(range(500)))
    usage = Usage("stop", 100, 11)
    record = request_record(notes=answered(0, "edge/a", 0.002, took_s=0.39), end=given(usage=usage), elapsed_s=0.4)
    notes = (*record.notes, RequestEvent(NOW + 0.2, "begun", 0))
    record = replace(record, notes=notes, decision=pack_decision(UtilityPlacer(fleet()).decide(asked, NOW)))
    raw = pack_record(record)
    assert len(raw) < 3000  # the prompt's blocks are not in there
    told = explanation_json(unpack_record(raw))

    assert told["budgets"]["first_ms"] == 500.0
    assert told["budgets"]["next_ms"] == 50.0
    assert told["budgets"]["first_token_ms"] == 200.0
    assert told["budgets"]["each_token_ms"] == 20.0
    assert told["budgets"]["most_tokens"] == 1000
    assert "Of its budgets: the first token with" in told["sentence"]
    judged = [one for one in told["candidates"] if "tokens" in one]  # others could not have won
    assert told["chosen"] in [one["target"] for one in judged]
    for candidate in judged:
        tokens = candidate["tokens"]
        assert candidate["calibrated"] <= tokens["first"] * tokens["next"] * tokens["whole"] + 1e-3
    assert printed_tokens(told).endswith("; first token 200 ms of 500 ms, each 20.0 ms of 50.0 ms")

    line = request_line(unpack_record(raw), NOW, str)
    assert (line.ttft_s, line.tpot_s) == (0.5, 0.05)


def test_a_request_without_budgets_for_tokens_has_none() -> None:
    record = replace(
        request_record(end=given(usage=Usage("stop", 100, 11))),
        decision=pack_decision(UtilityPlacer(fleet()).decide(asking(), NOW)),
    )
    told = explanation_json(record)
    assert told["budgets"]["first_ms"] is None
    assert "first token" not in printed_tokens(told)
    assert request_line(record, NOW, str).ttft_s is None
