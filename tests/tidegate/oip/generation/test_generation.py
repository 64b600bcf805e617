"""Generating models over the Open Inference Protocol, with Triton's own clients: whole, in events, and decoupled."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http.aio as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.models.text_side import text_side_folder
from tests.support.serving.host import minilm
from tests.support.serving.oip_servers import Servers, serving
from tests.support.serving.writing_host import WritingHost, until
from tidegate.oip.generation.answer import GenerationAnswer, Piece
from tidegate.outcome import NothingAlive, Unreachable


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("talker")


@pytest.fixture
def host(folder: Path) -> WritingHost:
    return WritingHost(text_side_folder(folder), minilm())


@pytest.fixture
async def servers(folder: Path, host: WritingHost) -> AsyncIterator[Servers]:
    async with serving(host, folder) as running:
        yield running
    assert host.under_way == 0


async def generate(servers: Servers, body: Any, path: str = "generate", model: str = "talker") -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{servers.http}/v2/models/{model}/{path}", json=body) as answer,
    ):
        return answer.status, await answer.read()


def events(body: bytes) -> list[Any]:
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_input(kind: Any, text: str) -> Any:
    tensor = kind.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def ids_input(kind: Any, ids: list[int]) -> Any:
    tensor = kind.InferInput("input_ids", [len(ids)], "INT32")
    tensor.set_data_from_numpy(np.array(ids, np.int32))
    return tensor


async def test_generate_gives_the_whole_text(servers: Servers, host: WritingHost) -> None:
    status, body = await generate(
        servers, {"text_input": "the moon", "id": "7", "parameters": {"max_tokens": 20, "temperature": 0.5}}
    )
    said = json.loads(body)
    ids = host.tokenizer.encode(host.text).ids
    assert (status, said["text_output"], said["output_ids"]) == (200, "the tide comes in", ids)
    assert (said["model_name"], said["model_version"], said["id"]) == ("talker", "1", "7")
    assert (said["finish_reason"], said["completion_tokens"]) == ("stop", len(ids) + 1)
    assert host.asked[0].prompt == tuple(host.tokenizer.encode("the moon").ids)
    assert (host.asked[0].max_tokens, host.asked[0].sampling.temperature) == (20, 0.5)


async def test_generate_stream_gives_an_event_a_token_and_one_that_ends_them(
    servers: Servers, host: WritingHost
) -> None:
    _, body = await generate(servers, {"text_input": "the moon", "max_tokens": 3}, "generate_stream")
    *parts, last = events(body)
    ids = host.tokenizer.encode(host.text).ids[:3]
    assert [part["text_output"] for part in parts] == [host.tokenizer.decode([id]) for id in ids]
    assert [part["output_ids"] for part in parts] == [[id] for id in ids]
    assert (last["text_output"], last["finish_reason"], last["completion_tokens"]) == ("", "length", 3)


async def test_generate_stream_comes_token_by_token_and_wakes_its_front_at_the_beginning_and_the_end(
    servers: Servers, host: WritingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.every_s = 0.001
    takes, take = list[int](), GenerationAnswer.take

    def counted(self: GenerationAnswer) -> Awaitable[list[Piece]]:
        takes.append(1)
        return take(self)

    monkeypatch.setattr(GenerationAnswer, "take", counted)
    _, body = await generate(servers, {"text_input": "the moon"}, "generate_stream")
    *parts, last = events(body)
    assert "".join([part["text_output"] for part in parts]) == host.text
    assert (len(parts) > 3, last["finish_reason"]) == (True, "stop")
    assert len(takes) <= 3


async def test_stop_strings_end_a_generation(servers: Servers, host: WritingHost) -> None:
    for stop in ("comes", ["zz", "comes"]):
        for path in ("generate", "generate_stream"):
            _, body = await generate(servers, {"text_input": "a", "stop": stop}, path)
            parts = [json.loads(body)] if path == "generate" else events(body)
            assert "".join([part["text_output"] for part in parts]) == "the tide "
            assert parts[-1]["finish_reason"] == "stop"


async def test_token_ids_are_taken_and_given_whole_over_http_and_grpc(servers: Servers, host: WritingHost) -> None:
    ids = host.tokenizer.encode(host.text).ids
    async with triton_http.InferenceServerClient(servers.http) as over_http:
        result = await over_http.infer("talker", [ids_input(triton_http, [5, 6])], parameters={"max_tokens": 30})
        assert result.as_numpy("output_ids").tolist() == ids
        assert result.as_numpy("text_output").tolist() == [b"the tide comes in"]
    async with triton_aio.InferenceServerClient(servers.grpc) as over_grpc:
        wanted = [triton_aio.InferRequestedOutput("text_output")]
        answer = await over_grpc.infer("talker", [text_input(triton_aio, "the moon")], outputs=wanted)
        assert answer.as_numpy("text_output").tolist() == [b"the tide comes in"]
        assert answer.as_numpy("output_ids") is None
        assert answer.get_response().parameters["finish_reason"].string_param == "stop"
    assert host.asked[0].prompt == (5, 6)


def stream(servers: Servers, *requests: dict[str, Any]) -> list[Any]:
    """What tritonclient's decoupled stream calls back with, until as many final responses have come as requests."""
    found: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(servers.grpc) as client:
        client.start_stream(callback=lambda result, error: found.put(error or result.get_response()))
        for request in requests:
            client.async_stream_infer("talker", enable_empty_final_response=True, **request)
        answers: list[Any] = []
        open_ = len(requests)
        while open_:
            answers.append(found.get(timeout=10))
            is_error = isinstance(answers[-1], InferenceServerException)
            open_ -= is_error or answers[-1].parameters["triton_final_response"].bool_param
        client.stop_stream()
    return answers


async def test_a_decoupled_stream_gives_tokens_as_they_come_and_a_final_response(
    servers: Servers, host: WritingHost
) -> None:
    host.every_s = 0.002
    request = {"inputs": [text_input(triton_grpc, "the moon")], "request_id": "one", "parameters": {"max_tokens": 50}}
    *parts, last = await asyncio.to_thread(stream, servers, request)
    ids = host.tokenizer.encode(host.text).ids
    assert len(parts) > 1
    assert {part.id for part in [*parts, last]} == {"one"}
    texts = [triton_grpc.InferResult(part).as_numpy("text_output").item().decode() for part in parts]
    assert "".join(texts) == host.text
    assert [id for part in parts for id in triton_grpc.InferResult(part).as_numpy("output_ids").tolist()] == ids
    assert last.parameters["finish_reason"].string_param == "stop"
    assert last.parameters["tidegate-served-by"].string_param == "edge/attic"
    assert not any(part.parameters["triton_final_response"].bool_param for part in parts)


@pytest.mark.slow
async def test_generations_of_one_stream_do_not_wait_for_each_other(servers: Servers, host: WritingHost) -> None:
    host.every_s = 0.005
    long = {"inputs": [ids_input(triton_grpc, [5])], "request_id": "long", "parameters": {"max_tokens": 100}}
    host.ids = (5,) * 100
    short = {"inputs": [ids_input(triton_grpc, [6])], "request_id": "short", "parameters": {"max_tokens": 2}}
    answers = await asyncio.to_thread(stream, servers, long, short)
    finals = [one.id for one in answers if one.parameters["triton_final_response"].bool_param]
    assert finals == ["short", "long"]


async def test_an_error_of_a_stream_says_which_request_failed_and_the_others_go_on(
    servers: Servers, host: WritingHost
) -> None:
    def tell() -> list[Any]:
        return stream(
            servers,
            {"inputs": [ids_input(triton_grpc, [99_999])], "request_id": "bad"},
            {"inputs": [ids_input(triton_grpc, [5])], "request_id": "good"},
        )

    answers = await asyncio.to_thread(tell)
    errors = [one for one in answers if isinstance(one, InferenceServerException)]
    assert len(errors) == 1 and "99999" in str(errors[0])
    assert [one.id for one in answers if one not in errors][-1] == "good"


async def test_a_caller_of_a_stream_that_leaves_cancels_its_generation(servers: Servers, host: WritingHost) -> None:
    host.ids, host.every_s = (5,) * 400, 0.01

    async def requests() -> AsyncIterator[Any]:
        yield {"model_name": "talker", "inputs": [ids_input(triton_aio, [5])], "parameters": {"max_tokens": 400}}
        await asyncio.Event().wait()

    async with triton_aio.InferenceServerClient(servers.grpc) as client:
        answers = client.stream_infer(requests())
        async for _ in answers:
            break
        answers.cancel()  # type: ignore[attr-defined]
    await asyncio.wait_for(host.cancelled.wait(), 5)
    await until(lambda: host.under_way == 0)


@pytest.mark.parametrize(("body", "status", "words"), [
    ({}, 400, "one of the inputs"),
    ({"text_input": "a", "input_ids": [1]}, 400, "one of the inputs"),
    ({"text_input": 5}, 400, "must be one text"),
    ({"text_input": "x" * 900_000}, 400, "at most 511 may come"),
    ({"text_input": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"text_input": "a", "max_tokens": 5000}, 400, "context"),
    ({"text_input": "a", "temperature": "hot"}, 400, "temperature"),
    ({"text_input": "a", "n": 2}, 400, "'n' is not served"),
    ({"text_input": "a", "parameters": {"repetition_penalty": 1.2}}, 400, "'repetition_penalty' is not served"),
    ({"input_ids": [5], "stop_words": "tide"}, 400, "'stop_words' is not served"),
    ({"text_input": "a", "stop": [5]}, 400, "stop"),
    ({"text_input": "a", "stop": ["x"] * 17}, 400, "stop"),
    ({"text_input": "a", "parameters": {"x": {}}}, 400, "'x' must be"),
    ({"text_input": "a", "parameters": [1]}, 400, "must be an object"),
    ({"input_ids": []}, 400, "got 0"),
    ({"input_ids": [-1]}, 400, "token ids"),
    ({"input_ids": [99_999]}, 400, "99999"),
    ({"input_ids": [5] * 512}, 400, "the prompt has 512 tokens; at most 511 may come"),
    ([], 400, "JSON"),
])  # fmt: skip
async def test_a_wrong_request_is_refused(
    servers: Servers, host: WritingHost, body: Any, status: int, words: str
) -> None:
    for path in ("generate", "generate_stream"):
        got, answer = await generate(servers, body, path)
        assert got == status
        assert words in json.loads(answer)["error"]
    assert host.asked == []


async def test_a_model_that_generates_nothing_says_so(servers: Servers) -> None:
    status, body = await generate(servers, {"text_input": "a"}, model="minilm")
    assert (status, json.loads(body)["error"]) == (501, "model 'minilm' generates no text")


async def test_errors_before_the_first_token_have_their_status_and_later_ones_are_events(
    servers: Servers, host: WritingHost
) -> None:
    host.fails_at, host.failure = 0, NothingAlive("no target is up")
    status, body = await generate(servers, {"text_input": "a"}, "generate_stream")
    assert (status, json.loads(body)["code"]) == (503, "nothing_alive")
    host.fails_at, host.failure = 2, Unreachable("killed")
    status, body = await generate(servers, {"text_input": "a"}, "generate_stream")
    assert (status, events(body)[-1]) == (200, {"error": "killed", "code": "unreachable"})


async def test_the_configuration_says_that_answers_are_decoupled(servers: Servers) -> None:
    async with triton_http.InferenceServerClient(servers.http) as client:
        assert (await client.get_model_config("talker"))["model_transaction_policy"] == {"decoupled": True}
        assert (await client.get_model_config("minilm"))["model_transaction_policy"] == {"decoupled": False}


async def test_without_its_text_side_a_model_takes_and_gives_ids(folder: Path, tmp_path: Path) -> None:
    host = WritingHost(text_side_folder(folder))
    async with serving(host, tmp_path) as servers:
        status, body = await generate(servers, {"input_ids": [5]})
        assert (status, "text_output" in json.loads(body)) == (200, False)
        status, body = await generate(servers, {"text_input": "a"})
        assert (status, "takes and gives token ids only" in json.loads(body)["error"]) == (501, True)
        async with triton_http.InferenceServerClient(servers.http) as client:
            result = await client.infer("talker", [ids_input(triton_http, [5])])
            assert result.as_numpy("output_ids").size and result.as_numpy("text_output") is None
