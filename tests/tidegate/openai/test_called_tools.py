"""OpenAI's SDK, unmodified, gets the calls of tools that a model of our own engines writes into its text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.models.text_side import TEMPLATE, text_side_folder
from tests.support.serving.oip_servers import Servers, serving
from tests.support.serving.writing_host import WritingHost
from tidegate.oip.generation.answer import GenerationAnswer, Piece
from tidegate.openai.called_tools import CalledTools, tool_names

TAGGED = TEMPLATE.replace("<tools>", "Call by <tool_call>JSON</tool_call>. <tools>")
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("tide_at", "moon")
]
HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "talker", "messages": HELLO, "tools": TOOLS, "max_tokens": 300}
HIGH = '<tool_call>\n{"name": "tide_at", "arguments": {"port": "Brest"}}\n</tool_call>'
MOON = '<tool_call>{"name": "moon", "arguments": {}}</tool_call>'


@pytest.fixture
def host(tmp_path: Path) -> WritingHost:
    return WritingHost(text_side_folder(tmp_path, template=TAGGED, context=1024))


@pytest.fixture
async def servers(tmp_path: Path, host: WritingHost) -> AsyncIterator[Servers]:
    async with serving(host, tmp_path) as running:
        yield running
    assert host.under_way == 0


@pytest.fixture
async def client(servers: Servers) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any", max_retries=0) as made:
        yield made


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert all(one.id.startswith("call_") and one.type == "function" for one in message.tool_calls)
    assert len({one.id for one in message.tool_calls}) == len(message.tool_calls)
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7])
async def test_calls_are_apart_from_the_text_whole_and_streamed(
    host: WritingHost, client: openai.AsyncOpenAI, batch: int
) -> None:
    host.text, host.batch = f"Let me see.\n{HIGH}\n{MOON}", batch
    made = await client.chat.completions.create(**ASKED)
    (choice,) = made.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert calls_of(choice.message) == [("tide_at", {"port": "Brest"}), ("moon", {})]
    assert made.usage is not None
    assert made.usage.completion_tokens == len(host.tokenizer.encode(host.text).ids) + 1

    async with client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        seen = [event.type async for event in stream]
        last = await stream.get_final_completion()
    assert seen.count("tool_calls.function.arguments.done") == 2
    (streamed,) = last.choices
    assert (streamed.message.content, streamed.finish_reason) == ("Let me see.", "tool_calls")
    assert calls_of(streamed.message) == [("tide_at", {"port": "Brest"}), ("moon", {})]
    assert last.usage is not None and last.usage.completion_tokens == made.usage.completion_tokens


@pytest.mark.slow
async def test_a_stream_with_tools_comes_token_by_token_and_wakes_its_front_at_the_beginning_and_the_end(
    host: WritingHost, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.text, host.every_s = f"Let me see.\n{HIGH}", 0.001
    takes, take = list[int](), CalledTools.take

    def counted(self: CalledTools, answer: GenerationAnswer) -> Awaitable[list[Piece]]:
        takes.append(1)
        return take(self, answer)

    monkeypatch.setattr(CalledTools, "take", counted)
    stream = await client.chat.completions.create(**ASKED, stream=True)
    parts = [chunk.choices[0].delta async for chunk in stream]
    text = [part.content for part in parts if part.content]
    assert ("".join(text), len(text) > 3) == ("Let me see.", True)
    assert [part.tool_calls[0].function.name for part in parts if part.tool_calls] == ["tide_at"]
    assert len(takes) <= 3


@pytest.mark.slow
async def test_an_answer_of_one_call_alone_has_no_content_and_goes_back_into_the_next_prompt(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.text = HIGH
    message = (await client.chat.completions.create(**ASKED)).choices[0].message
    assert message.content is None and message.tool_calls is not None
    host.text = "It is high at noon."
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
    after = await client.chat.completions.create(**ASKED | {"messages": [*HELLO, message, result]})
    assert (after.choices[0].message.content, after.choices[0].finish_reason) == ("It is high at noon.", "stop")
    assert after.choices[0].message.tool_calls is None
    assert "<|im_start|>tool\nnoon" in host.prompt()


@pytest.mark.slow
async def test_one_call_at_a_time_is_given_where_that_is_asked_for(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.text = HIGH + MOON
    made = await client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    assert calls_of(made.choices[0].message) == [("tide_at", {"port": "Brest"})]


@pytest.mark.slow
async def test_an_answer_that_is_cut_says_so_and_half_a_call_is_text(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.text = HIGH
    whole = len(host.tokenizer.encode(HIGH).ids)
    made = await client.chat.completions.create(**ASKED | {"max_tokens": whole - 20})
    (choice,) = made.choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content and HIGH.startswith(choice.message.content)
    host.text = HIGH + MOON
    made = await client.chat.completions.create(**ASKED | {"max_tokens": whole + 3})
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].message.tool_calls is not None and len(made.choices[0].message.tool_calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [{"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}, {"tools": [TOOLS[1]]}],
    ids=["without tools", "none may be called", "another tool"],
)
async def test_what_calls_no_tool_of_the_request_is_text(
    host: WritingHost, client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    host.text = HIGH
    for stream in (False, True):
        made = await client.chat.completions.create(**ASKED | asked, stream=stream)
        if stream:
            parts = [chunk.choices[0] async for chunk in made]
            assert "".join([one.delta.content or "" for one in parts]) == HIGH
            assert parts[-1].finish_reason == "stop"
        else:
            assert (made.choices[0].message.content, made.choices[0].finish_reason) == (HIGH, "stop")


@pytest.mark.slow
async def test_a_model_whose_form_is_not_known_gives_its_calls_as_text(tmp_path: Path) -> None:
    host = WritingHost(text_side_folder(tmp_path, context=1024))
    host.text = HIGH
    async with (
        serving(host, tmp_path) as servers,
        openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any", max_retries=0) as client,
    ):
        made = await client.chat.completions.create(**ASKED)
    assert made.choices[0].message.content == HIGH


@pytest.mark.slow
async def test_logprobs_and_usage_count_every_token_of_a_call(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    host.text = f"see {HIGH} \n"
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(**ASKED, logprobs=True, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    said = [one.choices[0].logprobs for one in chunks if one.choices and one.choices[0].logprobs is not None]
    tokens = len(host.tokenizer.encode(host.text).ids)
    assert sum(len(one.content or ()) for one in said) == tokens
    counted = [one.usage.completion_tokens for one in chunks if one.choices and one.usage is not None]
    assert counted[-1] == tokens and counted == sorted(counted)


def test_what_a_target_of_text_has_read_passes_as_it_is() -> None:
    called = CalledTools("tagged", {"moon"}, new_id=lambda: "call_1")
    own = Piece("", (), more={"tool_calls": [{"index": 0, "id": "theirs"}]})
    assert called.read([Piece("a <tool", ())]) == [Piece("a", ())]
    assert called.read([own]) == [Piece(" <tool", ()), own]
    assert called.rest() == []


def test_tools_are_known_by_their_names() -> None:
    given = [*TOOLS, {"name": "bare"}, {"function": "x"}, {"function": {"name": 3}}, {}]
    assert tool_names(given) == {"tide_at", "moon", "bare"}
