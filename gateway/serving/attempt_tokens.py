"""The tokens of one attempt: those of the attempt that begins first go to the caller, all others' nowhere.

Two attempts may race to the first token. Nothing of an attempt is shown before the request machine has settled on it;
from then on its tokens and the caller's credit pass through here without a look.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.token_sink import TokenBatch, TokenSink


class AttemptTokens:
    """A `TokenSink` between one attempt and the caller's.

    Args:
        sink: the caller's.
        begin: called with this at the first tokens; says whether this attempt is the one that answers.
    """

    __slots__ = ("_begin", "_credit", "_is_chosen", "_sink", "_started", "made")

    def __init__(self, sink: TokenSink, begin: Callable[[AttemptTokens], bool]) -> None:
        self._sink = sink
        self._begin = begin
        self._is_chosen: bool | None = None  # None: nothing has come yet
        self._started = 0, 0
        self._credit: Callable[[int], None] | None = None
        self.made = 0  # tokens that the caller was given

    @property
    def prompt_tokens(self) -> int:
        return self._started[0]

    @property
    def cached_tokens(self) -> int:
        """Of the prompt."""
        return self._started[1]

    @property
    def window(self) -> int:
        return self._sink.window

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Kept until its first token is there: a prompt that is computed is no beginning of an answer."""
        self._started = prompt_tokens, cached_tokens

    def put(self, batch: TokenBatch) -> None:
        if self._is_chosen is None:
            self._is_chosen = self._begin(self)
            if self._is_chosen:
                if self._credit is not None:
                    self._sink.on_credit(self._credit)
                self._sink.started(*self._started)
        if self._is_chosen:
            self.made += len(batch.ids)
            self._sink.put(batch)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit

    def __repr__(self) -> str:
        state = {None: "nothing yet", True: "chosen", False: "not chosen"}[self._is_chosen]
        return f"<AttemptTokens {state}>"
