"""A generation travels as an OIP request, and everything in it is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tidegate.generate.request import (
    MAX_STOP_TOKENS,
    GenerateRequest,
    Sampling,
    generate_request,
    infer_request,
)
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, InferRequest, Tensor

FULL = GenerateRequest(
    (1, 2, 49151),
    64,
    Sampling(0.7, 0.9, 40, -5, 0.05),
    (7, 8),
    ignore_stop=True,
    logprobs=3,
    schema='{"type":"object"}',
    answered=1,
    cache_salt="s",
)


@pytest.mark.parametrize("asked", [FULL, GenerateRequest((5,), 1), GenerateRequest((5,), 9, Sampling(seed=0))])
def test_what_is_asked_arrives(asked: GenerateRequest) -> None:
    travelling = infer_request("smollm2", asked, version="1", id="a", parameters={"other": 1})
    assert (travelling.model_name, travelling.model_version, travelling.id) == ("smollm2", "1", "a")
    assert travelling.parameters["other"] == 1
    assert generate_request(travelling, default_max_tokens=99) == asked


def test_a_request_without_parameters_gets_the_defaults() -> None:
    bare = InferRequest("m", infer_request("m", FULL).inputs)
    assert generate_request(bare, default_max_tokens=99) == GenerateRequest(FULL.prompt, 99)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 2**40),
        ("max_tokens", "many"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("min_p", 1.5),
        ("top_k", -1),
        ("seed", 2**63),
        ("logprobs", 21),
        ("stop_token_ids", "1,,2"),
        ("stop_token_ids", "-1"),
        ("stop_token_ids", "99999999999"),
        ("stop_token_ids", ",".join(["1"] * (MAX_STOP_TOKENS + 1))),
        ("ignore_eos", 1),
        ("cache_salt", 5),
        ("cache_salt", "x" * 129),
        ("json_schema", 5),
        ("json_schema", "x" * 70_000),
        ("json_schema", '{}, "max_tokens": 4000'),
    ],
)
def test_a_bad_parameter_is_named(key: str, value: Any) -> None:
    request = infer_request("m", GenerateRequest((1,), 5), parameters=None)
    request = replace(request, parameters={**request.parameters, key: value})
    with pytest.raises(InvalidRequest, match=key):
        generate_request(request, default_max_tokens=9)


@pytest.mark.parametrize(
    "inputs",
    [
        (),
        (Tensor("input_ids", Datatype.FP32, (1,), bytes(4)),),
        (Tensor("input_ids", Datatype.INT32, (1,), bytes(3)),),
    ],
)
def test_a_prompt_that_is_no_token_ids_is_refused(inputs: tuple[Tensor, ...]) -> None:
    with pytest.raises(InvalidRequest, match="input_ids"):
        generate_request(InferRequest("m", inputs), default_max_tokens=9)
