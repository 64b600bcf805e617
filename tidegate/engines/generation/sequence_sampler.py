"""Chooses each sequence's next token within transformers' continuous batching, whose own sampling is one for all.

It is a logits processor, which transformers calls with the logits of all sequences that get a token, after it has said
which these are. Where all of them want the likeliest token and no more, the logits stay as they are, on their device.
Otherwise each row is looked at by itself, and what was chosen is left as the only token that can come.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from tidegate.engines.generation.token_choice import TokenChoice, TokenLogprobs

_MINUS_INFINITY: Final = float("-inf")


class SequenceSampler(ContinuousBatchingLogitsProcessor):
    """Mutable: `begin` and `end` as sequences do; transformers calls the rest."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - as transformers declares it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._sequences: dict[str, TokenChoice] = {}
        self._logprobs: dict[str, list[TokenLogprobs]] = {}  # of tokens that have not been taken
        self._rows: list[str] = []  # whose tokens come next, in order

    def begin(self, key: str, choice: TokenChoice) -> None:
        self._sequences[key] = choice

    def end(self, key: str) -> None:
        self._sequences.pop(key, None)
        self._logprobs.pop(key, None)

    def take_logprobs(self, key: str) -> list[TokenLogprobs]:
        """The log-probabilities of the tokens that were chosen since the last time, where they were asked for."""
        return self._logprobs.pop(key, [])

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [one.state.request_id for one in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """float32[sequences, vocabulary], of which the largest is what each sequence says next."""
        for row, key in enumerate(self._rows):
            choice = self._sequences.get(key)
            if choice is None:
                continue
            if choice.is_plain:
                scores[row, choice.suppressed] = _MINUS_INFINITY
                continue
            token, logprobs = choice.choose(scores[row].cpu().numpy())
            if logprobs is not None:
                self._logprobs.setdefault(key, []).append(logprobs)
            scores[row] = _MINUS_INFINITY
            scores[row, token] = 0.0
        return scores

    def __repr__(self) -> str:
        return f"<SequenceSampler {len(self._sequences)} sequences>"
