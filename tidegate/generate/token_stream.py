"""The reading end of a generation's tokens: a `TokenSink` that gives them to one reader.

A reader that has a task waits in `take`. One that writes each token to a socket is called instead (`on_ready`): to wake
a task that is a dozen coroutines deep costs more than all else that is done for a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidegate.token_sink import DEFAULT_WINDOW, TokenBatch


class TokenStream:
    """A `TokenSink` with one reader, which takes what is there, waits for it, or is called when there is something.

    The reader gets at once whatever has come since the last time, so that one that writes to a slow wire gets more at
    a time and no more often.
    """

    __slots__ = (
        "_batches",
        "_credit",
        "_credited",
        "_loop",
        "_ready",
        "_waiter",
        "cached_tokens",
        "has_ended",
        "prompt_tokens",
        "received",
        "window",
    )

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self.window = window
        self.prompt_tokens: int | None = None  # None: it has not started
        self.cached_tokens = 0
        self.received = 0  # tokens of the answer, read or not
        self.has_ended = False  # no more will come, but what is here may not have been read
        self._batches: list[TokenBatch] = []
        self._credit: Callable[[int], None] | None = None
        self._credited = 0  # tokens of those read
        self._waiter: asyncio.Future[None] | None = None
        self._ready: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens

    def put(self, batch: TokenBatch) -> None:
        self.received += len(batch.ids) or len(batch.deltas)
        self._batches.append(batch)
        if len(self._batches) == 1:  # else the reader has been told
            self._wake()

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit

    def end(self) -> None:
        """No more will come: the reader is given what is left, and then nothing."""
        self.has_ended = True
        self._wake()

    def on_ready(self, ready: Callable[[], None] | None) -> None:
        """Call `ready` from the loop when something has come, or the end, after nothing was there; None: no more.

        It is called behind all that comes in the same turn of the loop, and may be called once where nothing is new.
        """
        self._ready = ready
        if ready is not None:
            self._loop = asyncio.get_running_loop()
            if self._batches or self.has_ended:
                self._wake()

    async def take(self) -> list[TokenBatch]:
        """What has come and was not taken, waiting for the first of it; empty at the end. One reader at a time."""
        while not self._batches and not self.has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.taken()

    def taken(self) -> list[TokenBatch]:
        """The same without waiting: empty where nothing is there."""
        taken, self._batches = self._batches, []
        owed = self.received - self._credited
        # A credit costs a frame on every hop: a quarter of the window at a time keeps the maker busy.
        if 4 * owed >= self.window and self._credit is not None and not self.has_ended:
            self._credited = self.received
            self._credit(owed)
        return taken

    def _wake(self) -> None:
        if self._ready is not None and self._loop is not None:
            self._loop.call_soon(self._ready)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __repr__(self) -> str:
        waiting = sum(batch.size for batch in self._batches)
        return f"<TokenStream {waiting} of {self.window} tokens not read{', ended' if self.has_ended else ''}>"
