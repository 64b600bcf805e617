"""The sequence meter counts a generation's tokens on their way to its reader, and the time that the reader held it up.

A reader that takes nothing pauses its sequence once its window is full. That time is the reader's: it says nothing of
how fast the model is, and must not be learned from (`generating_variant.py`). A paused sequence holds its slot and its
memory all the same, so a reader that takes nothing for `READER_PATIENCE_S` has lost them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from tidegate import clock
from tidegate.outcome import DeadlineExceeded
from tidegate.token_sink import MAX_WINDOW, TokenBatch, TokenSink

READER_PATIENCE_S: Final = 60.0  # a person who stops a terminal's output comes back sooner, or has gone


class SequenceMeter:
    """A `TokenSink` before another, or before none: then nothing is ever held up.

    Args:
        max_tokens: of the whole answer: after these no credit is needed.
    """

    __slots__ = (
        "_credit", "_granted", "_max_tokens", "_paused_s", "_paused_since", "_sink", "_stalled", "_timer", "first_at",
        "tokens",
    )  # fmt: skip

    def __init__(self, sink: TokenSink | None, max_tokens: int) -> None:
        self.first_at: float | None = None
        self.tokens = 0
        self._stalled: asyncio.Timeout | None = None  # ends the generation
        self._timer: asyncio.TimerHandle | None = None
        self._sink = sink
        self._max_tokens = max_tokens
        self._granted = self.window
        self._credit: Callable[[int], None] | None = None
        self._paused_s = 0.0
        self._paused_since: float | None = None

    @property
    def window(self) -> int:
        return MAX_WINDOW if self._sink is None else self._sink.window

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        if self._sink is not None:
            self._sink.started(prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        count = len(batch.ids)
        if self.first_at is None:
            self.first_at = clock.now()
        self.tokens += count
        if self._sink is not None:
            self._sink.put(batch)
            if self._granted <= self.tokens < self._max_tokens and self._paused_since is None:
                self._paused_since = clock.now()
                self._timer = asyncio.get_running_loop().call_later(READER_PATIENCE_S, self._give_up)
        elif self._credit is not None:
            self._credit(count)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit
        if self._sink is not None:
            self._sink.on_credit(self._on_read)

    def paused_s(self, now: float) -> float:
        """Seconds so far in which its reader held it up."""
        return self._paused_s + (0.0 if self._paused_since is None else now - self._paused_since)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Generate inside. Raises DeadlineExceeded where the reader stalls."""
        try:
            async with asyncio.timeout(None) as limit:
                self._stalled = limit
                try:
                    yield
                finally:
                    self._rest()
                    # All of them hold this, or the task: what they hold would be there until garbage is collected.
                    self._sink = self._credit = self._stalled = None
        except TimeoutError:
            if not limit.expired():
                raise
            words = f"none of its tokens was read for {READER_PATIENCE_S:g} s, and others want its slot"
            raise DeadlineExceeded(words) from None

    def _give_up(self) -> None:
        if self._stalled is not None:
            self._stalled.reschedule(asyncio.get_running_loop().time())

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_read(self, tokens: int) -> None:
        self._granted += tokens
        if self._paused_since is not None and self._granted > self.tokens:
            self._paused_s += clock.now() - self._paused_since
            self._paused_since = None
            self._rest()
        if self._credit is not None:
            self._credit(tokens)

    def __repr__(self) -> str:
        return f"<SequenceMeter {self.tokens} of {self._max_tokens} tokens{', paused' if self._paused_since else ''}>"
