"""The next token, chosen from a model's logits: temperature, then `top_k`, then `top_p`, as most engines do it.

    p(token) ~ e^(logit / temperature), of the `top_k` likeliest, of the fewest of those whose mass is `top_p` or more

One uniform number decides, so that a sequence with a seed says the same in any batch.

Pure. Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020 (nucleus sampling).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.generate.request import Sampling

LEAST_TEMPERATURE: Final = 1e-3  # below it all the mass is on one token, and quotients overflow


def is_greedy(sampling: Sampling) -> bool:
    """Whether the likeliest token is the only one that can come."""
    return sampling.temperature < LEAST_TEMPERATURE or sampling.top_p <= 0.0 or sampling.top_k == 1


def sampled_token(logits: NDArray[Any], sampling: Sampling, draw: float) -> int:
    """The token that `draw` falls on.

    Args:
        logits: float[vocabulary], finite but for -inf.
        draw: uniform, from 0 to below 1.
    """
    if is_greedy(sampling):
        return int(logits.argmax())
    values = logits.astype(np.float64) / sampling.temperature
    kept = _likeliest(values, sampling.top_k) if 0 < sampling.top_k < len(values) else np.arange(len(values))
    mass = np.exp(values[kept] - values[kept].max())
    if sampling.top_p < 1.0:
        order = np.argsort(-mass, kind="stable")
        kept, mass = kept[order], mass[order]
        nucleus = int(np.searchsorted(mass.cumsum(), sampling.top_p * mass.sum())) + 1
        kept, mass = kept[:nucleus], mass[:nucleus]
    reached = mass.cumsum()
    return int(kept[min(int(np.searchsorted(reached, draw * reached[-1], side="right")), len(kept) - 1)])


def _likeliest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    return np.argpartition(values, len(values) - count)[-count:]
