"""Chooses one sequence's tokens from its logits, for engines whose own sampling is not used.

Log-probabilities are those of the model, before temperature and filters.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.engines.generation.logprobs import token_logprobs
from tidegate.engines.generation.sampling import draw_at, is_greedy, sampled_token
from tidegate.generate.request import GenerateRequest
from tidegate.token_sink import TopLogprob

TokenLogprobs = tuple[float, tuple[TopLogprob, ...]]


class TokenChoice:
    """How one sequence chooses. Mutable: it knows how far the answer has come.

    Args:
        stop_tokens: the model's own, which cannot come where the request ignores them.
    """

    __slots__ = ("_place", "_seed", "is_greedy", "request", "suppressed")

    def __init__(self, request: GenerateRequest, stop_tokens: Iterable[int]) -> None:
        self.request = request
        self.suppressed = sorted(stop_tokens) if request.ignore_stop else []
        self.is_greedy = is_greedy(request.sampling)
        seed = request.sampling.seed
        self._seed = secrets.randbits(64) if seed is None else seed
        self._place = request.answered

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token that is not suppressed is all that it wants."""
        return self.is_greedy and self.request.logprobs is None

    def choose(self, logits: NDArray[Any]) -> tuple[int, TokenLogprobs | None]:
        """The next token, and where they were asked for its log-probabilities.

        Args:
            logits: float[vocabulary], finite but for -inf. Left as they are.
        """
        allowed = logits
        if self.suppressed:
            allowed = logits.copy()
            allowed[self.suppressed] = -np.inf
        draw = 0.0 if self.is_greedy else draw_at(self._seed, self._place)
        self._place += 1
        token = sampled_token(allowed, self.request.sampling, draw)
        wanted = self.request.logprobs
        return token, None if wanted is None else token_logprobs(logits, token, wanted)

    def __repr__(self) -> str:
        return f"<TokenChoice {self.request.sampling} at {self._place}>"
