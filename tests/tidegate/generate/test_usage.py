"""How a generation ended travels in its answer's parameters, and is not trusted."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.generate.usage import Usage, usage_of, usage_parameters
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
