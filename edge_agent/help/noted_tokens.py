"""Noted tokens are the tokens of an answer on their way, with a note that the first of them has come."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.token_sink import TokenBatch, TokenSink


class NotedTokens:
    """A `TokenSink` before another one. Args: on_first: called before the first tokens are handed on."""

    def __init__(self, sink: TokenSink, on_first: Callable[[], None] = lambda: None) -> None:
        self.has_begun = False
        self._sink = sink
        self._on_first = on_first

    @property
    def window(self) -> int:
        return self._sink.window

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._sink.started(prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._on_first()
        self._sink.put(batch)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._sink.on_credit(credit)

    def __repr__(self) -> str:
        return f"<NotedTokens {'begun' if self.has_begun else 'not begun'}>"
