"""What a request for text may hold: large bodies leave the event loop alone, and are refused before they are parsed."""

from __future__ import annotations

import io
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.models.text_side import text_side_folder
from tests.support.serving.oip_servers import Servers, serving
from tests.support.serving.writing_host import WritingHost
from tidegate.oip.body_budget import BodyLimits
from tidegate.oip.content_limits import MAX_CHAT_VALUES, MIN_PROMPT_BYTES, ContentLimits
from tidegate.oip.http import generate
from tidegate.oip.offload import LARGE_BYTES
from tidegate.openai import generation

LIMITS = ContentLimits(max_prompt_tokens=4096)
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/v2/models/talker/generate"
PARSED_IN: dict[str, ModuleType] = {CHAT: generation, COMPLETION: generation, GENERATE: generate}


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    host = WritingHost(text_side_folder(tmp_path))
    async with serving(host, tmp_path, limits=LIMITS, max_body_bytes=2 * MIN_PROMPT_BYTES) as running:
        yield running


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A request for text, in the form of each route."""
    prompts = {CHAT: {"messages": [{"role": "user", "content": text}]}, COMPLETION: {"prompt": text}}
    return {"model": "talker", **prompts.get(path, {"text_input": text}), **fields}


async def post(servers: Servers, path: str, sent: dict[str, Any]) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{servers.http}{path}", data=io.BytesIO(msgspec.json.encode(sent))) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.slow
@pytest.mark.parametrize("path", PARSED_IN)
async def test_a_large_body_is_counted_and_parsed_beside_the_loop_and_a_small_one_on_it(
    servers: Servers, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    check: Callable[..., int] = PARSED_IN[path].check_prompt_json

    def noted(*args: Any, **named: Any) -> int:
        threads.append(threading.get_ident())
        return check(*args, **named)

    monkeypatch.setattr(PARSED_IN[path], "check_prompt_json", noted)
    small, _ = await post(servers, path, body(path, "the tide"))
    large, said = await post(servers, path, body(path, "the tide " * (LARGE_BYTES // 8)))
    assert (small, large) == (200, 400) and "at least" in said  # it is read, and has too many tokens
    here = threading.get_ident()
    assert threads[0] == here and threads[1] != here


@pytest.mark.slow
@pytest.mark.parametrize("path", PARSED_IN)
async def test_more_bytes_or_values_than_a_request_for_text_needs_are_refused(servers: Servers, path: str) -> None:
    ids = 0 if path == CHAT else LIMITS.max_prompt_tokens
    most = MAX_CHAT_VALUES + ids
    said_already = len(body(path, "").keys()) + (1 if path == CHAT else 0)
    for more in (0, 1):
        many = most - said_already + more
        sent = body(path, "the tide", **({"stop": ["x"] * many} if path == GENERATE else {"metadata": [0] * many}))
        let_in = 400 if path == GENERATE else 200  # so many are let in, and are too many stop strings
        assert (await post(servers, path, sent))[0] == (413 if more else let_in)
    got, said = await post(servers, path, body(path, "x" * MIN_PROMPT_BYTES))
    assert got == 413 and str(MIN_PROMPT_BYTES) in said


@pytest.mark.parametrize(("max_prompt_tokens", "most_bytes"), [(1, 2**21), (2**17, 8 * 2**20)])
def test_longer_prompts_may_have_larger_bodies(max_prompt_tokens: int, most_bytes: int) -> None:
    limits = ContentLimits(max_prompt_tokens=max_prompt_tokens)
    assert limits.max_prompt_bytes == most_bytes
    assert limits.max_prompt_values(ids=True) - limits.max_prompt_values(ids=False) == max_prompt_tokens
    assert ContentLimits(max_json_elements=10).max_prompt_values(ids=True) == 10


async def test_what_a_chat_becomes_in_memory_counts_as_held(tmp_path: Path) -> None:
    host = WritingHost(text_side_folder(tmp_path))
    calls = [{"role": "assistant", "tool_calls": [{"function": {}}] * 100}] * 20  # 33 KB as JSON
    async with serving(host, tmp_path, body_limits=BodyLimits(max_held_bytes=2**19)) as servers:
        assert (await post(servers, CHAT, body(CHAT, "the tide")))[0] == 200
        status, said = await post(servers, CHAT, {"model": "talker", "messages": calls})
        assert status == 429 and "max_held_bytes" in said
        assert (await post(servers, CHAT, body(CHAT, "the tide")))[0] == 200
