"""Generations under way and their tokens, counted while they come and once each, however they end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.estimate.sliding_stats import SLOT_S
from gateway.operate.console.generations import GenerationRates, GenerationSummary
from tests.support.gateway.fleets import NOW
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.token_sink import TokenBatch
from tidegate.types import Call, InferRequest, InferResponse, Reply

CALL = Call(infer_request("talker", GenerateRequest((1, 2), 8)), "openai", NOW)
REPLY = Reply(InferResponse("talker", "1", (), parameters=usage_parameters(Usage("stop", 30, 11))))
START = SLOT_S * int(NOW / SLOT_S)  # of a slot, so that rates are of whole seconds
LATER = START + SLOT_S - 1.0


def rates() -> GenerationRates:
    found = GenerationRates(lambda request: request.model_name == "talker")
    found.began(Call(InferRequest("minilm", ()), "oip-http", NOW))
    return found


def streamed(counting: GenerationRates) -> tuple[Call, TokenStream]:
    stream = TokenStream()
    call = replace(CALL, tokens=stream)
    counting.began(call)
    return call, stream


def tokens(found: list[GenerationSummary], seconds: float) -> list[tuple[int, float, float]]:
    """(under way, in, out) of each model, as counts."""
    return [(one.under_way, round(seconds * one.in_per_s, 6), round(seconds * one.out_per_s, 6)) for one in found]


def test_a_model_that_does_not_generate_is_not_shown() -> None:
    assert rates().read(NOW) == []


def test_tokens_of_a_stream_are_counted_while_they_come() -> None:
    counting = rates()
    call, stream = streamed(counting)
    counting.sample(START)
    assert tokens(counting.read(START), 1.0) == [(1, 0, 0)]

    stream.started(30, 0)
    counting.sample(START)  # rates begin with the first token
    stream.put(TokenBatch(0, (1, 2, 3)))
    assert tokens(counting.read(LATER), 4.0) == [(1, 30, 3)]
    stream.put(TokenBatch(3, (4, 5)))
    assert tokens(counting.read(LATER), 4.0) == [(1, 30, 5)]

    counting.answered(call, replace(REPLY, first_token_s=0.25), LATER)  # its usage counts the stop token, too
    (found,) = counting.read(LATER)
    assert tokens([found], 4.0) == [(0, 30, 11)]
    assert found.first_token_s == (pytest.approx(0.25, rel=0.06),) * 3


@pytest.mark.parametrize("parameters", [{}, {"finish_reason": "nonsense"}])
def test_an_answer_that_does_not_say_what_it_took_counts_as_what_came(parameters: dict[str, str]) -> None:
    counting = rates()
    call, stream = streamed(counting)
    stream.started(30, 0)
    stream.put(TokenBatch(0, (1, 2, 3)))
    counting.answered(call, Reply(InferResponse("talker", "1", (), parameters=parameters)), START)
    assert tokens(counting.read(START), 1.0) == [(0, 30, 3)]


def test_an_answer_in_one_piece_counts_at_its_end() -> None:
    counting = rates()
    counting.began(CALL)
    assert tokens(counting.read(START), 1.0) == [(1, 0, 0)]
    counting.answered(CALL, REPLY, START)
    assert tokens(counting.read(START), 1.0) == [(0, 30, 11)]


def test_of_a_generation_that_was_left_what_had_come_counts() -> None:
    counting = rates()
    call, stream = streamed(counting)
    stream.started(30, 0)
    stream.put(TokenBatch(0, (1, 2, 3)))
    counting.ended(call, START)
    counting.ended(call, START)
    assert tokens(counting.read(START), 1.0) == [(0, 30, 3)]


def test_calls_that_look_alike_are_two() -> None:
    counting = rates()
    one, other = replace(CALL), replace(CALL)
    counting.began(one)
    counting.began(other)
    assert tokens(counting.read(START), 1.0) == [(2, 0, 0)]
    counting.ended(one, START)
    assert tokens(counting.read(START), 1.0) == [(1, 0, 0)]


def test_a_model_is_forgotten_a_minute_after_its_last_token() -> None:
    counting = rates()
    counting.began(CALL)
    counting.answered(CALL, REPLY, START)
    assert counting.read(START + 50.0)[0].out_per_s == 0.0
    assert counting.read(START + 70.0) == []
