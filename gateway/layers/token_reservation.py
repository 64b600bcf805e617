"""A generation's tokens on its tenant's account: reserved before it begins, settled at its end by what was made."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tidegate.generate.request import INPUT_IDS, MAX_TOKENS_KEY
from tidegate.generate.usage import usage_if_generated
from tidegate.models.generative import Generative
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Call, InferRequest, Reply


def most_tokens(request: InferRequest, generative: Generative) -> int:
    """The tokens of its prompt, and as many as its answer may have; never more than the context."""
    prompt = sum([tensor.elements for tensor in request.inputs if tensor.name == INPUT_IDS])
    said = request.parameters.get(MAX_TOKENS_KEY)
    wanted = said if isinstance(said, int) and said > 0 else generative.default_max_tokens
    return min(generative.context, prompt + wanted)


def tokens_made(reply: Reply) -> int | None:
    """The tokens of an answer and its prompt; None of one that does not say."""
    usage = usage_if_generated(reply.response)
    return None if usage is None else usage.prompt_tokens + usage.completion_tokens


class CountedTokens:
    """A `TokenSink` that counts what goes through it to another."""

    __slots__ = ("_sink", "made")

    def __init__(self, sink: TokenSink) -> None:
        self._sink = sink
        self.made = 0  # the prompt's, and what came

    @property
    def window(self) -> int:
        return self._sink.window

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.made += prompt_tokens
        self._sink.started(prompt_tokens, cached_tokens)

    def put(self, batch: TokenBatch) -> None:
        self.made += len(batch.ids)
        self._sink.put(batch)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._sink.on_credit(credit)

    def __repr__(self) -> str:
        return f"<CountedTokens {self.made}>"


def counted(call: Call) -> tuple[Call, CountedTokens | None]:
    """The call with its tokens counted; as it is where nobody reads them before the end."""
    if call.tokens is None:
        return call, None
    tokens = CountedTokens(call.tokens)
    return replace(call, tokens=tokens), tokens
