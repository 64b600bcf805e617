"""A front's end of a generation: targets that do not keep to the contract, and fronts that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.models.text_side import text_side_folder
from tests.support.serving.oip_servers import OneFolder
from tests.support.serving.writing_host import WritingHost
from tidegate import clock
from tidegate.generate.request import GenerateRequest, ids_tensor, infer_request
from tidegate.generate.text.text_models import TextModel, TextModels
from tidegate.oip.generation.answer import GenerationAnswer, Piece
from tidegate.outcome import BadAnswer, NothingAlive
from tidegate.token_sink import TokenBatch
from tidegate.types import Call, Reply

PROMPT = (5, 6)


@pytest.fixture
async def text(tmp_path: Path) -> TextModel:
    return await TextModels(OneFolder(tmp_path)).of(text_side_folder(tmp_path))


@pytest.fixture
def host(tmp_path: Path) -> WritingHost:
    return WritingHost(text_side_folder(tmp_path))


def call(max_tokens: int = 50) -> Call:
    return Call(infer_request("talker", GenerateRequest(PROMPT, max_tokens)), "oip-http", 0.0)


async def told(host: Any, text: TextModel | None, max_tokens: int = 50, **how: Any) -> list[Piece]:
    async with GenerationAnswer(host, call(max_tokens), PROMPT, text, **how) as answer:
        return await answer.whole()


class Lying:
    """A host whose reply, or whose tokens, are changed on their way."""

    def __init__(self, host: WritingHost, change: Callable[[Reply], Reply], *tokens: TokenBatch) -> None:
        self._host = host
        self._change = change
        self._tokens = tokens

    async def infer(self, call: Call) -> Reply:
        if call.tokens is not None:
            for batch in self._tokens:
                call.tokens.put(batch)
        return self._change(await self._host.infer(replace(call, tokens=None)))


def with_outputs(*outputs: Any) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, response=replace(reply.response, outputs=outputs))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("change", "words"), [
    (with_outputs(), "without the output 'output_ids'"),
    (with_outputs(ids_tensor("output_ids", (5,) * 51)), "more than the 50 tokens"),
    (with_outputs(ids_tensor("output_ids", (5, 99_999))), "not in the vocabulary"),
    (with_outputs(ids_tensor("output_ids", (-1,))), "not in the vocabulary"),
    (lambda reply: replace(reply, response=replace(reply.response, parameters={})), "ended for None"),
])  # fmt: skip
async def test_an_answer_that_breaks_the_contract_is_a_bad_one(
    host: WritingHost, text: TextModel, whole: bool, change: Callable[[Reply], Reply], words: str
) -> None:
    with pytest.raises(BadAnswer, match=words):
        await told(Lying(host, change), text, whole=whole)


@pytest.mark.parametrize(("tokens", "words"), [
    ((TokenBatch(0, (5,) * 40), TokenBatch(40, (5,) * 11)), "more than the 50 tokens"),
    ((TokenBatch(0, (-3,)),), "not in the vocabulary"),
    ((TokenBatch(0, (5,) * 30),), "of which 30 had come"),
])  # fmt: skip
async def test_so_are_tokens_that_do(
    host: WritingHost, text: TextModel, tokens: tuple[TokenBatch, ...], words: str
) -> None:
    with pytest.raises(BadAnswer, match=words):
        await told(Lying(host, lambda reply: reply, *tokens), text)


@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("streamed", [0, 4, 100])
async def test_each_token_is_told_once_however_much_of_it_was_streamed(
    host: WritingHost, text: TextModel, batch: int, streamed: int
) -> None:
    host.text = "höher 🌊 the tide"
    ids = tuple(host.tokenizer.encode(host.text).ids)
    batches = [TokenBatch(at, ids[:streamed][at : at + batch]) for at in range(0, len(ids[:streamed]), batch)]
    pieces = await told(Lying(host, lambda reply: reply, *batches), text)
    assert "".join([piece.text for piece in pieces]) == host.text
    assert tuple([id for piece in pieces for id in piece.ids]) == ids


async def test_ids_alone_need_no_text_side(host: WritingHost) -> None:
    pieces = await told(host, None)
    assert [id for piece in pieces for id in piece.ids] == host.tokenizer.encode(host.text).ids
    assert {piece.text for piece in pieces} == {""}


async def test_a_front_that_leaves_in_the_middle_cancels(host: WritingHost, text: TextModel) -> None:
    host.every_s = 0.001
    async with GenerationAnswer(host, call(), PROMPT, text) as answer:
        assert await answer.take()
    assert (host.left, host.under_way) == (1, 0)


async def test_a_front_that_is_cancelled_cancels(host: WritingHost, text: TextModel) -> None:
    host.hold = asyncio.Event()
    telling = asyncio.create_task(told(host, text))
    await host.arrived.wait()
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    assert (host.left, host.under_way) == (1, 0)


async def test_a_stop_string_at_the_very_end_is_found(host: WritingHost, text: TextModel) -> None:
    for whole in (True, False):
        pieces = await told(host, text, stop=["in"], whole=whole)
        assert "".join([piece.text for piece in pieces]) == "the tide comes "


async def test_the_beginning_of_a_stop_string_is_shown_when_nothing_more_comes(
    host: WritingHost, text: TextModel
) -> None:
    pieces = await told(host, text, stop=["in and out"])
    assert "".join([piece.text for piece in pieces]) == "the tide comes in"


async def handed(answer: GenerationAnswer, takes: int = 10_000) -> tuple[list[Piece], list[bool]]:
    """The pieces that are handed on to a front that wants to wait behind every so many, and how often it did."""
    pieces: list[Piece] = []
    told: list[bool] = []

    def write(new: list[Piece]) -> bool:
        pieces.extend(new)
        return len(pieces) % takes != 0

    while not told or not told[-1]:
        told.append(await answer.hand_on(write))
    return pieces, told


@pytest.mark.parametrize("takes", [1, 2, 10_000])
async def test_what_is_handed_on_and_what_is_taken_is_the_answer(
    host: WritingHost, text: TextModel, takes: int
) -> None:
    host.every_s = 0.0001
    async with GenerationAnswer(host, call(), PROMPT, text) as answer:
        pieces = await answer.take()
        handed_on, told = await handed(answer, takes)
        rest = await answer.whole()
    assert "".join([piece.text for piece in [*pieces, *handed_on, *rest]]) == host.text
    assert (handed_on != [], False in told) == (True, takes <= len(handed_on))
    assert answer.usage is not None
    assert answer.usage.finish_reason == "stop"


async def test_a_stop_string_ends_what_is_handed_on(host: WritingHost, text: TextModel) -> None:
    host.every_s = 0.0001
    async with GenerationAnswer(host, call(), PROMPT, text, stop=["comes"]) as answer:
        pieces = await answer.take()
        pieces += (await handed(answer))[0]
        assert await answer.take() == []
    assert "".join([piece.text for piece in pieces]) == "the tide "


class PausingHost:
    """A host that gives a first token, waits until it is asked to go on, and gives others."""

    def __init__(self, *tokens: TokenBatch) -> None:
        self.goes_on = asyncio.Event()
        self._tokens = tokens

    async def infer(self, call: Call) -> Reply:
        assert call.tokens is not None
        call.tokens.put(TokenBatch(0, (5,)))
        await self.goes_on.wait()
        for batch in self._tokens:
            call.tokens.put(batch)
        await asyncio.Event().wait()
        raise AssertionError("not reached")


async def test_tokens_that_break_the_contract_end_what_is_handed_on(text: TextModel) -> None:
    host: Any = PausingHost(TokenBatch(1, (-3,)))
    async with GenerationAnswer(host, call(), PROMPT, text) as answer:
        assert await answer.take()
        host.goes_on.set()
        with pytest.raises(BadAnswer, match="not in the vocabulary"):
            await answer.hand_on(lambda _: True)


async def test_a_front_whose_caller_left_is_told_where_it_waits(text: TextModel) -> None:
    def write(_: list[Piece]) -> bool:
        raise ConnectionResetError("the caller has left")

    host: Any = PausingHost(TokenBatch(1, (6,)), TokenBatch(2, (7,)))
    async with GenerationAnswer(host, call(), PROMPT, text) as answer:
        assert await answer.take()
        host.goes_on.set()
        with pytest.raises(ConnectionResetError):
            await answer.hand_on(write)


async def test_what_a_caller_who_left_was_written_is_freed_without_a_collection(text: TextModel) -> None:
    class Connection:
        def write(self, _: list[Piece]) -> bool:
            raise ConnectionResetError("the caller has left")

    async def serve() -> weakref.ref[Connection]:
        connection = Connection()
        host: Any = PausingHost(TokenBatch(1, (6,)), TokenBatch(2, (7,)))
        async with GenerationAnswer(host, call(), PROMPT, text) as answer:
            assert await answer.take()
            host.goes_on.set()
            with contextlib.suppress(ConnectionResetError):
                await answer.hand_on(connection.write)
        return weakref.ref(connection)

    gc.collect()
    gc.disable()
    try:
        kept = await asyncio.create_task(serve(), name="front")
        await clock.sleep(0.001)
        assert kept() is None
    finally:
        gc.enable()


async def test_what_is_handed_on_wakes_no_task(text: TextModel) -> None:
    host: Any = PausingHost(*[TokenBatch(at, (6,)) for at in range(1, 9)])
    async with GenerationAnswer(host, call(), PROMPT, text) as answer:
        assert await answer.take()
        written: list[Piece] = []

        def write(pieces: list[Piece]) -> bool:
            written.extend(pieces)
            return True

        reading = asyncio.ensure_future(answer.hand_on(write))
        host.goes_on.set()
        await clock.sleep(0.001)
        assert (len(written), reading.done()) == (8, False)
        answer.fail(NothingAlive("its credential is good no more"))
        assert await reading
        with pytest.raises(NothingAlive):
            await answer.take()
