"""A host whose answers come in parts, at a pace that its test sets."""

from __future__ import annotations

import asyncio

from tests.support.serving.hosts import EchoHost
from tidegate import clock
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Call, Reply


class TalkingHost(EchoHost):
    """Says `count` tokens, one every `every_s`, as far as it has credit; then it answers as the echo does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 5
        self.every_s = 0.01
        self.logprobs: tuple[float, ...] = ()
        self.said = 0
        self.breaks_at: int | None = None  # after so many tokens it raises `error`

    async def infer(self, call: Call) -> Reply:
        if call.tokens is not None:
            await self._talk(call.tokens)
        return await super().infer(call)

    async def _talk(self, sink: TokenSink) -> None:
        allowed, more = sink.window, asyncio.Event()

        def credit(count: int) -> None:
            nonlocal allowed
            allowed += count
            more.set()

        sink.on_credit(credit)
        sink.started(31, 24)
        for index in range(self.count):
            if index == self.breaks_at and self.error is not None:
                raise self.error
            while index >= allowed:
                more.clear()
                await more.wait()
            await clock.sleep(self.every_s)
            sink.put(TokenBatch(index, (1000 + index,), self.logprobs))
            self.said += 1
