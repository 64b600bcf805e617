"""Chooses each sequence's next token within transformers' continuous batching, whose own sampling is one for all.

It is a logits processor, which transformers calls with the logits of all sequences that get a token, after it has said
which these are. Where all of them want the likeliest token and no more, the logits stay as they are, on their device.
Otherwise each row is looked at by itself, and what was chosen is left as the only token that can come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.random import Generator, default_rng
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from tidegate.engines.generation.logprobs import token_logprobs
from tidegate.engines.generation.sampling import is_greedy, sampled_token
from tidegate.generate.request import GenerateRequest
from tidegate.token_sink import TopLogprob

TokenLogprobs = tuple[float, tuple[TopLogprob, ...]]
_MINUS_INFINITY: Final = float("-inf")


class SequenceSampling:
    """How one sequence chooses."""

    __slots__ = ("_draws", "logprobs", "request", "suppressed")

    def __init__(self, request: GenerateRequest, stop_tokens: Iterable[int]) -> None:
        self.request = request
        self.suppressed = sorted(stop_tokens) if request.ignore_stop else []
        self.logprobs: list[TokenLogprobs] = []  # of tokens that have not been taken
        self._draws: Generator | None = None
        if not is_greedy(request.sampling):
            seed = request.sampling.seed
            self._draws = default_rng(None if seed is None else seed % 2**64)

    @property
    def is_plain(self) -> bool:
        """Whether the runtime's own choice, the likeliest token that is not suppressed, is all that it wants."""
        return self._draws is None and self.request.logprobs is None

    def choose(self, logits: torch.Tensor) -> int:
        """The next token; its log-probabilities are kept where they were asked for."""
        row = logits.cpu().numpy()
        allowed = row
        if self.suppressed:
            allowed = row.copy()
            allowed[self.suppressed] = -np.inf
        draw = self._draws.random() if self._draws is not None else 0.0
        token = sampled_token(allowed, self.request.sampling, draw)
        if self.request.logprobs is not None:
            self.logprobs.append(token_logprobs(row, token, self.request.logprobs))
        return token

    def __repr__(self) -> str:
        return f"<SequenceSampling {self.request.sampling}>"


class SequenceSampler(ContinuousBatchingLogitsProcessor):
    """Mutable: `begin` and `end` as sequences do; transformers calls the rest."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - as transformers declares it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._sequences: dict[str, SequenceSampling] = {}
        self._rows: list[str] = []  # whose tokens come next, in order

    def begin(self, key: str, sampling: SequenceSampling) -> None:
        self._sequences[key] = sampling

    def end(self, key: str) -> None:
        self._sequences.pop(key, None)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [one.state.request_id for one in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """float32[sequences, vocabulary], of which the largest is what each sequence says next."""
        for row, key in enumerate(self._rows):
            sampling = self._sequences.get(key)
            if sampling is None:
                continue
            if sampling.is_plain:
                scores[row, sampling.suppressed] = _MINUS_INFINITY
                continue
            token = sampling.choose(scores[row])
            scores[row] = _MINUS_INFINITY
            scores[row, token] = 0.0
        return scores

    def __repr__(self) -> str:
        return f"<SequenceSampler {len(self._sequences)} sequences>"
