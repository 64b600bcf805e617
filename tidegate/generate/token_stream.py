"""The reading end of a generation's tokens: a `TokenSink` that gives them to one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidegate.token_sink import DEFAULT_WINDOW, TokenBatch


class TokenStream:
    """A `TokenSink` with one reader, which takes what is there or waits for it.

    `take` returns at once whatever has come since the last time, so that a reader that writes to a slow wire gets more
    at a time and no more often.
    """

    __slots__ = (
        "_batches",
        "_credit",
        "_ended",
        "_owed",
        "_waiter",
        "cached_tokens",
        "prompt_tokens",
        "received",
        "window",
    )

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self.window = window
        self.prompt_tokens: int | None = None  # None: it has not started
        self.cached_tokens = 0
        self.received = 0  # tokens of the answer, read or not
        self._batches: list[TokenBatch] = []
        self._credit: Callable[[int], None] | None = None
        self._owed = 0  # tokens read and not yet credited
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self._wake()

    def put(self, batch: TokenBatch) -> None:
        self._batches.append(batch)
        self.received += batch.size
        self._wake()

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit

    def end(self) -> None:
        """No more will come: the reader is given what is left, and then nothing."""
        self._ended = True
        self._wake()

    async def take(self) -> list[TokenBatch]:
        """What has come and was not taken, waiting for the first of it; empty at the end. One reader at a time."""
        while not self._batches and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._batches = self._batches, []
        self._owed += sum([batch.size for batch in taken])
        # A credit costs a frame on every hop: a quarter of the window at a time keeps the maker busy.
        if self._credit is not None and 4 * self._owed >= self.window and not self._ended:
            owed, self._owed = self._owed, 0
            self._credit(owed)
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __repr__(self) -> str:
        waiting = sum(batch.size for batch in self._batches)
        return f"<TokenStream {waiting} of {self.window} tokens not read{', ended' if self._ended else ''}>"
