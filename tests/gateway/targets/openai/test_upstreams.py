"""Servers of other makers behind a whole gateway: what OpenAI's own client gets of each, and what goes out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.app import Gateway
from gateway.config.targets import TargetConfig
from tests.support.gateway.text_gateway import text_gateway
from tests.support.models.text_side import tiny_tokenizer
from tests.support.serving.writing_host import until
from tests.support.upstreams.scripted_server import ScriptedServer, served
from tests.support.upstreams.upstream_gateway import THERE, talker_repository, until_up, upstream_gateway
from tidegate import clock

pytestmark = pytest.mark.slow

ASKED: Any = [{"role": "user", "content": "when does the tide come in?"}]
WRITTEN = "The water is high 🌊 at noon."
OF_IDS = ("vllm", "sglang", "llama-server")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talker_repository(tmp_path_factory.mktemp("upstreams"))


def server_of(kind: str, **changes: Any) -> ScriptedServer:
    return ScriptedServer(kind, tiny_tokenizer(), **changes)


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.addresses['http']}/v1", api_key="any", max_retries=0)


def offer(gateway: Gateway) -> Any:
    [offered] = gateway.fleet.targets["pool/up"].offers
    return offered


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    given = {"messages": ASKED, "max_tokens": 64, "stream_options": {"include_usage": True}, **asked}
    stream = await client.chat.completions.create(model="talker", stream=True, **given)
    return [chunk async for chunk in stream]


def text_of(chunks: list[Any]) -> str:
    return "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])


# what each is found to be


@pytest.mark.parametrize("kind", OF_IDS)
async def test_a_server_of_ids_is_found_to_be_one(kind: str, models: Path) -> None:
    async with served(server_of(kind)) as url, upstream_gateway(url, models) as gateway:
        [variant] = offer(gateway).variants
        assert (variant.grade, variant.resumable) == ("ids", True)
        assert offer(gateway).upstream == f"{kind}: token ids both ways; they mean the same there and here"
        assert variant.max_tokens == 512
        assert variant.slots == (3 if kind == "llama-server" else 64)


@pytest.mark.parametrize(("kind", "grade"), [
    ("vllm", "prefill"), ("llama-server", "prefill"), ("sglang", "text"), ("ollama", "text"), ("plain", "text"),
    ("openai", "text"),
])  # fmt: skip
async def test_without_the_models_tokenizer_a_server_is_asked_in_text(kind: str, grade: str) -> None:
    async with served(server_of(kind)) as url, upstream_gateway(url) as gateway:
        [variant] = offer(gateway).variants
        assert (variant.grade, variant.resumable) == (grade, grade == "prefill")
        assert "not in this gateway's repository" in offer(gateway).upstream


@pytest.mark.parametrize("kind", OF_IDS)
async def test_a_server_with_another_vocabulary_gets_no_ids(kind: str, models: Path) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["tide comes"])
    async with served(server_of(kind, tokenize_as=other)) as url, upstream_gateway(url, models) as gateway:
        assert offer(gateway).variants[0].grade != "ids"
        assert "its tokenizer gives other ids" in offer(gateway).upstream


async def test_ids_that_mean_other_text_there_are_found_out(models: Path) -> None:
    server = server_of("vllm")
    server.shows = lambda ids: ["x"] * len(ids)
    async with served(server) as url, upstream_gateway(url, models) as gateway:
        assert offer(gateway).variants[0].grade == "prefill"
        assert "its token ids mean other text" in offer(gateway).upstream


async def test_an_operator_may_allow_less_and_knows_what_no_probe_tells(models: Path) -> None:
    async with served(server_of("vllm")) as url, upstream_gateway(url, models, grade="text") as gateway:
        assert offer(gateway).variants[0].grade == "text"
        assert "openai.grade" in offer(gateway).upstream
    async with served(server_of("ollama")) as url, upstream_gateway(url, models, grade="prefill") as gateway:
        assert offer(gateway).variants[0].grade == "prefill"


async def test_operators_see_kind_grade_and_reason(models: Path) -> None:
    async with served(server_of("sglang")) as url, upstream_gateway(url, models) as gateway:
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"{gateway.addresses['admin']}/v1/state")
            [target] = (await answer.json())["targets"]
        assert (target["transport"], target["address"]) == ("openai", url)
        [model] = target["models"]
        assert model["grades"] == {"default": "ids"}
        assert model["upstream"].startswith("sglang: token ids both ways")


# answers


@pytest.mark.parametrize("kind", [*OF_IDS, "ollama", "plain", "openai"])
@pytest.mark.parametrize("known", [True, False])
async def test_openais_client_gets_what_the_server_writes(kind: str, known: bool, models: Path) -> None:
    folder = models if known else None
    async with served(server_of(kind)) as url, upstream_gateway(url, folder) as gateway, sdk(gateway) as client:
        chunks = await streamed(client)
        whole = await client.chat.completions.create(model="talker", messages=ASKED, max_tokens=64)
    assert text_of(chunks) == whole.choices[0].message.content == WRITTEN
    assert (chunks[-2].choices[0].finish_reason, whole.choices[0].finish_reason) == ("stop", "stop")
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 20
    assert whole.usage.prompt_tokens_details.cached_tokens == {"sglang": 2, "llama-server": 3}.get(
        kind if known else "", 4
    )


@pytest.mark.parametrize("incremental", [True, False])
async def test_sglang_may_give_all_ids_again_or_the_new_ones(incremental: bool, models: Path) -> None:
    server = server_of("sglang", incremental=incremental)
    async with served(server) as url, upstream_gateway(url, models) as gateway, sdk(gateway) as client:
        chunks = await streamed(client, logprobs=True)
    assert text_of(chunks) == WRITTEN
    told = [
        one.logprob for chunk in chunks if chunk.choices and (lp := chunk.choices[0].logprobs) for one in lp.content
    ]
    assert set(told) == {-0.25} and len(told) > 20


@pytest.mark.parametrize("kind", OF_IDS)
async def test_ids_are_those_of_the_server_also_inside_of_characters(kind: str, models: Path) -> None:
    server = server_of(kind)
    async with served(server) as url, upstream_gateway(url, models) as gateway, aiohttp.ClientSession() as session:
        body = {"text_input": "the tide", "max_tokens": 64}
        answer = await session.post(f"{gateway.addresses['http']}/v2/models/talker/generate", json=body)
        said = await answer.json()
    assert said["output_ids"] == server.ids(WRITTEN)
    assert said["text_output"] == WRITTEN
    assert said["finish_reason"] == "stop"
    assert said["completion_tokens"] == len(server.ids(WRITTEN)) + 1


@pytest.mark.parametrize("kind", OF_IDS)
async def test_an_answer_is_cut_at_the_tokens_that_were_asked_for(kind: str, models: Path) -> None:
    async with served(server_of(kind)) as url, upstream_gateway(url, models) as gateway, sdk(gateway) as client:
        made = await client.chat.completions.create(model="talker", messages=ASKED, max_tokens=5)
        assert made.choices[0].finish_reason == "length"
        assert made.usage is not None and made.usage.completion_tokens == 5


@pytest.mark.parametrize("known", [True, False])
async def test_a_stop_string_is_never_shown_and_ends_the_servers_work(known: bool, models: Path) -> None:
    server = server_of("vllm", writes="one two three four five six " * 40, step_s=0.01)
    async with served(server) as url, upstream_gateway(url, models if known else None) as gateway:
        async with sdk(gateway) as client:
            chunks = await streamed(client, stop=["thr"], max_tokens=400)
        assert text_of(chunks) == "one two "
        assert chunks[-2].choices[0].finish_reason == "stop"
        await until(lambda: server.writing == 0)
        assert server.left == 1
        assert server.asked[-1][1].get("stop") == (None if known else ["thr"])


async def test_what_the_caller_sent_goes_on_as_it_came() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}], "name": "op"},
        {"role": "user", "content": "hm?"},
    ]
    sent: Any = {
        "temperature": 0.25, "top_p": 0.5, "seed": 7, "stop": ["\n\n"], "response_format": {"type": "json_object"},
        "reasoning_effort": "low", "verbosity": "high",
    }  # fmt: skip
    more: Any = {"min_p": 0.125, "chat_template_kwargs": {"enable_thinking": False}}
    server = server_of("plain")
    async with served(server) as url, upstream_gateway(url) as gateway, sdk(gateway) as client:
        await client.chat.completions.create(  # type: ignore[call-overload]
            model="talker", messages=messages, user="u-1", max_completion_tokens=50, extra_body=more, **sent
        )
        await client.completions.create(model="talker", prompt="the tide", max_tokens=9)
    (path, body), (other_path, other) = server.asked
    assert path == "/v1/chat/completions"
    assert body == {
        **sent, **more, "messages": messages, "model": THERE, "max_tokens": 50, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (other_path, other["prompt"], other["max_tokens"]) == ("/v1/completions", "the tide", 9)


@pytest.mark.parametrize(("kind", "name"), [("openai", "max_completion_tokens"), ("plain", "max_tokens")])
async def test_the_most_tokens_are_said_where_the_caller_says_none(kind: str, name: str) -> None:
    server = server_of(kind)
    async with served(server) as url, upstream_gateway(url, default_max_tokens=33) as gateway, sdk(gateway) as client:
        await client.chat.completions.create(model="talker", messages=ASKED)
    assert server.asked[0][1][name] == 33


@pytest.mark.parametrize("kind", ["openai", "plain", "ollama"])
async def test_a_length_that_is_named_twice_goes_out_as_the_one_that_is_charged(kind: str) -> None:
    server = server_of(kind, writes="one two three four five six " * 300)
    both: Any = {"max_completion_tokens": 3, "max_tokens": 1_000_000}
    async with served(server) as url, upstream_gateway(url) as gateway, sdk(gateway) as client:
        chat = await client.chat.completions.create(model="talker", messages=ASKED, **both)
        bare = await client.completions.create(
            model="talker", prompt="the tide", max_tokens=4, extra_body={"max_completion_tokens": -5}
        )
        async with (
            aiohttp.ClientSession(f"{gateway.addresses['http']}/v2/models/talker/") as session,
            session.post("generate", json={"text_input": "the tide", "max_tokens": 5}) as answer,
        ):
            assert answer.status == 200
    name = "max_completion_tokens" if kind == "openai" else "max_tokens"
    said = [{key: body[key] for key in both if key in body} for _, body in server.asked]
    assert said == [{name: 3}, {name: 4}, {name: 5}]
    assert chat.choices[0].finish_reason == bare.choices[0].finish_reason == "length"


async def test_calls_of_tools_come_through_streamed_and_whole() -> None:
    calls = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "tide", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"at":'}},
        {"index": 0, "function": {"arguments": ' "noon"}'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "moon", "arguments": "{}"}},
    ]
    tools: Any = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
    server = server_of("plain", calls=calls)
    async with served(server) as url, upstream_gateway(url) as gateway, sdk(gateway) as client:
        chunks = await streamed(client, tools=tools)
        whole = await client.chat.completions.create(model="talker", messages=ASKED, tools=tools)
    parts = [one for chunk in chunks if chunk.choices for one in chunk.choices[0].delta.tool_calls or ()]
    assert [(one.index, one.function.arguments) for one in parts] == [
        (0, ""),
        (0, '{"at":'),
        (0, ' "noon"}'),
        (1, "{}"),
    ]
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    made = whole.choices[0].message.tool_calls or []
    assert [(one.id, one.function.name, one.function.arguments) for one in made] == [  # type: ignore[union-attr]
        ("c1", "tide", '{"at": "noon"}'),
        ("c2", "moon", "{}"),
    ]
    assert whole.choices[0].message.content is None


async def test_sampling_is_said_in_full_to_a_server_of_ids(models: Path) -> None:
    sent: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "seed": 9, "max_tokens": 7}
    said = {}
    for kind in OF_IDS:
        server = server_of(kind)
        async with served(server) as url, upstream_gateway(url, models) as gateway, sdk(gateway) as client:
            more = {"top_k": 3, "min_p": 0.125}
            await client.chat.completions.create(model="talker", messages=ASKED, extra_body=more, **sent)
        said[kind] = server.asked[-1][1]
    keys = ("temperature", "top_p", "top_k", "min_p")
    assert [said["vllm"][key] for key in (*keys, "seed", "max_tokens")] == [0.5, 0.25, 3, 0.125, 9, 7]
    chosen = said["sglang"]["sampling_params"]
    assert [chosen[key] for key in (*keys, "sampling_seed", "max_new_tokens")] == [0.5, 0.25, 3, 0.125, 9, 7]
    assert [said["llama-server"][key] for key in (*keys, "seed", "n_predict")] == [0.5, 0.25, 3, 0.125, 9, 7]


async def test_a_request_that_needs_ids_is_not_placed_on_text(models: Path) -> None:
    async with served(server_of("plain")) as url, upstream_gateway(url, models) as gateway, sdk(gateway) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="talker", messages=ASKED, logprobs=True)
        assert "takes and gives text, and this request needs token ids" in refused.value.message
        with pytest.raises(openai.APIStatusError):
            await client.completions.create(model="talker", prompt=[5, 6])
        assert gateway.fleet.targets["pool/up"].up


async def test_triton_and_oip_callers_get_text_of_a_text_only_model() -> None:
    async with served(server_of("plain")) as url, upstream_gateway(url) as gateway, aiohttp.ClientSession() as session:
        base = f"{gateway.addresses['http']}/v2/models/talker"
        answer = await session.post(f"{base}/generate", json={"text_input": "the tide", "max_tokens": 64})
        assert (await answer.json())["text_output"] == WRITTEN
        streaming = await session.post(f"{base}/generate_stream", json={"text_input": "the tide", "max_tokens": 64})
        lines = [json.loads(line[6:]) for line in (await streaming.read()).split(b"\n\n") if line]
        assert "".join([one.get("text_output", "") for one in lines]) == WRITTEN
        refused = await session.post(f"{base}/generate", json={"input_ids": [1, 2]})
        assert refused.status == 400 and "takes: text_input" in (await refused.json())["error"]


@pytest.mark.parametrize("kind", ["vllm", "llama-server"])
@pytest.mark.parametrize(
    "schema", ['{}, "n_predict": 400, "max_tokens": 400', '{"type": "object"', '{"type": "flaot"}']
)
async def test_a_schema_that_is_none_reaches_no_server(kind: str, schema: str, models: Path) -> None:
    """It is written into the server's JSON as it is: what goes beyond a schema would be keys of its request."""
    server = server_of(kind)
    async with (
        served(server) as url,
        upstream_gateway(url, models) as gateway,
        aiohttp.ClientSession(f"{gateway.addresses['http']}/v2/models/talker/") as session,
    ):
        before, asked = len(server.asked), {"input_ids": [5, 6], "max_tokens": 4}
        async with session.post("generate", json={**asked, "json_schema": schema}) as answer:
            assert answer.status == 400 and "json_schema" in (await answer.json())["error"]
        assert len(server.asked) == before
        async with session.post("generate", json={**asked, "json_schema": '{"type": "object"}'}) as answer:
            assert answer.status == 200 and len(server.asked) == before + 1
        assert gateway.fleet.targets["pool/up"].up


# leaving, and reading slowly


@pytest.mark.parametrize("known", [True, False])
async def test_a_caller_that_leaves_closes_the_servers_answer(known: bool, models: Path) -> None:
    server = server_of("vllm", writes="on and on " * 200, step_s=0.01)
    async with served(server) as url, upstream_gateway(url, models if known else None) as gateway:
        async with sdk(gateway) as client:
            stream = await client.chat.completions.create(
                model="talker", messages=ASKED, max_tokens=400, stream=True, timeout=30
            )
            async for _ in stream:
                break
            await stream.close()
        await until(lambda: server.left == 1 and gateway.admission.in_flight == 0)


@pytest.mark.filterwarnings("ignore:drain method is deprecated:DeprecationWarning")  # aiohttp has no other word for it
async def test_a_reader_that_stalls_stops_the_reading_of_its_server() -> None:
    server = server_of("plain", writes="x" * 30_000, shows=lambda ids: ["x" * 100] * len(ids))
    async with served(server) as url, upstream_gateway(url) as gateway:
        host, port = gateway.addresses["http"].removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        body = json.dumps({"model": "talker", "messages": ASKED, "max_tokens": 30_000, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readline()
        before = -1
        while before != server.written:  # until nothing moves any more
            before = server.written
            await clock.sleep(0.5)
        assert server.writing == 1 and 0 < server.written < 30_000
        writer.close()
        await until(lambda: server.writing == 0)


# going away, and coming back


async def test_a_server_that_comes_back_is_probed_again(models: Path) -> None:
    async with served(server_of("vllm")) as url:
        port = int(url.removesuffix("/v1").rpartition(":")[2])
        gateway_there = upstream_gateway(url, models)
        gateway = await gateway_there.__aenter__()
        assert offer(gateway).variants[0].grade == "ids"
    try:
        await until_up(gateway, up=False)
        assert "cannot be reached" in gateway.fleet.targets["pool/up"].reason
        async with served(server_of("plain"), port=port):
            await until_up(gateway)
            assert offer(gateway).variants[0].grade == "text"
            async with sdk(gateway) as client:
                assert text_of(await streamed(client)) == WRITTEN
    finally:
        await gateway_there.__aexit__(None, None, None)


async def test_a_server_that_lacks_the_model_is_down_with_the_reason() -> None:
    async with served(server_of("plain", model="other")) as url, upstream_gateway(url) as gateway:
        target = gateway.fleet.targets["pool/up"]
        assert not target.up
        assert "it has no model 'there/talker' (openai.models); it lists other" in target.reason


async def test_ollamas_names_may_leave_out_the_usual_tag() -> None:
    async with served(server_of("ollama")) as url, upstream_gateway(url) as gateway:
        assert offer(gateway).upstream.startswith("ollama: ")


# beside targets of our own


async def test_an_edge_and_a_server_of_text_share_a_model_and_ids_go_to_the_edge(tmp_path: Path) -> None:
    server = server_of("ollama")
    async with text_gateway(tmp_path) as (own, edge), served(server) as url:
        folder = own.config.model_repository
        till = TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"], standby=True)  # type: ignore[call-arg]
        async with upstream_gateway(url, folder, others=(till,)) as gateway, sdk(gateway) as client:
            for _ in range(3):
                chat = await client.chat.completions.with_raw_response.create(
                    model="talker", messages=ASKED, max_tokens=50, timeout=30
                )
                assert chat.headers["tidegate-served-by"] == "pool/up"  # the edge is in reserve
                assert chat.parse().choices[0].message.content == WRITTEN
                bare = await client.completions.with_raw_response.create(
                    model="talker", prompt="the tide", max_tokens=5
                )
                assert bare.headers["tidegate-served-by"] == "edge/till"
        assert {path for path, _ in server.asked} == {"/v1/chat/completions"}


async def test_a_server_that_fails_before_its_first_token_is_replaced_by_an_edge(tmp_path: Path) -> None:
    server = server_of("vllm")
    async with text_gateway(tmp_path) as (own, edge), served(server) as url:
        folder = own.config.model_repository
        till = TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"], standby=True)  # type: ignore[call-arg]
        async with upstream_gateway(url, folder, others=(till,)) as gateway, sdk(gateway) as client:
            server.refusal = 500, {"error": {"message": "cuda"}}, {}
            chat = await client.chat.completions.with_raw_response.create(
                model="talker", messages=ASKED, max_tokens=8, timeout=30
            )
            assert chat.headers["tidegate-served-by"] == "edge/till"
            assert "fallback=1" in chat.headers["tidegate-route"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_edge_goes_on_with_the_ids_of_a_server_that_breaks_off(kind: str, tmp_path: Path) -> None:
    server = server_of(kind)
    async with text_gateway(tmp_path) as (own, edge), served(server) as url:
        folder = own.config.model_repository
        till = TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"], standby=True)  # type: ignore[call-arg]
        async with upstream_gateway(url, folder, others=(till,)) as gateway, sdk(gateway) as client:
            server.breaks_after = 10
            chunks = await streamed(client, max_tokens=30)
    given = server.tokenizer.decode(server.ids(WRITTEN)[:10])
    assert text_of(chunks).startswith(given) and text_of(chunks) != given
    assert chunks[-1].usage.completion_tokens == 30


async def test_text_that_breaks_off_is_not_gone_on_with(tmp_path: Path) -> None:
    server = server_of("ollama", breaks_after=8)
    async with text_gateway(tmp_path) as (own, edge), served(server) as url:
        folder = own.config.model_repository
        till = TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"], standby=True)  # type: ignore[call-arg]
        async with upstream_gateway(url, folder, others=(till,)) as gateway, sdk(gateway) as client:
            with pytest.raises(openai.APIError) as broken:
                await streamed(client, max_tokens=30)
    assert "broke its answer off" in broken.value.message
