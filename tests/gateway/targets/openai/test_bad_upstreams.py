"""What a gateway does about servers that refuse, lie, stall or break off: nothing is unbounded, and no key gets out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from structlog.testing import capture_logs

from gateway.app import Gateway
from gateway.commands.status import upstream_lines
from gateway.targets.openai.api_key import ApiKey
from gateway.targets.openai.dialect import UpstreamRequest
from gateway.targets.openai.upstream_client import UpstreamClient
from gateway.targets.openai.vllm import VllmDialect
from tests.support.models.text_side import tiny_tokenizer
from tests.support.serving.writing_host import until
from tests.support.upstreams.raw_server import HEAD, raw_server, whole
from tests.support.upstreams.scripted_server import ScriptedServer, served
from tests.support.upstreams.tls_server import tls_served
from tests.support.upstreams.upstream_gateway import until_up, upstream_gateway
from tidegate import clock
from tidegate.config import ConfigError
from tidegate.outcome import BadAnswer

pytestmark = pytest.mark.slow

ASKED: Any = [{"role": "user", "content": "when does the tide come in?"}]
KEY = "sk-very-secret-0123456789"


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.addresses['http']}/v1", api_key="any", max_retries=0)


async def refusal_of(gateway: Gateway, **asked: Any) -> openai.APIError:
    async with sdk(gateway) as client:
        with pytest.raises(openai.APIError) as refused:
            given = {"messages": ASKED, "max_tokens": 20, **asked}
            answer = await client.chat.completions.create(model="talker", **given)
            if given.get("stream"):
                [chunk async for chunk in answer]
    return refused.value


def event(said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


# refusals


@pytest.mark.parametrize(("status", "body", "headers", "expected", "code"), [
    (400, {"error": {"message": "its context has 512 tokens", "code": "context_length_exceeded"}},
     {}, 400, "context_length_exceeded"),
    (400, {"object": "error", "message": "the input is longer than the maximum model length", "code": 400},
     {}, 400, "context_length_exceeded"),
    (400, {"error": {"code": 400, "message": "too many", "type": "exceed_context_size_error"}},
     {}, 400, "context_length_exceeded"),
    (422, {"detail": "temperature must not be negative"}, {}, 400, "invalid_request"),
    (413, {"error": {"message": "too large"}}, {}, 413, "too_large"),
    (404, {"error": {"message": "no such model"}}, {}, 502, "bad_answer"),
    (500, {"error": {"message": "cuda"}}, {}, 502, "bad_answer"),
    (503, {"error": {"message": "loading"}}, {}, 503, "nothing_alive"),
])  # fmt: skip
async def test_a_servers_refusal_keeps_its_meaning(
    status: int, body: Any, headers: dict[str, str], expected: int, code: str
) -> None:
    server = ScriptedServer("plain", tiny_tokenizer(), refusal=(status, body, headers))
    async with served(server) as url, upstream_gateway(url) as gateway:
        refused = await refusal_of(gateway)
        assert isinstance(refused, openai.APIStatusError)
        assert (refused.status_code, refused.code) == (expected, code), refused.message


async def test_load_is_load_and_keeps_the_wait_that_is_asked_for() -> None:
    refusal = 429, {"error": {"message": "slow down", "type": "rate_limit_error"}}, {"Retry-After": "0.7"}
    server = ScriptedServer("plain", tiny_tokenizer(), refusal=refusal)
    async with served(server) as url, upstream_gateway(url) as gateway:
        refused = await refusal_of(gateway)
        assert isinstance(refused, openai.RateLimitError)
        assert "slow down" in refused.message
        target = gateway.fleet.targets["pool/up"]
        assert target.refusals >= 1 and not target.ejected  # no fault of its own


async def test_an_error_in_a_stream_that_began_well_is_read_as_one() -> None:
    said = {"error": {"message": "out of pages", "type": "server_error", "code": 500}}
    script = lambda writer: writer.write(HEAD + delta("Hi") + event(said))  # noqa: E731
    async with raw_server(script) as (_, url), upstream_gateway(url) as gateway:
        refused = await refusal_of(gateway, stream=True)
        assert "out of pages" in refused.message


# keys


async def test_a_refused_key_is_the_operators_business_and_is_shown_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    server = ScriptedServer("plain", tiny_tokenizer(), key="another")
    with capture_logs() as logs:
        async with served(server) as url, upstream_gateway(url, api_key_file=tmp_path / "key") as gateway:
            target = gateway.fleet.targets["pool/up"]
            assert not target.up
            assert "openai.api_key_file or openai.api_key_env" in target.reason
            refused = await refusal_of(gateway)
            state = await state_of(gateway)
            shown = [repr(gateway), repr(gateway.directory.targets), repr(gateway.config), repr(vars(gateway))]
            server.key = KEY
            await until_up(gateway)
            server.refusal = 401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}, {}
            late = await refusal_of(gateway)
            server.refusal = 500, {"error": {"message": f"{KEY} made me fail"}}, {}
            later = await refusal_of(gateway)
            shown += [repr(one) for one in gateway.dispatcher.recorder]
    everything = (
        json.dumps(logs, default=repr) + refused.message + late.message + later.message + state + "".join(shown)
    )
    assert KEY not in everything
    assert "openai.api_key_file" in late.message
    assert f"Bearer {KEY}" in server.keys


@pytest.mark.parametrize("before", ["", "x" * 299, "x" * 290, "x" * 280, "x" * 1190])
@pytest.mark.parametrize("form", ["event", "refusal", "text"])
async def test_of_a_key_where_a_servers_words_are_cut_nothing_is_shown(form: str, before: str, tmp_path: Path) -> None:
    key = 'sk/very"secret/0123456789'
    (tmp_path / "key").write_text(key)
    said = json.dumps({"error": {"message": before + key, "code": 500}}).replace("/", "\\/").encode()
    answer = {
        "event": HEAD + b"data: " + said + b"\n\n",
        "refusal": whole(said, "500 Internal Server Error"),
        "text": whole((before + key).encode(), "500 Internal Server Error"),
    }[form]
    script = lambda writer: writer.write(answer)  # noqa: E731
    async with (
        raw_server(script) as (_, url),
        UpstreamClient("pool/up", url, key=ApiKey(file=tmp_path / "key")) as client,
    ):
        with pytest.raises(BadAnswer) as refused:
            async with client.stream(UpstreamRequest("/completions", {})) as events:
                [one async for one in events]
    shown = refused.value.message.removeprefix("pool/up failed (500): ")
    assert shown and set(shown) <= {"x", "*"}


async def state_of(gateway: Gateway) -> str:
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"{gateway.addresses['admin']}/v1/state")
        return await answer.text()


async def test_a_key_that_was_changed_in_its_file_is_used_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("old")
    server = ScriptedServer("plain", tiny_tokenizer(), key="new")
    async with served(server) as url, upstream_gateway(url, api_key_file=tmp_path / "key") as gateway:
        (tmp_path / "key.new").write_text("new")
        (tmp_path / "key.new").rename(tmp_path / "key")
        await until_up(gateway)
        assert server.keys[-1] == "Bearer new"


async def test_a_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    server = ScriptedServer("plain", tiny_tokenizer(), key=KEY)
    async with served(server) as url, upstream_gateway(url, api_key_env="SOME_KEY") as gateway:
        assert gateway.fleet.targets["pool/up"].up
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ConfigError, match=r"SOME_KEY \(key 'openai.api_key_env'\) is not set"):
        async with upstream_gateway(url, api_key_env="SOME_KEY"):
            pass
    monkeypatch.setenv("SOME_KEY", " ")
    with pytest.raises(ConfigError, match=r"SOME_KEY has no key: .* it is empty"):
        async with upstream_gateway(url, api_key_env="SOME_KEY"):
            pass


async def test_a_redirect_is_not_followed_and_its_goal_gets_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    async with raw_server(lambda _: None) as (goal, elsewhere):
        location = f"Location: {elsewhere}/chat/completions\r\n"
        answer = whole(b"{}", "307 Temporary Redirect", location)
        script = lambda writer: writer.write(answer)  # noqa: E731
        async with (
            raw_server(script) as (_, url),
            upstream_gateway(url, api_key_file=tmp_path / "key") as gateway,
        ):
            refused = await refusal_of(gateway)
        assert goal.requests == []
    assert "redirects elsewhere (307)" in refused.message


# streams that are none

SILENCE_S = 0.6  # the head of an answer must come within it, on whatever machine


async def _endless_line(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"data: ")
    for _ in range(200):
        writer.write(b"x" * 65536)
        await writer.drain()


async def _stall(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + delta("Hi"))
    await writer.drain()
    await clock.sleep(60.0)


async def _say_nothing(_: asyncio.StreamWriter) -> None:
    await clock.sleep(60.0)


def _flood(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"".join([delta("x" * 1000)] * 100))


@pytest.mark.parametrize(("script", "words"), [
    (_endless_line, "an event of more than"),
    (_stall, f"sent nothing for {SILENCE_S:g} s"),
    (_say_nothing, "did not answer"),
    (_flood, "a text of more than the 20 tokens"),
    (lambda writer: writer.write(HEAD + b"data: {\"choices\": [\n\n"), "no JSON object"),
    (lambda writer: writer.write(HEAD + b"data: 5\n\n"), "no JSON object"),
    (lambda writer: writer.write(HEAD + b"data: " + b"[" * 5000 + b"\n\n"), "no JSON object"),
    (lambda writer: writer.write(HEAD + b"data: \xff\xfe\n\n"), "no JSON object"),
    (lambda writer: writer.write(HEAD + event({"choices": [{"delta": {"content": 7}}]})), "whose text is none"),
    (lambda writer: writer.write(HEAD + event({"choices": [{"delta": {"tool_calls": [{"index": 2**80}]}}]})), "index"),
    (lambda writer: writer.write(HEAD + delta("Hi") + b"data: {\"cho"), "ended its answer in the middle"),
    (lambda writer: writer.write(HEAD), "ended its answer in the middle"),
    (lambda writer: writer.write(HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")), "compresses"),
    (lambda writer: writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n"), "cannot be reached"),
    (lambda writer: writer.write(b"SSH-2.0-OpenSSH\r\n"), "cannot be reached"),
    (lambda writer: writer.close(), "cannot be reached"),
    (lambda writer: writer.write(whole(b"x" * (2**20 + 9))), "an answer of more than"),
])  # fmt: skip
async def test_what_is_no_answer_ends_as_an_error_with_the_reason(
    script: Callable[[asyncio.StreamWriter], object], words: str
) -> None:
    patience = {"silence_s": SILENCE_S} if script in (_stall, _say_nothing) else {}
    async with raw_server(script) as (_, url), upstream_gateway(url, **patience) as gateway:
        await until_up(gateway)  # its first look may have taken a machine that stands still for a silent server
        refused = await refusal_of(gateway, stream=True)
        assert words in refused.message
        await until(lambda: gateway.admission.in_flight == 0)


@pytest.mark.parametrize("id", [-1, 2**31, 2**70, 1.5, "5", True, None, [1]])
def test_ids_that_are_none_never_reach_a_vocabulary(id: Any) -> None:
    with pytest.raises(BadAnswer, match="token id that is none"):
        VllmDialect().part({"choices": [{"text": "x", "token_ids": [5, id]}]})


async def test_an_answer_in_one_piece_is_an_answer() -> None:
    message = {"role": "assistant", "content": "All at once."}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    script = lambda writer: writer.write(whole(json.dumps(body).encode()))  # noqa: E731
    async with raw_server(script) as (_, url), upstream_gateway(url) as gateway, sdk(gateway) as client:
        stream = await client.chat.completions.create(model="talker", messages=ASKED, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join([one.choices[0].delta.content or "" for one in chunks]) == "All at once."


async def test_a_server_that_does_not_close_behind_its_end_holds_up_nobody() -> None:
    async def script(writer: asyncio.StreamWriter) -> None:
        last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        writer.write(HEAD + delta("Done.") + last)
        await writer.drain()
        await clock.sleep(60.0)

    async with raw_server(script) as (_, url), upstream_gateway(url) as gateway, sdk(gateway) as client:
        answer = await client.chat.completions.create(model="talker", messages=ASKED, timeout=20)
        assert answer.choices[0].message.content == "Done."


async def test_a_kept_connection_that_the_server_closed_costs_no_answer() -> None:
    """As llama-server does: it says that it keeps the connection, and closes it after a stream."""
    last = event({"choices": [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": "stop"}]})
    chunked = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last)
    async with raw_server(lambda writer: writer.write(answer)) as (server, url), upstream_gateway(url) as gateway:
        async with sdk(gateway) as client:
            for _ in range(20):
                made = await client.chat.completions.create(model="talker", messages=ASKED)
                assert made.choices[0].message.content == "Yes."
        assert sum(b"POST" in one for one in server.requests) >= 20


async def test_answers_that_break_off_open_the_breaker_as_of_any_target() -> None:
    script = lambda writer: writer.write(HEAD + b"data: 5\n\n")  # noqa: E731
    async with raw_server(script) as (_, url), upstream_gateway(url, probe_interval_s=30.0) as gateway:
        target = gateway.fleet.targets["pool/up"]
        for _ in range(8):
            await refusal_of(gateway)
        assert target.ejected


# plain text, and TLS


async def test_an_unknown_ca_is_refused_and_a_named_one_is_not(tmp_path: Path) -> None:
    server = ScriptedServer("plain", tiny_tokenizer())
    async with tls_served(server, tmp_path) as (url, ca):
        async with upstream_gateway(url) as gateway:
            assert "its certificate is not good" in gateway.fleet.targets["pool/up"].reason
        async with upstream_gateway(url, ca_file=ca) as gateway:
            assert gateway.fleet.targets["pool/up"].up
        async with upstream_gateway(url.replace("127.0.0.1", "localhost"), ca_file=ca) as gateway:
            assert "its certificate is not good" in gateway.fleet.targets["pool/up"].reason  # not its name


def test_status_says_what_each_model_is_asked_by() -> None:
    model = {"name": "talker", "grades": {"default": "text"}, "upstream": "ollama: no way for token ids is known of it"}
    lines = upstream_lines([{"id": "pool/up", "models": [model, {"name": "other"}]}])
    assert lines == ["pool/up: talker by text only (grade X), ollama: no way for token ids is known of it"]
