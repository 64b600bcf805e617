"""A token's way through a gateway calls few functions and wakes no task: it is what a gateway does most of all."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import gateway
import tidegate
from gateway.core.estimate.token_gaps import TokenGaps
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.serving.attempt_tokens import AttemptTokens
from tests.support.models.text_side import text_side_folder
from tests.support.serving.oip_servers import OneFolder
from tidegate import clock
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.text.text_models import TextModels
from tidegate.link import frames
from tidegate.link.client import LinkClient, Question
from tidegate.link.frames import Greeting
from tidegate.link.session import KeepaliveTiming
from tidegate.oip.generation.answer import GenerationAnswer, Piece
from tidegate.openai.generated import CompletionForm, Events
from tidegate.token_sink import TokenBatch
from tidegate.types import Accepted, Call, LoadReport, Reply

STREAMS, TOKENS = 20, 10
MOST_CALLS: Final = 18  # of our functions, a coroutine that is woken among them: one more than were counted
_OURS: Final = tuple([str(Path(package.__path__[0])) for package in (gateway, tidegate)])


class ScriptedStream:
    """A `MessageStream` of which the test is the other side."""

    def __init__(self) -> None:
        self.coming = asyncio.Queue[bytes]()

    async def read(self) -> bytes | None:
        return await self.coming.get()

    async def write(self, message: bytes) -> None:
        pass


class QuietListener:
    """A link's `Listener` that does nothing."""

    def greeted(self, greeting: Greeting) -> None: ...

    def loaded(self, load: LoadReport, offers: Any) -> None: ...

    def measured(self, rtt_s: float) -> None: ...

    def leaving(self, reason: str) -> None: ...


class LinkedHost:
    """A host whose answers come over one link."""

    def __init__(self, client: LinkClient) -> None:
        self._client = client
        self._gaps = TokenGaps()

    async def infer(self, call: Call) -> Reply:
        assert call.tokens is not None
        tokens = AttemptTokens(call.tokens, AnswerSoFar(call.tokens.window), lambda _: True, self._gaps)
        accepted: Callable[[Accepted], None] = lambda _: None  # noqa: E731
        await self._client.ask(Question(b"", clock.now() + 60.0, 0, "", "", accepted, tokens=tokens))
        raise AssertionError("not reached")


async def test_a_token_of_a_stream_calls_few_functions(tmp_path: Path) -> None:
    text = await TextModels(OneFolder(tmp_path)).of(text_side_folder(tmp_path))
    stream = ScriptedStream()
    client = LinkClient(stream, Greeting("gateway/a", 0, ""), QuietListener(), heartbeat=KeepaliveTiming(60.0, 3))
    running = asyncio.create_task(client.run())
    stream.coming.put_nowait(frames.hello(Greeting("pool", 1, "")))
    await clock.sleep(0)
    written = list[bytes]()

    async def read() -> None:
        call = Call(infer_request("talker", GenerateRequest((5, 6), 100)), "openai", 0.0)
        events = Events(CompletionForm(), {"id": "cmpl-1", "created": 0, "model": "talker"})

        def write(pieces: list[Piece]) -> bool:
            written.append(events.pieces(pieces))
            return True

        async with GenerationAnswer(LinkedHost(client), call, (5, 6), text) as answer:  # type: ignore[arg-type]
            write(await answer.take())
            await answer.hand_on(write)

    readers = [asyncio.create_task(read()) for _ in range(STREAMS)]
    await clock.sleep(0.001)
    messages = [
        frames.tokens([(id, TokenBatch(at, (10 + at,))) for id in range(1, STREAMS + 1)]) for at in range(TOKENS + 1)
    ]
    stream.coming.put_nowait(messages[0])
    await clock.sleep(0.001)
    assert len(written) == STREAMS
    calls = 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(_OURS)

    sys.setprofile(count)
    try:
        for message in messages[1:]:
            stream.coming.put_nowait(message)
            await clock.sleep(0.001)
    finally:
        sys.setprofile(None)
    assert len(written) == STREAMS * (TOKENS + 1)
    assert calls <= MOST_CALLS * STREAMS * TOKENS
    for one in (*readers, running):
        one.cancel()
    await asyncio.gather(*readers, running, return_exceptions=True)
