"""Tokens on their way from the engine to the caller, and the credit that comes back.

Whoever makes tokens puts them into a `TokenSink`; it may have `window` tokens under way that nobody has read, and gets
more when the reader has taken some. So a reader that stalls pauses its own sequence and nothing else, and every buffer
between the two holds at most a window. On each hop the sink hands batches on in the turn of the loop in which they
come; what is coalesced is coalesced by whoever writes to a wire.

    engine ── worker's socket ── host ── link ── gateway ── `generate/token_stream.py` ── front
           put(batch) →                                                  take()
           ← credit(n)                                                   ← read

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

DEFAULT_WINDOW: Final = 256  # tokens; at 50 tokens a second a reader may stall for five seconds unnoticed
MAX_WINDOW: Final = 65536


class TopLogprob(NamedTuple):
    """A token that was likely in some place, and the natural logarithm of its probability."""

    id: int
    logprob: float


class TextDelta(NamedTuple):
    """What has come of an answer from a target that gives no ids: about a token, in words.

    Args:
        more: what OpenAI's form has beside the text, such as the calls of tools; by the names that it has there.
    """

    text: str
    more: Mapping[str, Any] | None = None


class TokenBatch(NamedTuple):
    """Consecutive tokens of one generation. A stop token that ended it is not among them."""

    first: int  # the index of the first of them, from 0; the next batch begins at first + size
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # of each, where they were asked for
    top: tuple[tuple[TopLogprob, ...], ...] = ()  # of each, the likeliest tokens in its place, where asked for
    deltas: tuple[TextDelta, ...] = ()  # instead of ids, from a target that gives text

    @property
    def size(self) -> int:
        """How many tokens it counts for in windows and limits."""
        return len(self.ids) or len(self.deltas)

    def beyond(self, count: int) -> TokenBatch:
        """The tokens after the first `count` of them."""
        return TokenBatch(
            self.first + count, self.ids[count:], self.logprobs[count:], self.top[count:], self.deltas[count:]
        )


class TokenObjectives(NamedTuple):
    """By when the tokens of a generation should come, in seconds; None: it does not matter. Nothing ends for them."""

    first_s: float | None = None  # from now to the first token; 0: it is late already
    next_s: float | None = None  # for each further one, on average


class TokenSink(Protocol):
    """Where the tokens of one generation go. Called from the loop; nothing here blocks or raises."""

    @property
    def window(self) -> int:
        """Tokens that may be under way at the beginning."""
        ...

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The prompt has been computed, `cached_tokens` of it from a cache. Called once, before the first batch."""
        ...

    def put(self, batch: TokenBatch) -> None:
        """Take the next tokens."""
        ...

    def on_credit(self, credit: Callable[[int], None]) -> None:
        """Call `credit(n)` whenever n more tokens may come. Set by whoever makes the tokens, before the first."""
        ...
