"""The work of a generation, as every process counts it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.models.work import Work, answer_bytes, generated_units, work_of
from tidegate.types import Datatype, InferRequest, Parameter, Tensor

WEIGHT = 0.5 / 4.0  # of the first variant: ms a token of a prompt, by ms a step


def asked(prompt: int, **parameters: Parameter) -> InferRequest:
    whole = infer_request("talker", GenerateRequest(tuple(range(prompt)), 1))
    return InferRequest("talker", whole.inputs, parameters=parameters)


def test_it_counts_the_tokens_of_the_answer_and_a_part_for_each_of_the_prompt() -> None:
    assert work_of(TALKER, asked(80, max_tokens=100)) == Work(100 + 80 * WEIGHT, 1, 180)
    assert generated_units(TALKER, 80, 7) == 7 + 80 * WEIGHT
    assert answer_bytes(TALKER, asked(80, max_tokens=100)) == 3200


@pytest.mark.parametrize(
    ("prompt", "said", "answer"),
    [(80, None, 64), (500, None, 12), (600, None, 1), (80, True, 64), (80, "9", 64), (80, -1, 64), (80, 10**9, 64)],
)
def test_what_a_request_does_not_say_is_the_models_as_far_as_there_is_room(
    prompt: int, said: Parameter | None, answer: int
) -> None:
    words = {} if said is None else {"max_tokens": said}
    assert work_of(TALKER, asked(prompt, **words)) == Work(answer + prompt * WEIGHT, 1, prompt + answer)


def test_all_variants_are_counted_alike() -> None:
    other = replace(TALKER.variants[0], name="other", generation=replace(COST, prefill_ms=400.0))
    both = replace(TALKER, variants=(*TALKER.variants, other))
    assert work_of(both, asked(80, max_tokens=100)) == work_of(TALKER, asked(80, max_tokens=100))


def test_text_is_guessed_at() -> None:
    text = InferRequest("talker", (Tensor("text_input", Datatype.BYTES, (1,), bytes(400)),))
    assert work_of(TALKER, text).units == 64 + 100 * WEIGHT
    assert work_of(TALKER, InferRequest("talker", ())).units == 64
