"""A model host that writes what its test tells it to, token by token, as a gateway in front of an engine would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.models.text_side import tiny_tokenizer
from tests.support.serving.host import FakeHost
from tidegate import clock
from tidegate.generate.request import OUTPUT_IDS, GenerateRequest, generate_request, ids_tensor
from tidegate.generate.usage import FinishReason, Usage, usage_parameters
from tidegate.models.manifest import Manifest
from tidegate.token_sink import TokenBatch, TokenSink, TopLogprob
from tidegate.types import Call, InferResponse, Reply, Route

ROUTE = Route("edge/attic", "cheapest", "paced")


class WritingHost(FakeHost):
    """Writes `text`, or `ids`, in batches of `batch` tokens, each when `step` lets it."""

    def __init__(self, manifest: Manifest, *others: Manifest) -> None:
        super().__init__(manifest, *others)
        self.tokenizer = tiny_tokenizer()
        self.text = "the tide comes in"
        self.ids: tuple[int, ...] | None = None  # instead of the text's
        self.batch = 1
        self.every_s = 0.0
        self.in_one_piece = False  # nothing in the stream
        self.fails_at: int | None = None  # after so many tokens it raises `failure`
        self.failure: Exception = RuntimeError("no failure was set")
        self.finish: FinishReason = "stop"
        self.asked: list[GenerateRequest] = []
        self.written = 0
        self.left = 0  # calls that were cancelled
        self.under_way = 0

    def prompt(self) -> str:
        """The newest prompt, as text with its special tokens."""
        text: str = self.tokenizer.decode(list(self.asked[-1].prompt), skip_special_tokens=False)
        return text

    async def infer(self, call: Call) -> Reply:
        if self.manifest(call.request.model_name).generative is None:
            return await super().infer(call)
        self.calls.append(call)
        self.asked.append(generate_request(call.request, default_max_tokens=16))
        self.under_way += 1
        try:
            return await self._write(call, self.asked[-1])
        except asyncio.CancelledError:
            self.left += 1
            self.cancelled.set()
            raise
        finally:
            self.under_way -= 1

    async def _write(self, call: Call, asked: GenerateRequest) -> Reply:
        ids = tuple(self.tokenizer.encode(self.text).ids) if self.ids is None else self.ids
        finish: FinishReason = self.finish if len(ids) <= asked.max_tokens else "length"
        ids = ids[: asked.max_tokens]
        self.arrived.set()
        if self.hold is not None:
            await self.hold.wait()
        if call.tokens is not None and not self.in_one_piece:
            await self._stream(call, call.tokens, ids)
        else:
            await clock.sleep(self.every_s * len(ids))
        if self.fails_at is not None:
            raise self.failure
        usage = Usage(finish, len(asked.prompt), len(ids) + (finish == "stop"), 3)
        response = InferResponse(
            call.request.model_name, "1", (ids_tensor(OUTPUT_IDS, ids),), call.request.id, usage_parameters(usage)
        )
        return Reply(
            response, stages={"queue": 0.001}, route=ROUTE, budget_left_s=1.5, variant="paced", request_id="3fa09c-1"
        )

    async def _stream(self, call: Call, sink: TokenSink, ids: tuple[int, ...]) -> None:
        room, more = sink.window, asyncio.Event()

        def credit(count: int) -> None:
            nonlocal room
            room += count
            more.set()

        for first in range(0, len(ids), self.batch):
            if self.fails_at is not None and first >= self.fails_at:
                raise self.failure
            if first == 0:
                if call.on_begun is not None:
                    call.on_begun(ROUTE)
                sink.on_credit(credit)
                sink.started(len(self.asked[-1].prompt), 3)
            while first + self.batch > room:
                more.clear()
                await more.wait()
            await clock.sleep(self.every_s)
            sink.put(self._batch(first, ids[first : first + self.batch]))
            self.written += min(self.batch, len(ids) - first)

    def _batch(self, first: int, ids: tuple[int, ...]) -> TokenBatch:
        wanted = self.asked[-1].logprobs
        if wanted is None:
            return TokenBatch(first, ids)
        top = tuple(tuple(TopLogprob(id + other, -0.5 - other) for other in range(wanted)) for id in ids)
        return TokenBatch(first, ids, tuple(-0.5 for _ in ids), top if wanted else ())


async def until(true: Callable[[], bool]) -> None:
    """Let the loop turn until it is so; the test's own time limit ends what never is."""
    while not true():
        await clock.sleep(0.001)
