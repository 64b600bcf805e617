"""The tokens of one generation as they are received over a link: in order, once, and no more than there is credit for.

The other side is untrusted: a gap, a token too many or one that comes twice is a `BadAnswer`, and ends this generation
only.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.outcome import BadAnswer
from tidegate.token_sink import TokenBatch, TokenSink


class ReceivedTokens:
    """Checks what comes and hands it on.

    Args:
        send_credit: tells the other side that the reader has taken so many tokens.
    """

    __slots__ = ("_next", "_send_credit", "_sink", "_until")

    def __init__(self, sink: TokenSink, send_credit: Callable[[int], None]) -> None:
        self._sink = sink
        self._send_credit = send_credit
        self._next = 0  # the index of the next token
        self._until = sink.window  # the index of the first one that there is no credit for
        sink.on_credit(self._credit)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._sink.started(prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        """Raises BadAnswer."""
        if batch.first != self._next:
            raise BadAnswer(f"token {batch.first} came where {self._next} was expected")
        self._next = after = self._next + len(batch.ids)
        if after > self._until:
            raise BadAnswer(f"{after} tokens came, with credit for {self._until}")
        self._sink.put(batch)

    def _credit(self, count: int) -> None:
        self._until += count
        self._send_credit(count)

    def __repr__(self) -> str:
        return f"<ReceivedTokens {self._next} of {self._until}>"
