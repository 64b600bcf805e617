"""Text from a generating model behind a whole gateway, by the clients that people have.

OpenAI's SDK, Triton's client, and LangChain's from the environment that `make clients` sets up.
"""

from __future__ import annotations

import asyncio
import json
import queue
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from tests.support.gateway.text_gateway import text_gateway, text_repository
from tests.support.serving.writing_host import until
from tidegate.config import load

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".venv-clients"
LANGCHAIN = next(CLIENTS.glob("lib/python*/site-packages/langchain_openai"), None)

HELLO: Any = [{"role": "user", "content": "when does the tide come in?"}]


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.addresses['http']}/v1", api_key="any", max_retries=0)


async def test_a_chat_streams_from_an_edge_and_says_so(tmp_path: Path) -> None:
    async with text_gateway(tmp_path) as (gateway, _), sdk(gateway) as client:
        whole = await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=40)
        stream = await client.chat.completions.create(
            model="talker", messages=HELLO, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])
        assert text == whole.choices[0].message.content != ""
        assert stream.response.headers["tidegate-served-by"] == "edge/till"
        assert "variant=paced" in stream.response.headers["tidegate-route"]
        assert (chunks[-2].choices[0].finish_reason, whole.choices[0].finish_reason) == ("length", "length")
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 40
        assert gateway.admission.in_flight == 0


async def test_a_caller_that_leaves_frees_the_edges_slot(tmp_path: Path) -> None:
    async with text_gateway(tmp_path, step_ms=20.0) as (gateway, _), sdk(gateway) as client:
        for _ in range(6):  # more than there are slots
            stream = await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=400, stream=True)
            async for _ in stream:
                break
            await stream.close()
        await until(lambda: gateway.admission.in_flight == 0)
        made = await client.completions.create(model="talker", prompt="the tide", max_tokens=2)
        assert made.usage is not None and made.usage.completion_tokens == 2


async def test_a_stop_string_frees_the_edges_slot_and_ends_the_answer_as_an_answer(tmp_path: Path) -> None:
    async with text_gateway(tmp_path, step_ms=5.0) as (gateway, _), sdk(gateway) as client:
        whole = await client.completions.create(model="talker", prompt="a", max_tokens=60)
        text = whole.choices[0].text
        cut = await client.completions.create(model="talker", prompt="a", max_tokens=60, stop=text[20:24])
        assert cut.choices[0].text == text[: text.index(text[20:24])]
        assert cut.choices[0].finish_reason == "stop"
        await until(lambda: gateway.admission.in_flight == 0)
        newest = next(reversed(gateway.dispatcher.recorder))
        assert newest.outcome == "ok" and newest.answer is not None and newest.answer.usage is not None
        usage, told = newest.answer.usage, cut.usage
        assert told is not None and usage.finish_reason == "stop"
        assert usage.prompt_tokens == told.prompt_tokens
        assert told.completion_tokens <= usage.completion_tokens < 60


async def test_an_answer_that_a_stop_string_ends_says_what_others_say(tmp_path: Path) -> None:
    async with text_gateway(tmp_path, step_ms=5.0) as (gateway, _), aiohttp.ClientSession() as session:

        async def asked(**more: Any) -> tuple[dict[str, str], str]:
            sent = {"model": "talker", "prompt": "a", "max_tokens": 60, "temperature": 0, **more}
            async with session.post(f"{gateway.addresses['http']}/v1/completions", json=sent) as answer:
                return dict(answer.headers), await answer.text()

        def newest() -> str:
            record = next(reversed(gateway.dispatcher.recorder))
            return gateway.dispatcher.recorder.name_of(record.number)

        others, body = await asked()
        text = json.loads(body)["choices"][0]["text"]
        headers, body = await asked(stop=text[20:24])
        assert json.loads(body)["choices"][0]["text"] == text[: text.index(text[20:24])]
        assert headers["tidegate-request-id"] == newest()
        assert {name for name in others if name.startswith("tidegate-")} <= set(headers)
        _, body = await asked(stop=text[20:24], stream=True)
        last = json.loads(body.split("data: ")[-2])
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["tidegate"]["tidegate-request-id"] == newest()


async def test_tritons_client_gets_a_decoupled_stream(tmp_path: Path) -> None:
    def ask(address: str) -> list[Any]:
        found: queue.Queue[Any] = queue.Queue()
        tensor = triton_grpc.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"the tide"], dtype=object))
        with triton_grpc.InferenceServerClient(address) as client:
            client.start_stream(callback=lambda result, error: found.put(error or result.get_response()))
            client.async_stream_infer(
                "talker", [tensor], parameters={"max_tokens": 20}, enable_empty_final_response=True
            )
            answers = [found.get(timeout=20)]
            while not answers[-1].parameters["triton_final_response"].bool_param:
                answers.append(found.get(timeout=20))
            client.stop_stream()
        return answers

    async with text_gateway(tmp_path) as (gateway, _), sdk(gateway) as client:
        *parts, last = await asyncio.to_thread(ask, gateway.addresses["grpc"])
        ids = [id for part in parts for id in triton_grpc.InferResult(part).as_numpy("output_ids").tolist()]
        assert len(parts) > 1 and len(ids) == 20
        assert last.parameters["tidegate-served-by"].string_param == "edge/till"
        text = b"".join([triton_grpc.InferResult(part).as_numpy("text_output").item() for part in parts])
        made = await client.completions.create(model="talker", prompt="the tide", max_tokens=20)
        assert text.decode() == made.choices[0].text


@pytest.mark.clients
@pytest.mark.skipif(LANGCHAIN is None, reason="needs `make clients`")
async def test_langchain_gets_what_openais_sdk_gets(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "clients" / "langchain_client.py"
    asked: Any = [{"role": "system", "content": "be brief"}, *HELLO]
    async with text_gateway(tmp_path) as (gateway, _), sdk(gateway) as client:
        chat = await client.chat.completions.create(model="talker", messages=asked, max_tokens=40)
        plain = await client.completions.create(model="talker", prompt="the tide", max_tokens=40)

        told = await json_of(CLIENTS / "bin" / "python", script, gateway.addresses["http"], "talker", "40")

        text, usage = chat.choices[0].message.content, chat.usage
        assert text and usage is not None
        for way in ("invoke", "stream", "astream"):
            found = told[way]
            assert (found["text"], found["finish_reason"], found["served_by"]) == (text, "length", "edge/till"), way
            assert found["usage"] == [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens], way
        assert min(told["stream"]["parts"], told["astream"]["parts"]) > 10  # token by token, not in one piece
        assert told["batch"] == [text] * 3
        assert told["completion"] == "".join(told["completion_stream"]) == plain.choices[0].text
        assert len(told["completion_stream"]) > 10
        assert told["error"][:2] == ["BadRequestError", "context_length_exceeded"]
        await until(lambda: gateway.admission.in_flight == 0)  # it left one in the middle


async def json_of(*command: object) -> Any:
    """What a program prints as its last line."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return json.loads(output.splitlines()[-1])


async def test_an_edge_that_dies_in_the_middle_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async with text_gateway(tmp_path, step_ms=20.0) as (gateway, edge), sdk(gateway) as client:
        stream = await client.completions.create(model="talker", prompt="a", max_tokens=400, stream=True)
        with pytest.raises(openai.APIError) as failed:
            async for _ in stream:
                await edge.__aexit__(None, None, None)
        assert json.dumps(failed.value.body)
        assert gateway.admission.in_flight == 0


async def test_an_edge_speaks_text_to_its_own_callers(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path)
    settings: dict[str, Any] = {"name": "till", "grpc_port": 0, "http_port": 0, "model_repository": models}
    settings |= {"state_dir": tmp_path / "state", "warmup_budget_s": 0.5}
    async with EdgeApp(load(EdgeConfig, **settings), draw=lambda: 0.1) as edge:
        http = edge.addresses["http"]
        async with openai.AsyncOpenAI(base_url=f"{http}/v1", api_key="any", max_retries=0) as client:
            whole = await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=40)
            stream = await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=40, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content != ""
            listed = [model.model_extra async for model in client.models.list()]
            assert listed[0] is not None and "/v1/chat/completions" in listed[0]["tidegate"]["paths"]
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{http}/v2/models/talker/generate", json={"text_input": "a", "max_tokens": 5}) as answer,
        ):
            assert len((await answer.json())["output_ids"]) == 5


async def test_an_edge_without_the_tokenizer_gives_ids(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path)
    settings: dict[str, Any] = {"name": "till", "grpc_port": 0, "http_port": 0, "model_repository": models}
    settings |= {"state_dir": tmp_path / "state", "warmup_budget_s": 0.5, "openai": False}
    async with (
        EdgeApp(load(EdgeConfig, **settings), draw=lambda: 0.1) as edge,
        aiohttp.ClientSession(edge.addresses["http"]) as session,
    ):
        for body, status in (({"input_ids": [5], "max_tokens": 5}, 200), ({"text_input": "a"}, 501)):
            async with session.post("/v2/models/talker/generate", json=body) as answer:
                assert answer.status == status
