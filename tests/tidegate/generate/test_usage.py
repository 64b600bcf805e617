"""How a generation ended travels in its answer's parameters, and is not trusted."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.generate.usage import Usage, clipped_usage, usage_of, usage_parameters
from tidegate.outcome import BadAnswer
from tidegate.types import InferResponse

USAGE = Usage("stop", 31, 12, 24, 0.125, 0.5)


def test_what_it_took_arrives() -> None:
    assert usage_of(InferResponse("m", "1", (), parameters=usage_parameters(USAGE))) == USAGE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("finish_reason", "tired"),
        ("finish_reason", 1),
        ("prompt_tokens", -1),
        ("completion_tokens", "12"),
        ("decode_us", 1.5),
        ("cached_tokens", True),
        ("prefill_us", 2**60),
    ],
)
def test_nonsense_is_a_bad_answer(key: str, value: Any) -> None:
    parameters = {**usage_parameters(USAGE), key: value}
    with pytest.raises(BadAnswer):
        usage_of(InferResponse("m", "1", (), parameters=parameters))


def answer(usage: Usage = USAGE) -> InferResponse:
    return InferResponse("m", "1", (), parameters={**usage_parameters(usage), "note": "kept"})


def test_counts_that_can_be_are_left_as_they_are() -> None:
    said = answer()
    most = {"prompt_tokens": USAGE.prompt_tokens, "completion_tokens": USAGE.completion_tokens}
    assert clipped_usage(said, **most, took_s=USAGE.prefill_s + USAGE.decode_s + 1e-6) is said
    none = InferResponse("m", "1", (), parameters={"note": "no generation"})
    assert clipped_usage(none, prompt_tokens=0, completion_tokens=0, took_s=0.0) is none


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        (Usage("stop", 2**53, 4, 1, 0.5, 0.25), Usage("stop", 8, 4, 1, 0.5, 0.25)),
        (Usage("stop", 8, 2**53, 1, 0.5, 0.25), Usage("stop", 8, 5, 1, 0.5, 0.25)),
        (Usage("stop", 6, 4, 2**53, 0.5, 0.25), Usage("stop", 6, 4, 6, 0.5, 0.25)),
        (Usage("stop", 8, 4, 1, 9e9, 0.25), Usage("stop", 8, 4, 1, 1.0, 0.0)),
        (Usage("stop", 8, 4, 1, 0.75, 9e9), Usage("stop", 8, 4, 1, 0.75, 0.25)),
    ],
)
def test_counts_that_cannot_be_are_clipped_to_what_can(said: Usage, counted: Usage) -> None:
    clipped = clipped_usage(answer(said), prompt_tokens=8, completion_tokens=5, took_s=1.0)

    assert usage_of(clipped) == counted
    assert clipped.parameters["note"] == "kept"
