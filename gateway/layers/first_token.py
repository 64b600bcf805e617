"""The first token decides which version answers a stream: until it comes another one may, and behind it none.

A version that is not proved yet gets a part of the time only (`versions.py`). Of a stream that part is for the first
token: an answer that has begun has the whole time, since its caller has been given words that no other version would go
on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidegate.outcome import DeadlineExceeded
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Reply


class FirstToken:
    """A `TokenSink` that knows whether anything has gone through it to another one."""

    __slots__ = ("_limit", "_sink", "has_come")

    def __init__(self, sink: TokenSink) -> None:
        self.has_come = False
        self._sink = sink
        self._limit: asyncio.Timeout | None = None

    async def within(self, limit_s: float, execution: Awaitable[Reply]) -> Reply:
        """The execution's reply. Raises DeadlineExceeded, and cancels it, where no token came in this time."""
        try:
            async with asyncio.timeout(limit_s) as self._limit:
                return await execution
        except TimeoutError as error:
            if self._limit is None or not self._limit.expired():
                raise
            raise DeadlineExceeded(f"no token came within {limit_s:.3g} s") from error
        finally:
            self._limit = None

    @property
    def window(self) -> int:
        return self._sink.window

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._sink.started(prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        if not self.has_come:
            self.has_come = True
            if self._limit is not None:
                self._limit.reschedule(None)
        self._sink.put(batch)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._sink.on_credit(credit)

    def __repr__(self) -> str:
        return f"<FirstToken {'has come' if self.has_come else 'is awaited'}>"
