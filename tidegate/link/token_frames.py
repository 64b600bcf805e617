"""The tokens of a stream's generations on their way out: what is ready in one turn of the loop leaves as one message.

One token costs a frame of some thirty bytes, and a message of gRPC some 50 µs whatever is in it; so the tokens of all
generations that come in the same turn are written together, and nothing waits for company beyond that turn.

How many tokens of a generation are under way is bounded by its window and the other side's credit, which is handed on
to whoever makes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidegate.link import frames
from tidegate.token_sink import MAX_WINDOW, TokenBatch

_FRAME_BYTES = 24
_ID_BYTES = 4


class TokenFrames:
    """The generations under way on one stream, by request id.

    Args:
        send: queues one encoded Envelope.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._open: dict[int, SentTokens] = {}
        self._ready: list[tuple[int, TokenBatch]] = []
        self._flush_due: asyncio.Handle | None = None

    def open(self, id: int, window: int) -> SentTokens:
        """The sink of a generation, until `close`."""
        self._open[id] = sink = SentTokens(self, id, min(window, MAX_WINDOW))
        return sink

    def close(self, id: int) -> None:
        """Send no more of a generation; what was put is sent."""
        self._open.pop(id, None)

    def credit(self, id: int, count: int) -> None:
        """The other side has read so many tokens. A generation that has ended is ignored."""
        if (sink := self._open.get(id)) is not None:
            sink.credit(count)

    def started(self, id: int, prompt_tokens: int, cached_tokens: int) -> None:
        if id in self._open:
            self._send(frames.started(id, prompt_tokens, cached_tokens))

    def put(self, id: int, batch: TokenBatch) -> None:
        if id not in self._open:
            return  # its caller has left
        self._ready.append((id, batch))
        if self._flush_due is None:
            self._flush_due = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write what is ready now: an answer goes after its tokens."""
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        if self._ready:
            ready, self._ready = self._ready, []
            self._send(frames.tokens(ready))

    def __repr__(self) -> str:
        return f"<TokenFrames {len(self._open)} generations, {len(self._ready)} batches ready>"


class SentTokens:
    """A `TokenSink` whose reader is at the other side of the link."""

    __slots__ = ("_credit", "_early", "_frames", "_id", "window")

    def __init__(self, frames: TokenFrames, id: int, window: int) -> None:
        self.window = window
        self._frames = frames
        self._id = id
        self._credit: Callable[[int], None] | None = None
        self._early = 0  # credit that came before there was anyone to take it

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._frames.started(self._id, prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        self._frames.put(self._id, batch)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit
        if self._early:
            early, self._early = self._early, 0
            credit(early)

    def credit(self, count: int) -> None:
        if self._credit is None:
            self._early += count
        else:
            self._credit(count)

    def __repr__(self) -> str:
        return f"<SentTokens of request {self._id}>"
