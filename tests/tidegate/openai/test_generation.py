"""OpenAI's own SDK, unmodified, against generating models; and callers that are not as well behaved."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.support.models.text_side import text_side_folder
from tests.support.serving.host import minilm
from tests.support.serving.oip_servers import Servers, serving
from tests.support.serving.writing_host import WritingHost, until
from tidegate.generate.text.token_text import TokenText
from tidegate.oip.body_budget import BodyLimits
from tidegate.oip.generation.answer import Piece
from tidegate.oip.guard import OpenGuard, PresentedCredentials
from tidegate.openai.generated import ChatForm, CompletionForm, Events
from tidegate.outcome import NothingAlive, ServeError, Unauthenticated, Unreachable
from tidegate.token_sink import TopLogprob

HELLO: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SERVED = "cheapest; variant=paced; attempts=1; hedged=0; fallback=0; degraded=0; provisional=0"


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


@pytest.fixture
async def client(servers: Servers) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any", max_retries=0) as made:
        yield made


async def post(servers: Servers, path: str, **body: Any) -> tuple[int, dict[str, str], bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{servers.http}{path}", json={"model": "talker", **body}) as answer,
    ):
        return answer.status, {key.lower(): value for key, value in answer.headers.items()}, await answer.read()


def events(body: bytes) -> list[Any]:
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


@pytest.mark.slow
async def test_a_chat_is_rendered_by_the_models_template_and_answered_at_once(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    made = await client.chat.completions.create(model="talker", messages=HELLO, temperature=0.5, top_p=0.9, seed=7)

    assert host.prompt() == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    asked = host.asked[0]
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (0.5, 0.9, 7)
    assert host.calls[0].tokens is None  # so that the gateway may begin it again elsewhere
    choice = made.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant", "the tide comes in", "stop",
    )  # fmt: skip
    usage = made.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    written = len(host.tokenizer.encode("the tide comes in").ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(asked.prompt), written + 1)
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (len(asked.prompt) + written + 1, 3)
    assert made.model_extra is not None
    assert made.model_extra["tidegate"]["tidegate-served-by"] == "edge/attic"
    assert made._request_id == "3fa09c-1"  # noqa: SLF001 - public, despite its underscore


@pytest.mark.slow
async def test_a_chat_streams_each_token_as_it_comes(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="talker", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.response.headers["tidegate-served-by"] == "edge/attic"
    assert stream.response.headers["tidegate-route"] == SERVED
    ids = host.tokenizer.encode("the tide comes in").ids
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == [host.tokenizer.decode([id]) for id in ids]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.completion_tokens) == ([], len(ids) + 1)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.slow
async def test_a_target_that_answers_in_one_piece_streams_all_the_same(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.in_one_piece = True
    stream = await client.chat.completions.create(model="talker", messages=HELLO, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "the tide comes in"
    assert stream.response.headers["server-timing"] == "queue;dur=1.000"


@pytest.mark.slow
async def test_a_stop_string_over_several_tokens_is_never_shown_and_ends_the_work(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.text, host.every_s = "the tide comes in and the tide goes out", 0.001
    stream = await client.chat.completions.create(
        model="talker", messages=HELLO, stream=True, stop=["in and", "zzz"], stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    shown = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(shown) == "the tide comes "
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(host.tokenizer.encode("the tide comes in and").ids)
    await until(lambda: host.left == 1)
    whole = await client.chat.completions.create(model="talker", messages=HELLO, stop="in and")
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("the tide comes ", "stop")


async def test_characters_of_several_tokens_come_whole(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    host.text = "höher 🌊🌕 flut"
    stream = await client.completions.create(model="talker", prompt="a", max_tokens=64, stream=True)
    parts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(parts) == host.text
    assert not any("\ufffd" in part for part in parts)


async def test_a_completion_takes_text_or_tokens(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    ids = host.tokenizer.encode("the moon").ids
    for prompt in ("the moon", ["the moon"], ids, [ids]):
        made = await client.completions.create(model="talker", prompt=prompt, max_tokens=2)
        assert host.asked[-1].prompt == tuple(ids)
        assert (made.choices[0].text, made.choices[0].finish_reason) == ("the tide", "length")
        assert made.object == "text_completion"


async def test_an_answer_gets_what_room_there_is_where_its_caller_does_not_say(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    for prompt, most in (([5], 16), ([5] * 505, 7)):
        await client.completions.create(model="talker", prompt=prompt)
        assert host.asked[-1].max_tokens == most


@pytest.mark.slow
async def test_logprobs_have_the_forms_of_both_interfaces(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="talker", messages=HELLO, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("the", -0.5, list(b"the"))
    assert [one.logprob for one in first.top_logprobs] == [-0.5, -1.5]

    stream = await client.chat.completions.create(model="talker", messages=HELLO, logprobs=True, stream=True)
    said = [chunk.choices[0].logprobs async for chunk in stream]
    assert [one.content[0].token for one in said if one and one.content][:2] == ["the", " tide"]

    plain = await client.completions.create(model="talker", prompt="a", logprobs=1, max_tokens=2)
    given = plain.choices[0].logprobs
    assert given is not None
    assert (given.tokens, given.token_logprobs, given.text_offset) == (["the", " tide"], [-0.5, -0.5], [0, 3])


@pytest.mark.slow
async def test_logprobs_of_parts_of_characters_have_their_bytes_and_their_place(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.text = "🌊海 the"
    ids = host.tokenizer.encode(host.text).ids
    chat = await client.chat.completions.create(model="talker", messages=HELLO, logprobs=True, top_logprobs=5)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    said = chat.choices[0].logprobs.content
    assert b"".join([bytes(one.bytes or []) for one in said]).decode() == chat.choices[0].message.content == host.text
    assert [one.token for one in said][:4] == [r"\xf0", r"\x9f", r"\x8c", r"\x8a"]
    assert [bytes(one.bytes or []) for one in said[0].top_logprobs[:2]] == [b"\xf0", b"\xf1"]

    plain = await client.completions.create(model="talker", prompt="a", logprobs=5)
    given = plain.choices[0].logprobs
    assert given is not None and given.tokens is not None and given.top_logprobs is not None
    assert given.tokens[:2] == [r"bytes:\xf0", r"bytes:\x9f"] and given.tokens[-1] == " the"
    assert given.top_logprobs[0][r"bytes:\xf0"] == -0.5 and [len(one) for one in given.top_logprobs] == [5] * len(ids)
    assert given.text_offset == [0, 0, 0, 0, 1, 1, 1, 2]

    stream = await client.completions.create(model="talker", prompt="a", logprobs=1, stream=True)
    offsets = [chunk.choices[0].logprobs async for chunk in stream]
    assert [at for one in offsets if one and one.text_offset for at in one.text_offset] == given.text_offset


def test_of_tokens_that_are_spelled_alike_the_likelier_stays_and_none_begins_behind_its_piece() -> None:
    held = Piece("a", (1, 2, 3), (-1.0,) * 3, ((TopLogprob(1, -0.5), TopLogprob(2, -2.0)),) * 3)
    said = CompletionForm().logprobs([held, Piece("c", (4,))], lambda id: TokenText(b"a stop"), 7)
    assert said["top_logprobs"] == [{"a stop": -0.5}] * 3 + [{}]
    assert said["text_offset"] == [7, 8, 8, 8]


async def test_usage_can_come_with_every_event(servers: Servers) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, body = await post(servers, "/v1/completions", prompt="a", stream=True, stream_options=options)
    counted = [event["usage"]["completion_tokens"] for event in events(body)[:-3]]
    assert counted == list(range(1, len(counted) + 1))


async def test_usage_with_every_event_counts_no_token_twice_where_text_was_held_back(servers: Servers) -> None:
    """The end of this text might have begun a stop string: it comes by itself, after its token."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "a", "stop": "in and", "max_tokens": 4}
    _, _, body = await post(servers, "/v1/completions", stream=True, stream_options=options, **asked)
    *during, _end, last, _done = events(body)
    assert [event["choices"][0]["text"] for event in during] == ["the", " tide", " comes", " ", "in"]
    assert [event["usage"]["completion_tokens"] for event in during] == [1, 2, 3, 4, 4]
    assert last["usage"]["completion_tokens"] >= 4


def test_pieces_of_a_text_count_as_tokens_where_no_ids_come() -> None:
    def counted(*pieces: Piece) -> list[int]:
        events = Events(ChatForm(), {"id": "x"}, include_usage=True, prompt_tokens=3)
        return [json.loads(events.pieces([one])[6:])["usage"]["completion_tokens"] for one in pieces]

    assert counted(Piece("ab", (1,)), Piece("c", (2, 3)), Piece("held back", ())) == [1, 3, 3]
    assert counted(Piece("ab", ()), Piece("", (), more={}), Piece("c", ())) == [1, 2, 3]


@pytest.mark.slow
async def test_a_schema_goes_to_the_engine(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"tide": {"type": "number"}}}
    await client.chat.completions.create(
        model="talker",
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(host.asked[-1].schema) == schema
    await client.chat.completions.create(model="talker", messages=HELLO, response_format={"type": "json_object"})
    assert json.loads(host.asked[-1].schema) == {"type": "object"}


@pytest.mark.slow
async def test_tools_are_rendered_where_the_template_has_them(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "tide_at", "parameters": {"type": "object"}}}
    await client.chat.completions.create(model="talker", messages=HELLO, tools=[tool])
    assert '<tools>[{"type": "function"' in host.prompt()
    await client.chat.completions.create(model="talker", messages=HELLO, tools=[tool], tool_choice="none")
    assert "<tools>" not in host.prompt()


@pytest.mark.slow
async def test_min_p_goes_to_the_engine(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="talker", messages=HELLO, extra_body={"min_p": 0.125})
    assert host.asked[-1].sampling.min_p == 0.125
    await client.completions.create(model="talker", prompt="the tide")
    assert host.asked[-1].sampling.min_p == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_wishes_that_the_template_does_not_take_are_named_in_the_answer(servers: Servers, stream: bool) -> None:
    wishes = {"reasoning_effort": "low", "verbosity": "high"}
    status, headers, _ = await post(servers, "/v1/chat/completions", messages=HELLO, stream=stream, **wishes)
    assert status == 200
    assert headers["tidegate-warning"] == (
        "the chat template of this model does not take reasoning_effort; "
        "the chat template of this model does not take verbosity"
    )
    status, headers, _ = await post(servers, "/v1/chat/completions", messages=HELLO, stream=stream)
    assert (status, "tidegate-warning" in headers) == (200, False)


@pytest.mark.slow
async def test_wishes_that_the_template_takes_are_rendered(tmp_path: Path) -> None:
    host = WritingHost(text_side_folder(tmp_path, template="<effort>{{ reasoning_effort }}{{ messages[0].content }}"))
    async with serving(host, tmp_path) as running:
        status, headers, _ = await post(running, "/v1/chat/completions", messages=HELLO, reasoning_effort="low")
        assert (status, "tidegate-warning" in headers) == (200, False)
        assert "<effort>low" in host.prompt()


@pytest.mark.slow
async def test_variables_of_a_chats_template_are_rendered_and_others_are_named_in_the_answer(tmp_path: Path) -> None:
    template = "{% if enable_thinking is false %}<quiet>{% endif %}<{{ budget }}>{{ messages[0].content }}"
    host = WritingHost(text_side_folder(tmp_path, template=template))
    given = {"enable_thinking": False, "budget": 5}
    async with serving(host, tmp_path) as running:
        status, headers, _ = await post(running, "/v1/chat/completions", messages=HELLO, chat_template_kwargs=given)
        assert (status, "tidegate-warning" in headers) == (200, False)
        assert host.prompt().startswith("<quiet><5>")
        more = given | {"date": "today"}
        status, headers, _ = await post(running, "/v1/chat/completions", messages=HELLO, chat_template_kwargs=more)
        assert (status, headers["tidegate-warning"]) == (200, "the chat template of this model does not take date")
        await post(running, "/v1/chat/completions", messages=HELLO)
        assert host.prompt().startswith("<>")


async def test_the_models_say_what_they_can_do(servers: Servers) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"http://{servers.http}/v1/models") as answer:
        listed = {one["id"]: one for one in (await answer.json())["data"]}
    assert listed["minilm"]["tidegate"] == {"paths": ["/v1/embeddings"]}
    assert listed["talker"]["tidegate"] == {"paths": ["/v1/chat/completions", "/v1/completions"]}
    assert listed["talker"]["max_model_len"] == 512


@pytest.mark.parametrize(("path", "asked", "status", "parameter", "words"), [
    ("chat", {"messages": []}, 400, "messages", "must not be an empty list"),
    ("chat", {"messages": [{"role": "oracle", "content": "x"}]}, 400, "messages", "messages[0].role is 'oracle'"),
    ("chat", {"messages": [{"role": "user"}]}, 400, "messages", "messages[0] has no content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "image_url"),
    ("chat", {"messages": HELLO, "n": 2}, 400, "n", "n is 2"),
    ("chat", {"messages": HELLO, "stop": list("abcde")}, 400, "stop", "at most 4"),
    ("chat", {"messages": HELLO, "stop": ""}, 400, "stop", "from 1 to"),
    ("chat", {"messages": HELLO, "temperature": 9}, 400, "temperature", "<= 2.0"),
    ("chat", {"messages": HELLO, "min_p": 1.5}, 400, "min_p", "<= 1.0"),
    ("chat", {"messages": HELLO, "verbosity": "High!"}, 400, "verbosity", "regex"),
    ("chat", {"messages": HELLO, "chat_template_kwargs": {"bos_token": "x"}}, 400, "chat_template_kwargs", "bos_token"),
    ("chat", {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens", ">= 1"),
    ("chat", {"messages": HELLO, "max_tokens": 500}, 400, "max_tokens", "the model's context has 512"),
    ("chat", {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
    ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 99}, 400, "logprobs", "from 0 to 20"),
    ("chat", {"messages": HELLO, "presence_penalty": 1.0}, 400, "presence_penalty", "not served"),
    ("chat", {"messages": HELLO, "logit_bias": {"5": 1}}, 400, "logit_bias", "not served"),
    ("chat", {"messages": HELLO, "repetition_penalty": 1.2}, 400, "repetition_penalty", "not served"),
    ("chat", {"messages": HELLO, "guided_json": {"type": "object"}}, 400, "guided_json", "not served"),
    ("completions", {"prompt": "x", "min_tokens": 4}, 400, "min_tokens", "not served"),
    ("chat", {"messages": HELLO, "stop_token_ids": [5, 99_999]}, 400, "stop_token_ids", "not in the vocabulary"),
    ("chat", {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "auto and none"),
    ("chat", {"messages": HELLO, "stream_options": {}}, 400, "stream_options", "stream: true"),
    ("chat", {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format", "needs"),
    ("chat", {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"properties": {"a": {"type": "flaot"}}}}}}, 400, "response_format", "schema.properties.a.type"),
    ("chat", {"messages": [{"role": "user", "content": "tide " * 2000}]}, 400, None, "at most 511 may come"),
    ("chat", {"messages": [{"role": "user", "content": "x" * 900_000}]}, 400, None, "at least"),
    ("chat", {"messages": HELLO, "model": "minilm"}, 400, "model", "call it by /v1/embeddings"),
    ("chat", {"messages": HELLO, "model": "nobody"}, 404, "model", "nobody"),
    ("completions", {"prompt": "x", "echo": True}, 400, "echo", "not served"),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "not served"),
    ("completions", {"prompt": "x", "best_of": 3}, 400, "best_of", "not served"),
    ("completions", {"prompt": ["x", "y"]}, 400, "prompt", "one prompt a request"),
    ("completions", {"prompt": ""}, 400, "prompt", "no token"),
    ("completions", {"prompt": [5, 99999]}, 400, "prompt", "not in the vocabulary"),
    ("completions", {"prompt": [5] * 600}, 400, None, "the prompt has 600 tokens; at most 511 may come"),
])  # fmt: skip
async def test_a_wrong_request_is_refused_by_name_before_anything_is_kept(
    servers: Servers,
    host: WritingHost,
    path: str,
    asked: dict[str, Any],
    status: int,
    parameter: str | None,
    words: str,
) -> None:
    route = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    for stream in ({}, {"stream": True}):
        if "stream_options" in asked and stream:
            continue
        got, headers, body = await post(servers, route, **asked, **stream)
        error = json.loads(body)["error"]
        assert (got, error["param"], headers["content-type"]) == (status, parameter, "application/json")
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
    assert host.asked == []


async def test_half_of_a_surrogate_pair_is_refused(servers: Servers) -> None:
    raw = b'{"model": "talker", "messages": [{"role": "user", "content": "\\ud83c tide"}]}'
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{servers.http}/v1/chat/completions", data=raw) as answer,
    ):
        assert answer.status == 400
        assert "surrogate" in (await answer.json())["error"]["message"]


async def test_too_long_a_prompt_has_openais_code(servers: Servers) -> None:
    _, _, body = await post(servers, "/v1/completions", prompt=[5] * 600)
    assert json.loads(body)["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
async def test_an_error_before_the_first_token_has_its_status(host: WritingHost, client: openai.AsyncOpenAI) -> None:
    host.fails_at, host.failure = 0, NothingAlive("no target is up", retry_after_s=2.0)
    with pytest.raises(openai.InternalServerError) as failed:
        await client.chat.completions.create(model="talker", messages=HELLO, stream=True)
    assert (failed.value.status_code, failed.value.response.headers["retry-after-ms"]) == (503, "2000")


@pytest.mark.slow
async def test_an_error_after_the_first_token_is_an_event_and_the_stream_has_no_end(
    servers: Servers, host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    host.fails_at, host.failure = 2, Unreachable("killed")
    stream = await client.chat.completions.create(model="talker", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="killed"):
        async for _ in stream:
            pass
    status, _, body = await post(servers, "/v1/completions", prompt="a", stream=True)
    assert status == 200
    assert [event["choices"][0]["text"] for event in events(body)[:-1]] == ["the", " tide"]
    assert events(body)[-1]["error"]["code"] == "unreachable"


async def test_a_defect_tells_nothing_of_itself(servers: Servers, host: WritingHost) -> None:
    host.fails_at, host.failure = 2, RuntimeError("secret")
    _, _, body = await post(servers, "/v1/completions", prompt="a", stream=True)
    assert b"secret" not in body
    assert events(body)[-1]["error"]["code"] == "internal"


async def test_what_has_come_meanwhile_goes_in_one_write(servers: Servers, host: WritingHost) -> None:
    host.batch = 4
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{servers.http}/v1/completions", json={"model": "talker", "prompt": "a", "stream": True}
        ) as answer,
    ):
        first, _ = await answer.content.readchunk()
    assert len(events(first)) >= 4


OVER_OIP = "/v2/models/talker/generate_stream"


async def raw_request(
    servers: Servers, body: bytes, path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name, _, port = servers.http.partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel reads for one that does not
    sock.connect((name, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_leaves_cancels_its_generation(servers: Servers, host: WritingHost, stream: bool) -> None:
    host.ids, host.every_s = (100,) * 400, 0.01
    asked = {"model": "talker", "prompt": "a", "stream": stream, "max_tokens": 400}
    reader, writer = await raw_request(servers, json.dumps(asked).encode())
    if stream:
        assert await reader.readuntil(b"data: ")
    else:
        await host.arrived.wait()
    writer.transport.abort()
    await asyncio.wait_for(host.cancelled.wait(), 5)
    assert host.written < 400
    await until(lambda: host.under_way == 0)


@pytest.mark.slow
async def test_a_caller_of_generate_stream_that_leaves_cancels_its_generation(
    servers: Servers, host: WritingHost
) -> None:
    host.ids, host.every_s = (100,) * 400, 0.01
    reader, writer = await raw_request(servers, b'{"text_input": "a", "max_tokens": 400}', OVER_OIP)
    assert await reader.readuntil(b"data: ")
    writer.transport.abort()
    await asyncio.wait_for(host.cancelled.wait(), 5)
    assert host.written < 400


async def test_a_caller_that_leaves_before_the_first_token_cancels_too(servers: Servers, host: WritingHost) -> None:
    host.hold = asyncio.Event()
    _, writer = await raw_request(servers, b'{"model": "talker", "prompt": "a", "stream": true}')
    await host.arrived.wait()
    writer.transport.abort()
    await asyncio.wait_for(host.cancelled.wait(), 5)


async def test_a_caller_of_an_older_http_gets_the_same_events_without_chunks(
    servers: Servers, host: WritingHost
) -> None:
    name, _, port = servers.http.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    asked = b'{"model": "talker", "prompt": "a", "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(asked) + asked)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"chunked" not in head
    text = "".join([event["choices"][0]["text"] for event in events(body)[:-1]])
    assert (text, events(body)[-1]) == ("the tide comes in", "[DONE]")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", OVER_OIP])
async def test_a_caller_that_reads_nothing_pauses_its_generation_and_is_disconnected(tmp_path: Path, path: str) -> None:
    manifest = text_side_folder(tmp_path, context=2**18)
    host = WritingHost(manifest)
    host.ids, host.batch = tuple(host.tokenizer.encode("the").ids) * 60_000, 64
    prompt = {"text_input": "a"} if path == OVER_OIP else {"model": "talker", "prompt": "a", "stream": True}
    asked = json.dumps({**prompt, "max_tokens": 60_000}).encode()
    async with serving(host, tmp_path, body_limits=BodyLimits(stall_s=0.3)) as servers:
        _, writer = await raw_request(servers, asked, path)
        await asyncio.wait_for(host.cancelled.wait(), 20)
        assert host.written < 10_000
        await until(lambda: host.under_way == 0)
        writer.transport.abort()


async def test_a_budget_bounds_the_whole_stream_and_the_sdks_timeout_does_not(
    host: WritingHost, client: openai.AsyncOpenAI
) -> None:
    for stream, deadline in ((True, False), (False, True)):
        await client.completions.create(model="talker", prompt="a", stream=stream, timeout=42.0)
        assert (host.calls[-1].deadline is not None) == deadline
    await client.completions.create(
        model="talker", prompt="a", stream=True, extra_headers={"tidegate-budget-ms": "9000"}
    )
    call = host.calls[-1]
    assert call.deadline is not None
    assert call.deadline - call.arrived_at == pytest.approx(9.0)


async def test_a_model_without_its_tokenizer_here_is_asked_in_ids(tmp_path: Path, folder: Path) -> None:
    host = WritingHost(text_side_folder(folder))
    async with serving(host, tmp_path) as servers:
        status, _, body = await post(servers, "/v1/completions", prompt="a")
        assert status == 501
        assert "send input_ids to /v2/models/talker/infer" in json.loads(body)["error"]["message"]


async def test_a_model_without_a_template_completes_only(tmp_path: Path) -> None:
    host = WritingHost(text_side_folder(tmp_path, template=None))
    async with serving(host, tmp_path) as servers:
        status, _, body = await post(servers, "/v1/chat/completions", messages=HELLO)
        assert (status, json.loads(body)["error"]["param"]) == (400, "model")
        assert "has no chat template" in json.loads(body)["error"]["message"]


class LapsingGuard(OpenGuard):
    """A guard under which the credentials of all streams may lapse at once."""

    def __init__(self, host: WritingHost) -> None:
        super().__init__(host)
        self.followed: list[asyncio.Future[ServeError]] = []

    @contextmanager
    def follow(self, presented: PresentedCredentials) -> Iterator[asyncio.Future[ServeError]]:  # type: ignore[override]
        self.followed.append(asyncio.get_running_loop().create_future())
        yield self.followed[-1]


@pytest.mark.parametrize("path", ["/v1/completions", OVER_OIP])
async def test_a_stream_ends_with_its_credential(folder: Path, host: WritingHost, path: str) -> None:
    host.ids, host.every_s = tuple(host.tokenizer.encode("the").ids) * 400, 0.005
    guard = LapsingGuard(host)
    body = {"model": "talker", "prompt": "a", "stream": True, "max_tokens": 400}
    if path.startswith("/v2"):
        body = {"text_input": "a", "max_tokens": 400}
    async with serving(host, folder, guard=guard) as servers, aiohttp.ClientSession() as session:
        async with session.post(f"http://{servers.http}{path}", json=body) as answer:
            assert await answer.content.readuntil(b"data: ")
            guard.followed[0].set_result(Unauthenticated("the key was revoked"))
            rest = await answer.read()
        assert b"the key was revoked" in rest.split(b"data: ")[-1]
        assert host.left == 1
