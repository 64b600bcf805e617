"""Generations under way and tokens a second, by model, as the console shows them.

A generation may take minutes, so its tokens are counted while they come and not at its end: once a second each stream
under way is asked how many it has taken, which costs nothing for a token. What is left is counted at the end, and all
of an answer that came in one piece. Of a generation that was cancelled or failed, what had come counts.

Invariants: each call that began is forgotten at its end; no token is counted twice; memory is bounded by the calls
under way and by `SlidingStats`'s keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.core.estimate.sliding_stats import SlidingStats, bucket_of
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import usage_if_generated
from tidegate.types import Call, InferRequest, Reply

_AT_ONCE: Final = 0  # the bucket of what has no duration


class GenerationSummary(NamedTuple):
    """One model now. Rates are those of the last ten to fifteen seconds, quantiles of the last minute."""

    model: str
    under_way: int
    in_per_s: float  # tokens of prompts
    out_per_s: float  # tokens of answers
    first_token_s: tuple[float, ...]  # p50, p95, p99 of answers that were streamed; empty without one


class _UnderWay:
    """One generation, and what of it has been counted."""

    __slots__ = ("model", "prompt", "stream", "written")

    def __init__(self, model: str, stream: TokenStream | None) -> None:
        self.model = model
        self.stream = stream
        self.prompt = self.written = 0


class GenerationRates:
    """Mutable: an arrival observer of calls; `sample` once a second, `read` for the screen.

    Args:
        generates: whether the model of a request generates.
    """

    def __init__(self, generates: Callable[[InferRequest], bool]) -> None:
        self._generates = generates
        self._under_way: dict[int, _UnderWay] = {}  # by the identity of the call, which lives as long
        self._tokens: SlidingStats[tuple[str, str]] = SlidingStats()  # by model and "in" or "out"; a token is one end
        self._first: SlidingStats[str] = SlidingStats()

    def began(self, call: Call) -> None:
        if self._generates(call.request):
            stream = call.tokens if isinstance(call.tokens, TokenStream) else None
            self._under_way[id(call)] = _UnderWay(call.request.model_name, stream)

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        one = self._under_way.pop(id(call), None)
        if one is None:
            return
        usage = usage_if_generated(reply.response)
        if usage is None:
            self._count_stream(one, now)
        else:
            self._count(one, usage.prompt_tokens, usage.completion_tokens, now)
        if reply.first_token_s is not None:
            self._first.count(one.model, "in_time", bucket_of(reply.first_token_s), now)

    def ended(self, call: Call, now: float) -> None:
        """It was cancelled, or failed."""
        one = self._under_way.pop(id(call), None)
        if one is not None:
            self._count_stream(one, now)

    def sample(self, now: float) -> None:
        """Count what has come since the last time."""
        for one in self._under_way.values():
            self._count_stream(one, now)

    def read(self, now: float) -> list[GenerationSummary]:
        """Return each model that generates now or did in the last minute, the busiest first."""
        self.sample(now)
        under_way = Counter([one.model for one in self._under_way.values()])
        rates = {key: summary.per_s for key, summary in self._tokens.items(now)}
        first = {model: summary.quantiles_s for model, summary in self._first.items(now)}
        found = [
            GenerationSummary(
                model,
                under_way[model],
                rates.get((model, "in"), 0.0),
                rates.get((model, "out"), 0.0),
                first.get(model, ()),
            )
            for model in sorted({*under_way, *(model for model, _ in rates)})
        ]
        return sorted(found, key=lambda one: (-one.out_per_s, -one.under_way, one.model))

    def _count_stream(self, one: _UnderWay, now: float) -> None:
        if one.stream is not None:
            self._count(one, one.stream.prompt_tokens or 0, one.stream.received, now)

    def _count(self, one: _UnderWay, prompt: int, written: int, now: float) -> None:
        """Count up to these totals of the generation."""
        if prompt > one.prompt:
            self._tokens.count((one.model, "in"), "in_time", _AT_ONCE, now, prompt - one.prompt)
            one.prompt = prompt
        if written > one.written:
            self._tokens.count((one.model, "out"), "in_time", _AT_ONCE, now, written - one.written)
            one.written = written

    def __repr__(self) -> str:
        return f"<GenerationRates {len(self._under_way)} under way>"
