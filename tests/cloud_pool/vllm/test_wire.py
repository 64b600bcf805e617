"""vLLM's requests and events, in bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.vllm.wire import MAX_EVENT_BYTES, EventLines, fault_of, read_event, request_body
from tidegate.generate.request import GenerateRequest, Sampling
from tidegate.workers.generation.messages import UnexpectedMessage

STOPS = (2, 7)


def asked(max_tokens: int = 8, **words: Any) -> dict[str, Any]:
    request = GenerateRequest((5, 6), max_tokens, **words)
    body: dict[str, Any] = json.loads(request_body(request, request.prompt, max_tokens, STOPS))
    assert (body["token_ids"], body["stream"], body["stream_options"]) == ([5, 6], True, {"include_usage": True})
    said: dict[str, Any] = body["sampling_params"]
    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, {"temperature": 0.0, "stop_token_ids": [2, 7], "max_tokens": 8, "ignore_eos": True, "detokenize": False}),
        ({"stop_tokens": (9, 2)}, {"stop_token_ids": [2, 7, 9]}),
        # None of the model's own may come: vLLM forbids the stops that it is told until `min_tokens`.
        ({"ignore_stop": True, "stop_tokens": (9,)}, {"stop_token_ids": [2, 7], "min_tokens": 8}),
        ({"sampling": Sampling(0.7, 0.9, 40, 11)}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 11}),
        ({"sampling": Sampling(0.7, min_p=0.1)}, {"temperature": 0.7, "min_p": 0.1}),
        ({"sampling": Sampling(0.7, seed=-1)}, {"seed": 2**63 - 1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": 20}, {"logprobs": 21}),
    ],
)
def test_a_request_says_what_is_meant(words: dict[str, Any], said: dict[str, Any]) -> None:
    assert asked(**words).items() >= said.items()


@pytest.mark.parametrize("sampling", [Sampling(0.5, top_p=0.0), Sampling(1e-9), Sampling(1.0, top_k=1, seed=3)])
def test_what_can_only_be_the_likeliest_token_is_asked_for_as_such(sampling: Sampling) -> None:
    said = asked(sampling=sampling)
    assert said["temperature"] == 0.0 and not {"top_p", "top_k", "seed"} & set(said)


def test_what_was_not_asked_for_is_not_said() -> None:
    assert not {"logprobs", "min_tokens", "seed", "top_p"} & set(asked())


def test_prompts_of_one_salt_are_kept_apart_from_others() -> None:
    salted, bare = GenerateRequest((5, 6), 8, cache_salt="s"), GenerateRequest((5, 6), 8)
    assert json.loads(request_body(salted, salted.prompt, 8, STOPS))["cache_salt"] == "s"
    assert "cache_salt" not in json.loads(request_body(bare, bare.prompt, 8, STOPS))  # an empty one is refused there


@given(st.lists(st.integers(1, 40), max_size=30))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    data = b': hello\n\ndata: {"a":1}\n\ndata:{"b":2}\r\n\r\ndata: {"c":3}\n\ndata: [DONE]\n\n'
    lines, events = EventLines(), []
    for cut in cuts:
        events += lines.feed(data[:cut])
        data = data[cut:]
    events += lines.feed(data)
    assert events == [b'{"a":1}', b'{"b":2}', b'{"c":3}'] and lines.done


@pytest.mark.parametrize(
    "data",
    [
        b"<html>\n",
        b"event: x\n",
        b"data: [DONE]\n\ndata: {}\n",
        b"x" * (MAX_EVENT_BYTES + 1),
        b" " * (MAX_EVENT_BYTES + 1) + b"\n",
    ],
)
def test_what_is_no_event_is_unexpected(data: bytes) -> None:
    with pytest.raises(UnexpectedMessage):
        list(EventLines().feed(data))


@pytest.mark.parametrize("bad", [b"<html>\n\n", b"data: " + b"x" * MAX_EVENT_BYTES + b"\n\n"])
def test_events_before_a_bad_one_count_though_they_came_in_one_piece(bad: bytes) -> None:
    events = EventLines().feed(b'data: {"a":1}\n\n' + bad)
    assert next(events) == b'{"a":1}'
    with pytest.raises(UnexpectedMessage):
        next(events)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{"index": 0, "token_ids": [-1]}]}',
        b'{"choices": [{"index": 0, "token_ids": [4294967296]}]}',
        b'{"choices": [{"index": 0, "token_ids": [1.5]}]}',
        b'{"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"token_id": 1}]}}]}',
        b'{"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"token_id": 1, "logprob": NaN}]}}]}',
        b'{"choices": [], "usage": {"prompt_tokens": -3}}',
        b'{"choices": [{"index": 0, "finish_reason": "\xff"}]}',
        b"[" * 100_000,
    ],
)
def test_an_event_that_is_not_as_it_should_be_is_unexpected(payload: bytes) -> None:
    with pytest.raises(UnexpectedMessage):
        read_event(payload)


def test_an_error_keeps_the_servers_words() -> None:
    assert fault_of(404, b'{"error": {"message": "no such model", "code": 404}}').message == "no such model"
    assert fault_of(502, b"<html>bad").message == "<html>bad"
    assert fault_of(500, b"").message == "no reason is given"
    assert len(fault_of(500, b"y" * 9999).message) == 1000
