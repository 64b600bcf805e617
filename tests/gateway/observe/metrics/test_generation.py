"""Generations are counted by their tokens and the times between them; what is no generation is not."""

from __future__ import annotations

from asyncio import CancelledError

from msgspec.structs import replace

from gateway.observe.metrics.generation import GenerationCounts
from tests.support.gateway.fleets import NOW
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.metrics.exposition import Exposition
from tidegate.outcome import InvalidRequest, Overloaded
from tidegate.types import Call, InferResponse, Reply, Route

CALL = Call(infer_request("talker", GenerateRequest((1, 2), 8)), "openai", NOW)
USAGE = usage_parameters(Usage("stop", 31, 11, 24))
REPLY = Reply(
    InferResponse("talker", "1", (), parameters=USAGE), route=Route("edge/a", "only", "int4"), first_token_s=0.05
)


def told(counts: GenerationCounts) -> str:
    return Exposition(counts.families).render()[0].decode()


def test_tokens_and_times_are_counted() -> None:
    counts = GenerationCounts()
    counts.answered(CALL, REPLY, NOW + 0.25)

    text = told(counts)

    who = 'gen_ai_operation_name="generate_content",gen_ai_provider_name="tidegate",gen_ai_request_model="talker"'
    assert f'gen_ai_server_token_usage_sum{{{who},gen_ai_token_type="input"}} 31.0' in text
    assert f'gen_ai_server_token_usage_sum{{{who},gen_ai_token_type="output"}} 11.0' in text
    assert f"gen_ai_server_time_to_first_token_seconds_sum{{{who}}} 0.05" in text
    assert f"gen_ai_server_time_per_output_token_seconds_sum{{{who}}} 0.02" in text
    assert 'tidegate_tokens_total{model="talker",tier="edge",type="cached"} 24.0' in text


def test_budgets_that_were_kept_and_missed_are_counted() -> None:
    counts = GenerationCounts()
    asked = replace(CALL, deadline=NOW + 1.0, ttft_s=0.06, tpot_s=0.01)  # the first came after 50 ms, the others by 20
    counts.answered(asked, REPLY, NOW + 0.25)
    counts.answered(replace(asked, tpot_s=None), REPLY, NOW + 0.25)
    counts.ended(asked, Overloaded("full"), NOW + 0.1)
    counts.ended(asked, InvalidRequest("its own fault"), NOW + 0.1)
    counts.ended(asked, CancelledError(), NOW + 0.1)
    counts.ended(CALL, Overloaded("full"), NOW + 0.1)  # it had no budget for tokens
    text = told(counts)
    expected = {("first", "kept"): 2, ("next", "missed"): 1, ("whole", "kept"): 2}
    expected |= {("all", "kept"): 1, ("all", "missed"): 2}
    for (budget, result), count in expected.items():
        assert f'tidegate_token_budgets_total{{budget="{budget}",model="talker",result="{result}"}} {count}.0' in text
    assert text.count("tidegate_token_budgets_total{") == len(expected)


def test_an_answer_in_one_piece_has_no_first_token() -> None:
    counts = GenerationCounts()
    counts.answered(CALL, replace(REPLY, first_token_s=None), NOW + 0.25)
    text = told(counts)
    assert "gen_ai_server_token_usage" in text
    assert "time_to_first_token_seconds_sum" not in text


def test_what_is_no_generation_or_cannot_be_read_is_not_counted() -> None:
    counts = GenerationCounts()
    counts.answered(CALL, replace(REPLY, response=InferResponse("minilm", "1", ())), NOW + 1.0)
    nonsense = InferResponse("talker", "1", (), parameters={**USAGE, "prompt_tokens": -1})
    counts.answered(CALL, replace(REPLY, response=nonsense), NOW + 1.0)
    assert "tidegate_tokens" not in told(counts)
