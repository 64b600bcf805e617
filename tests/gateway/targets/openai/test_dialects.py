"""How each server is asked, and how its events are read, without any server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.targets.openai.llama_server import LlamaServerDialect
from gateway.targets.openai.sglang import SglangDialect
from gateway.targets.openai.text_dialect import CONTINUE, TextDialect
from gateway.targets.openai.vllm import VllmDialect
from tidegate.generate.request import GenerateRequest, Sampling, infer_request, words_request
from tidegate.openai.deltas import merged_deltas
from tidegate.openai.passed_fields import passed_fields
from tidegate.outcome import BadAnswer
from tidegate.text_prompt import TextPrompt
from tidegate.types import InferRequest

REQUEST = infer_request(
    "talker",
    GenerateRequest(
        (5, 6), 9, Sampling(0.5, seed=-1), stop_tokens=(2,), ignore_stop=True, logprobs=2, schema='{"a":1}'
    ),
)


def body_of(dialect: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(dialect.question(REQUEST, "there").body))


def test_vllm_is_told_everything_that_chooses_a_token() -> None:
    assert body_of(VllmDialect()) == {
        "model": "there", "prompt": [5, 6], "max_tokens": 9, "temperature": 0.5, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": [2],
        "ignore_eos": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
        "seed": -1, "logprobs": 2, "return_tokens_as_token_ids": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"a": 1}}},
    }  # fmt: skip


def test_vllm_keeps_prompts_of_one_salt_apart_from_others() -> None:
    salted = infer_request("talker", GenerateRequest((5, 6), 9, cache_salt="s"))
    assert VllmDialect().question(salted, "there").body["cache_salt"] == "s"


def test_sglang_is_told_everything_that_chooses_a_token() -> None:
    assert body_of(SglangDialect()) == {
        "input_ids": [5, 6], "stream": True, "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2,
        "sampling_params": {
            "max_new_tokens": 9, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "stop_token_ids": [2], "ignore_eos": True, "sampling_seed": -1,
            "json_schema": '{"a":1}',
        },
    }  # fmt: skip


def test_llama_servers_seed_has_32_bits() -> None:
    said = body_of(LlamaServerDialect())
    assert (said["seed"], said["n_probs"], said["json_schema"]) == (2**32 - 1, 2, {"a": 1})
    assert (said["temperature"], said["top_k"], said["min_p"], said["ignore_eos"]) == (0.5, 0, 0.0, True)


def test_vllms_likelihoods_are_read_by_id() -> None:
    top = {"token_id:8": -0.5, "token_id:9": -0.25, "no id": -1.0, "token_id:": -1.0, "token_id:-7": -1.0}
    likely = {"token_logprobs": [-0.5], "top_logprobs": [top]}
    part = VllmDialect().part({"choices": [{"text": "x", "token_ids": [8], "logprobs": likely}]})
    assert part.logprobs == (-0.5,)
    assert [(one.id, one.logprob) for one in part.top[0]] == [(9, -0.25), (8, -0.5)]


@pytest.mark.parametrize("digits", [str(2**31), "9" * 10, "9" * 40, "9" * 5000])
def test_ids_of_other_likely_tokens_are_bounded_as_any_id(digits: str) -> None:
    likely = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:8": -0.5, f"token_id:{digits}": -1.0}]}
    with pytest.raises(BadAnswer, match="token id that is none"):
        VllmDialect().part({"choices": [{"text": "x", "token_ids": [8], "logprobs": likely}]})


BEYOND = 10**310


@pytest.mark.parametrize(("dialect", "event"), [
    (VllmDialect(), {"choices": [{"token_ids": [8], "logprobs": {"token_logprobs": [BEYOND]}}]}),
    (VllmDialect(), {"choices": [{"token_ids": [8], "logprobs": {
        "token_logprobs": [-0.5], "top_logprobs": [{"token_id:8": -BEYOND}]}}]}),
    (LlamaServerDialect(), {"tokens": [8], "completion_probabilities": [{"logprob": -BEYOND}]}),
    (SglangDialect(), {"output_ids": [8], "meta_info": {"output_token_logprobs": [[-BEYOND, 8, None]]}}),
])  # fmt: skip
def test_a_likelihood_beyond_any_number_is_a_bad_answer(dialect: Any, event: Any) -> None:
    with pytest.raises(BadAnswer, match="beyond any number"):
        dialect.reader(REQUEST).part(msgspec.json.decode(json.dumps(event)))


def test_what_llama_server_left_out_is_counted() -> None:
    reader = LlamaServerDialect().reader(REQUEST)
    counts = [(1, 1, "a"), (1, 4, "🌊"), (1, 5, "b"), (0, 7, "")]  # ids, counted so far, text
    parts = [
        reader.part({"tokens": [3] * ids, "tokens_predicted": so_far, "content": text}) for ids, so_far, text in counts
    ]
    assert [part.lost for part in parts] == [0, 2, 0, 0]  # of a character that did not end there is no text


def test_sglang_may_go_neither_back_nor_on_without_ids() -> None:
    reader = SglangDialect().reader(REQUEST)
    assert reader.part({"output_ids": [1, 2], "meta_info": {"completion_tokens": 2}}).ids == (1, 2)
    with pytest.raises(BadAnswer, match="an event of 1 ids of which 2 had come"):
        reader.part({"output_ids": [1], "meta_info": {"completion_tokens": 2}})
    with pytest.raises(BadAnswer, match="gave the answer up: out of memory"):
        reader.part({"meta_info": {"finish_reason": {"type": "abort", "message": "out of memory"}}})


def words(begun: str, **fields: Any) -> InferRequest:
    prompt = TextPrompt({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}, begun)
    return words_request("talker", prompt, GenerateRequest((), 9))


def asked(dialect: TextDialect, request: InferRequest) -> Any:
    return msgspec.json.decode(msgspec.json.encode(dialect.question(request, "there").body))


def test_an_answer_that_has_begun_is_a_last_message_that_is_gone_on_with() -> None:
    user = {"role": "user", "content": "when?"}
    body = asked(TextDialect(resuming=CONTINUE), words("At no", messages=[user]))
    assert body["messages"] == [user, {"role": "assistant", "content": "At no"}]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert asked(TextDialect(), words("At no", prompt="The tide: "))["prompt"] == "The tide: At no"
    assert "continue_final_message" not in asked(TextDialect(resuming=CONTINUE), words("", messages=[user]))


@pytest.mark.parametrize("said", [
    {}, {"max_tokens": 10**6}, {"max_completion_tokens": 10**6}, {"max_tokens": 10**6, "max_completion_tokens": 1},
    {"max_completion_tokens": -5},
])  # fmt: skip
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("prompt", [{"messages": []}, {"prompt": "The tide: "}])
def test_the_most_tokens_are_said_once_and_are_those_that_were_counted(prompt: Any, name: str, said: Any) -> None:
    body = asked(TextDialect(name), words("", **prompt, **said))
    assert {key: body.get(key) for key in ("max_tokens", "max_completion_tokens") if key in body} == {name: 9}


def test_only_fields_of_the_request_itself_go_on() -> None:
    sent = {
        "model": "a", "messages": [1], "stream": True, "user": "u", "metadata": {}, "seed": 3, "stop": None, "n": 1,
        "max_tokens": 5, "max_completion_tokens": 6, "response_format": {"type": "x"}, "chat_template_kwargs": {},
    }  # fmt: skip
    passed = passed_fields(msgspec.json.encode(sent))
    assert {name: bytes(raw) for name, raw in passed.fields.items()} == {"messages": b"[1]", "seed": b"3"}


def test_deltas_are_put_together_by_name_and_index() -> None:
    deltas: Any = [
        {"reasoning_content": "I thi"}, None, {"reasoning_content": "nk"},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "y", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "x", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]  # fmt: skip
    call = {"type": "function"}
    assert merged_deltas(deltas) == {
        "reasoning_content": "I think",
        "tool_calls": [
            {**call, "id": "a", "function": {"name": "x", "arguments": "{}"}},
            {**call, "id": "b", "function": {"name": "y", "arguments": "{}"}},
        ],
    }
