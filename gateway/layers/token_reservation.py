"""A generation's tokens on its tenant's account: reserved before it begins, drawn as they come, settled at its end.

Its prompt is known, and of its answer as much is reserved as such answers usually have: with `max_tokens`, which
callers leave high, a tenant would be refused for tokens that are never made. An answer that goes on beyond that draws
from the account a few tokens at a time, and where nothing is left there it is cut: it ends with what it has, and says
why. What it has more than was paid for is at most one batch of tokens.

An answer that is not read as it comes cannot be cut, so all that it may have is reserved (`token_forecast.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidegate.generate.usage import usage_if_generated
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Reply

DRAW: Final = 16  # tokens at a time, beyond those reserved


def tokens_made(reply: Reply) -> int | None:
    """The tokens of an answer and its prompt; None of one that does not say."""
    usage = usage_if_generated(reply.response)
    return None if usage is None else usage.prompt_tokens + usage.completion_tokens


class MeteredTokens:
    """A `TokenSink` that passes tokens on to another for as long as they are paid for.

    Args:
        held: tokens that are reserved, the prompt's among them.
        prompt: of those, the prompt's: no target's word makes it cost more.
        draw: pays for so many more; False: it cannot.
        cut: called once, where it could not.
    """

    __slots__ = ("_cut", "_draw", "_prompt", "_sink", "held", "made")

    def __init__(
        self, sink: TokenSink, held: int, prompt: int, draw: Callable[[int], bool], cut: Callable[[], object]
    ) -> None:
        self._sink = sink
        self._prompt = prompt
        self._draw = draw
        self._cut: Callable[[], object] | None = cut
        self.held = held
        self.made = 0  # the prompt's, and what came

    @property
    def window(self) -> int:
        return self._sink.window

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.made += min(prompt_tokens, self._prompt)
        self._sink.started(prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        if self._cut is None:
            return  # what was on its way
        self.made += batch.size
        if self.made > self.held:
            self._pay()
        self._sink.put(batch)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._sink.on_credit(credit)

    def _pay(self) -> None:
        more = max(DRAW, self.made - self.held)
        if self._draw(more):
            self.held += more
        elif self._cut is not None:
            cut, self._cut = self._cut, None
            cut()

    def __repr__(self) -> str:
        return f"<MeteredTokens {self.made} of {self.held} held{', cut' if self._cut is None else ''}>"
