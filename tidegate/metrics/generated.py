"""The counts of a target over its generations: tokens in and out, and the time to the first token.

Pure, and without the client library, as `served.py`. Tokens of an answer that its caller left, or that failed on its
way, are counted as wasted and not as output.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tidegate.generate.usage import Usage
from tidegate.metrics.histogram import DURATIONS_S, STAGES_S, Histogram


class GeneratingState(NamedTuple):
    """How one generating variant of a target is doing."""

    model: str
    variant: str
    running: int
    waiting: int
    slots: int
    reserved_bytes: int  # of attention caches


class GeneratedCounts:
    """Mutable: `ended` or `broken` once for each generation that began."""

    def __init__(self) -> None:
        self.tokens: Counter[tuple[str, str]] = Counter()  # (model, type): input, cached, output, wasted
        self.first_token_s: dict[str, Histogram] = {}  # by model: from the request's arrival here
        self.token_s: dict[str, Histogram] = {}  # by model: the mean of an answer, between two tokens

    def ended(self, model: str, usage: Usage, first_token_s: float | None) -> None:
        """Args: first_token_s: None of an answer that has none."""
        self.tokens[model, "input"] += usage.prompt_tokens
        self.tokens[model, "cached"] += usage.cached_tokens
        self.tokens[model, "output"] += usage.completion_tokens
        if first_token_s is not None:
            self._observe(self.first_token_s, DURATIONS_S, model, first_token_s)
        if usage.completion_tokens > 1:
            self._observe(self.token_s, STAGES_S, model, usage.decode_s / (usage.completion_tokens - 1))

    def broken(self, model: str, tokens: int) -> None:
        """One has ended without an answer, after so many tokens."""
        if tokens:
            self.tokens[model, "wasted"] += tokens

    def _observe(self, into: dict[str, Histogram], bounds: tuple[float, ...], model: str, seconds: float) -> None:
        if model not in into:
            into[model] = Histogram(bounds)
        into[model].observe(seconds)

    def __repr__(self) -> str:
        return f"<GeneratedCounts {sum(self.tokens.values())} tokens>"
