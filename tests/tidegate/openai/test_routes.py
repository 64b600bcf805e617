"""OpenAI's own SDK, unmodified, against the routes; its tokens are compared with the tokenizer's own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import openai
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.support.serving.host import FakeHost, minilm
from tests.support.serving.oip_servers import OneFolder, Servers, serving
from tidegate.arrays import tensor_to_array
from tidegate.models import repository
from tidegate.models.digest import sha256_of
from tidegate.openai.tokens import Tokenizers
from tidegate.outcome import DeadlineExceeded, NothingAlive, Overloaded
from tidegate.runtime.process import StartError
from tidegate.types import Call, Reply

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "word", "tide", "##s", "gate"]
CLS, SEP, HELLO, WORLD, WORD = 2, 3, 4, 5, 6

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of ten words, saved with an author's padding and truncation that must not count."""
    tokenizer: Any = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(max_length=8)
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
async def servers(folder: Path) -> AsyncIterator[Servers]:
    async with serving(FakeHost(), folder) as running:
        yield running


@pytest.fixture
async def client(servers: Servers) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any") as made:
        yield made


def sent(call: Call) -> list[list[int]]:
    """The rows of tokens of a call, without their padding."""
    ids, mask = (tensor_to_array(tensor) for tensor in call.request.inputs)
    return [row[keep == 1].tolist() for row, keep in zip(ids, mask, strict=True)]


async def test_a_text_becomes_its_tokens_and_an_embedding(servers: Servers, client: openai.AsyncOpenAI) -> None:
    made = await client.embeddings.create(model="minilm", input="Hello, WORLD tides")
    (call,) = servers.host.calls
    assert sent(call) == [[CLS, HELLO, 1, WORLD, 7, 8, SEP]]
    assert made.data[0].embedding[0] == sum([CLS, HELLO, 1, WORLD, 7, 8, SEP])  # the SDK asked for base64
    assert len(made.data[0].embedding) == 384
    assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == ("minilm", 7, 7)
    assert call.protocol == "openai"


async def test_a_mistyped_header_is_named(client: openai.AsyncOpenAI) -> None:
    asked = client.embeddings.with_raw_response.create
    answer = await asked(model="minilm", input="hello", extra_headers={"tidegate-pni": "edge"})
    assert answer.headers["tidegate-warning"] == "unknown tidegate-pni, did you mean tidegate-pin"


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_both_encodings_mean_the_same(client: openai.AsyncOpenAI, encoding_format: Any) -> None:
    made = await client.embeddings.create(model="minilm", input="hello", encoding_format=encoding_format)
    vector: Any = made.data[0].embedding
    if isinstance(vector, str):  # asked for explicitly, the SDK hands base64 on as it came
        vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
    assert vector[0] == CLS + HELLO + SEP


@pytest.mark.slow
@pytest.mark.parametrize(("most", "sizes"), [(None, [5]), (2, [1, 2, 2]), (9, [5])])
async def test_no_call_has_more_texts_than_what_is_there_takes(
    folder: Path, most: int | None, sizes: list[int]
) -> None:
    asked: list[tuple[list[list[int]], str, int]] = []

    def most_rows(call: Call, enough: int) -> int | None:
        asked.append((sent(call), call.pin, enough))
        return most

    async with (
        serving(FakeHost(), folder, most_rows=most_rows) as servers,
        openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any") as client,
    ):
        many = ["hello", "word", "hello world", "world", "word"]
        made = await client.embeddings.create(model="minilm", input=many, extra_headers={"tidegate-pin": "edge"})
        assert asked == [([[CLS, HELLO, WORLD, SEP]], "edge", 32)], "of the longest, and of what the caller demands"
        assert sorted(len(sent(call)) for call in servers.host.calls) == sizes
        assert [one.embedding[0] for one in made.data] == [9, 11, 14, 10, 11]

        await client.embeddings.create(model="minilm", input="hello")
        assert len(asked) == 1, "one text is one call, whatever is there"


@pytest.mark.parametrize("texts", [[" "], ["hello", " ", "world"]])
async def test_a_text_of_no_token_is_refused_alone_and_among_others(tmp_path: Path, texts: list[str]) -> None:
    bare: Any = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bare.save(str(tmp_path / "tokenizer.json"))  # with no tokens around a text
    async with (
        serving(FakeHost(), tmp_path) as servers,
        openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any") as client,
    ):
        with pytest.raises(openai.BadRequestError, match=rf"input\[{texts.index(' ')}\] has no token") as refused:
            await client.embeddings.create(model="minilm", input=texts)
        assert refused.value.param == "input"
        assert servers.host.calls == []


async def test_many_texts_come_back_in_their_order(servers: Servers, client: openai.AsyncOpenAI) -> None:
    counts = [int(count) for count in np.random.default_rng(7).integers(1, 200, 300)]
    made = await client.embeddings.create(model="minilm", input=["word " * count for count in counts])
    assert [item.embedding[0] for item in made.data] == [CLS + SEP + WORD * count for count in counts]
    assert 300 / 32 < len(servers.host.calls) < 300
    assert made.usage.prompt_tokens == sum(counts) + 2 * len(counts)


async def test_the_vectors_of_one_answer_are_of_one_version_and_a_single_call_leaves_it_to_the_gateway(
    servers: Servers, client: openai.AsyncOpenAI
) -> None:
    many = ["hello", "word " * 200]
    await client.embeddings.create(model="minilm", input="hello")
    await client.embeddings.create(model="minilm", input=many)
    await client.embeddings.create(model="minilm", input=many, extra_headers={"tidegate-version": "candidate"})
    # The first call of `candidate` finds out which version that is, and the others are of that one.
    assert [call.request.model_version for call in servers.host.calls] == ["", "1", "1", "", "1"]


async def test_an_answer_names_its_version_and_never_mixes_two(folder: Path) -> None:
    both = replace(minilm(), version="1"), replace(minilm(), version="2")
    many = ["hello", "word " * 100, "word " * 200]
    async with serving(FakeHost(*both), folder) as servers:
        drawn = iter("1212")
        computed = servers.host.computed

        def by_chance(call: Call) -> Reply:
            """As a split: a request without a version gets one and then the other."""
            version = call.request.model_version or next(drawn)
            reply = computed(call)
            return replace(reply, response=replace(reply.response, model_version=version))

        servers.host.answer = by_chance
        async with openai.AsyncOpenAI(base_url=f"http://{servers.http}/v1", api_key="any") as client:
            create = client.embeddings.with_raw_response.create
            for input_, headers, version in (
                ("hello", {}, "1"),
                ("hello", {}, "2"),
                (many, {}, "1"),
                (many, {"tidegate-version": "2"}, "2"),
                (many, {"tidegate-version": "candidate"}, "1"),
            ):
                before = len(servers.host.calls)
                raw = await create(model="minilm", input=input_, extra_headers=headers)
                assert raw.headers["tidegate-version"] == version
                assert (raw.parse().model_extra or {})["tidegate"]["tidegate-version"] == version
                assert len(servers.host.calls) - before == (1 if input_ == "hello" else 3)
            servers.host.answer = lambda call: replace(
                computed(call), response=replace(computed(call).response, model_version=str(len(sent(call)[0])))
            )
            with pytest.raises(openai.InternalServerError, match="the vectors are of several versions"):
                await client.with_options(max_retries=0).embeddings.create(model="minilm", input=many)


async def test_tokens_are_taken_as_they_are(servers: Servers, client: openai.AsyncOpenAI) -> None:
    await client.embeddings.create(model="minilm", input=[[CLS, HELLO, SEP], [9]])
    assert sent(servers.host.calls[0]) == [[9], [CLS, HELLO, SEP]]


async def test_what_the_model_cannot_take_is_cut_and_said_so(servers: Servers, client: openai.AsyncOpenAI) -> None:
    long = "word " * 400
    raw = await client.embeddings.with_raw_response.create(model="minilm", input=["hello", long, long])
    assert raw.headers["tidegate-truncated"] == "2"
    assert (raw.parse().model_extra or {})["tidegate"]["truncated"] == [1, 2]
    longest = max((row for call in servers.host.calls for row in sent(call)), key=len)
    assert (len(longest), longest[0], longest[-1]) == (256, CLS, SEP)


async def test_an_answer_says_where_it_was_made(client: openai.AsyncOpenAI) -> None:
    raw = await client.embeddings.with_raw_response.create(
        model="minilm", input="hello", extra_headers={"traceparent": TRACE}
    )
    assert raw.headers["tidegate-served-by"] == "edge/attic"
    assert raw.headers["traceparent"] == TRACE
    assert raw.headers["content-type"] == "application/json"
    assert "tidegate-truncated" not in raw.headers
    assert (raw.parse().model_extra or {})["tidegate"]["tidegate-route"].startswith("cheapest; variant=int8")


async def test_several_answers_say_together_where_they_were_made(servers: Servers, client: openai.AsyncOpenAI) -> None:
    computed = servers.host.computed

    def by_size(call: Call) -> Reply:
        reply = replace(computed(call), request_id="3fa09c-1")
        assert reply.route is not None
        if call.request.inputs[0].shape[1] < 10:
            return reply
        there = replace(reply.route, served_by="pool/east")
        return replace(reply, route=there, budget_left_s=0.5, stages={"link": 1.0}, request_id="3fa09c-2")

    servers.host.answer = by_size
    raw = await client.embeddings.with_raw_response.create(model="minilm", input=["hello", "word " * 200])
    assert raw.headers["tidegate-served-by"] == "edge/attic, pool/east"
    assert raw.headers["tidegate-budget-left-ms"] == "500.0"
    assert raw.headers["tidegate-request-id"] == "3fa09c-1, 3fa09c-2"
    assert raw.headers["server-timing"] == "link;dur=1000.000"


async def test_the_sdk_finds_the_request_of_an_answer_and_of_an_error(
    servers: Servers, client: openai.AsyncOpenAI
) -> None:
    computed = servers.host.computed
    servers.host.answer = lambda call: replace(computed(call), request_id="3fa09c-1")
    made = await client.embeddings.create(model="minilm", input="hello")
    assert made._request_id == "3fa09c-1"  # noqa: SLF001 - public, despite its underscore

    def refuse(call: Call) -> Reply:
        error = DeadlineExceeded("too late")
        error.request_id = "3fa09c-2"
        raise error

    servers.host.answer = refuse
    with pytest.raises(openai.APIStatusError) as failure:
        await client.embeddings.create(model="minilm", input="hello")
    assert failure.value.request_id == "3fa09c-2"


async def test_attested_targets_can_be_required_and_the_answer_says_by_what_evidence(
    servers: Servers, client: openai.AsyncOpenAI
) -> None:
    computed = servers.host.computed

    def proven(call: Call) -> str:
        return f"software; key={call.request.inputs[0].shape[1]}"

    servers.host.answer = lambda call: replace(computed(call), attested=proven(call))
    raw = await client.embeddings.with_raw_response.create(
        model="minilm", input=["hello", "word " * 200], extra_headers={"tidegate-require": "attested"}
    )
    calls = servers.host.calls
    assert len(calls) == 2 and all(call.attested for call in calls)
    said = raw.headers["tidegate-attested"]
    assert sorted(said.split(" | ")) == sorted(map(proven, calls))
    assert (raw.parse().model_extra or {})["tidegate"]["tidegate-attested"] == said
    with pytest.raises(openai.BadRequestError, match="can require 'attested' and nothing else"):
        await client.embeddings.create(model="minilm", input="x", extra_headers={"tidegate-require": "attest"})


async def test_the_sdks_timeout_is_a_budget_and_its_default_is_none(
    servers: Servers, client: openai.AsyncOpenAI
) -> None:
    await client.embeddings.create(model="minilm", input="hello", timeout=75.0)
    await client.embeddings.create(model="minilm", input="hello")
    await client.embeddings.create(model="minilm", input="hello", extra_headers={"tidegate-budget-ms": "90000"})
    short, none, ours = servers.host.calls
    assert short.deadline is not None
    assert short.deadline - short.arrived_at == pytest.approx(75.0)
    assert none.deadline is None
    assert ours.deadline is not None
    assert ours.deadline - ours.arrived_at == pytest.approx(90.0)


async def test_the_models_that_take_text_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["minilm"]
    assert (await client.models.retrieve("minilm")).object == "model"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


@pytest.mark.parametrize(("asked", "kind", "parameter", "code"), [
    ({"model": "nobody", "input": "x"}, openai.NotFoundError, "model", "model_not_found"),
    ({"model": "digits", "input": "x"}, openai.BadRequestError, "model", "invalid_request"),
    ({"model": "minilm", "input": ""}, openai.BadRequestError, "input", "invalid_request"),
    ({"model": "minilm", "input": []}, openai.BadRequestError, "input", "invalid_request"),
    ({"model": "minilm", "input": "x", "dimensions": 5}, openai.BadRequestError, "dimensions", "invalid_request"),
    ({"model": "minilm", "input": [30522]}, openai.BadRequestError, None, "invalid_request"),
    ({"model": "minilm", "input": "x" * 1_000_001}, openai.APIStatusError, None, "too_large"),
    ({"model": "minilm", "input": "x", "extra_headers": {"tidegate-budget-ms": "NaN"}},
     openai.BadRequestError, None, "invalid_request"),
    ({"model": "minilm", "input": "x", "extra_headers": {"tidegate-variant": "fp64"}},
     openai.BadRequestError, None, "invalid_request"),
])  # fmt: skip
async def test_a_refusal_has_the_form_that_the_sdk_reads(
    servers: Servers,
    client: openai.AsyncOpenAI,
    asked: dict[str, Any],
    kind: type[openai.APIStatusError],
    parameter: str | None,
    code: str,
) -> None:
    with pytest.raises(kind) as refused:
        await client.embeddings.create(**asked)
    error: Any = refused.value.body
    assert (error["param"], error["code"], error["type"]) == (parameter, code, "invalid_request_error")
    assert error["message"]
    assert servers.host.calls == []
    assert len(servers.refused) == 1  # and the SDK did not try again
    assert (await client.embeddings.create(model="minilm", input="hello")).data


@pytest.mark.slow
@pytest.mark.parametrize(("error", "attempts", "status"), [
    (Overloaded("full", retry_after_s=0.001), 3, 429),
    (DeadlineExceeded("late"), 1, 504),
    (NothingAlive("none", retry_after_s=0.001), 3, 503),
    (RuntimeError("defect"), 1, 500),
])  # fmt: skip
async def test_the_sdk_tries_again_only_where_that_can_help(
    servers: Servers, client: openai.AsyncOpenAI, error: Exception, attempts: int, status: int
) -> None:
    def refuse(call: Call) -> Reply:
        raise error

    servers.host.answer = refuse
    with pytest.raises(openai.APIStatusError) as refused:
        await client.embeddings.create(model="minilm", input="hello")
    assert (refused.value.status_code, len(servers.host.calls)) == (status, attempts)


async def test_the_first_call_of_several_that_fails_ends_them_all(servers: Servers, client: openai.AsyncOpenAI) -> None:
    def refuse_long(call: Call) -> Reply:
        if call.request.inputs[0].shape[1] > 10:
            raise DeadlineExceeded("late")
        return servers.host.computed(call)

    servers.host.answer = refuse_long
    with pytest.raises(openai.InternalServerError, match="late"):
        await client.embeddings.create(model="minilm", input=["hello", "word " * 200])
    assert (await client.embeddings.create(model="minilm", input=["hello"])).data


async def test_a_caller_that_leaves_cancels_every_call(servers: Servers, client: openai.AsyncOpenAI) -> None:
    servers.host.hold = asyncio.Event()
    asking = asyncio.ensure_future(client.embeddings.create(model="minilm", input=["hello", "word " * 200]))
    async with asyncio.timeout(30):
        await servers.host.arrived.wait()
        asking.cancel()
        await servers.host.cancelled.wait()


@pytest.mark.parametrize(("verb", "path", "status"), [
    ("POST", "/v1/responses", 404), ("GET", "/v1/x%0d%0aX-Evil: 1", 404), ("GET", "/v1/embeddings", 405),
    ("DELETE", "/v1/models/minilm", 405),
])  # fmt: skip
async def test_what_is_not_served_is_refused_in_openais_form(
    servers: Servers, verb: str, path: str, status: int
) -> None:
    async with aiohttp.ClientSession() as session, session.request(verb, f"http://{servers.http}{path}") as response:
        assert (response.status, response.headers["Content-Type"]) == (status, "application/json")
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("body", "headers", "status"), [
    (b"", {}, 400),
    (b"{", {}, 400),
    (b"x", {"Content-Encoding": "gzip"}, 400),
    (json.dumps({"model": "minilm", "input": "\ud800"}).encode(), {}, 400),
    (json.dumps({"model": "minilm", "input": "nul \x00 and \u202e"}).encode(), {}, 200),
])  # fmt: skip
async def test_a_body_of_rubbish_is_a_400(
    servers: Servers, body: bytes, headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://{servers.http}/v1/embeddings"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        assert response.status == status
    assert caplog.records == []


# The tokenizers themselves


@pytest.mark.slow
async def test_a_text_far_too_long_gets_the_same_tokens_as_if_all_of_it_were_read(folder: Path) -> None:
    reference: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.no_padding()
    reference.enable_truncation(max_length=256)
    texts = ["word world " * 20_000, "hello" + " " * 20_000 + "world", "tides" * 5_000, "short"]
    rows = await Tokenizers(OneFolder(folder)).rows(minilm(), texts)
    for text, row in zip(texts, rows, strict=True):
        whole = reference.encode(text)
        assert (list(row.ids), row.truncated) == (whole.ids, bool(whole.overflowing))
    assert [row.truncated for row in rows] == [True, False, False, False]


async def test_a_tokenizer_is_read_once(folder: Path) -> None:
    tokenizers = Tokenizers(OneFolder(folder))
    await asyncio.gather(*(tokenizers.rows(minilm(), ["hello"]) for _ in range(8)))
    assert repr(tokenizers) == "<Tokenizers 1 loaded>"


async def test_versions_with_the_same_tokenizer_share_it_and_others_do_not(folder: Path) -> None:
    """It has megabytes, and a gateway that runs for months sees many versions."""
    tokenizers, manifest = Tokenizers(OneFolder(folder)), minilm()
    assert manifest.text is not None
    digest = sha256_of(folder / "tokenizer.json")
    for version in ("1", "2", "3"):
        text = msgspec.structs.replace(manifest.text, sha256=digest)
        await tokenizers.rows(msgspec.structs.replace(manifest, version=version, text=text), ["hello"])
    assert repr(tokenizers) == "<Tokenizers 1 loaded>"
    text = msgspec.structs.replace(manifest.text, sha256=digest, max_tokens=8)
    (row,) = await tokenizers.rows(msgspec.structs.replace(manifest, text=text), ["hello " * 50])
    assert len(row.ids) == 8
    assert repr(tokenizers) == "<Tokenizers 2 loaded>"


async def test_another_tokenizer_than_the_manifest_names_ends_the_start(folder: Path) -> None:
    manifest = minilm()
    assert manifest.text is not None
    another = msgspec.structs.replace(manifest, text=msgspec.structs.replace(manifest.text, sha256="0" * 64))
    with pytest.raises(StartError, match=r"tokenizer\.json: has sha256 .* but the manifest names 0000"):
        await Tokenizers(OneFolder(folder)).load([another])


async def test_a_tokenizer_that_is_not_there_ends_the_start_by_its_name(tmp_path: Path) -> None:
    tokenizers = Tokenizers(OneFolder(tmp_path))
    with pytest.raises(StartError, match=r"cannot read the tokenizer: .*tokenizer\.json"):
        await tokenizers.load([minilm()])


async def test_a_tokenizer_beyond_the_limit_or_damaged_ends_the_start_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(StartError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        await Tokenizers(OneFolder(tmp_path)).load([minilm()])
    monkeypatch.setattr(repository, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(StartError, match=r"tokenizer\.json: the tokenizer has more than 10 bytes"):
        await Tokenizers(OneFolder(tmp_path)).load([minilm()])
