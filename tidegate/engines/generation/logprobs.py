"""The log-probability of a token, and of the likeliest ones in its place, from a model's logits.

Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.token_sink import TopLogprob


def token_logprobs(logits: NDArray[Any], token: int, top: int) -> tuple[float, tuple[TopLogprob, ...]]:
    """The token's log-probability, and the `top` likeliest tokens', the likeliest first.

    Args:
        logits: float[vocabulary], finite but for -inf.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    if not top:
        return float(values[token]), ()
    top = min(top, len(values))
    likeliest = np.argpartition(values, len(values) - top)[-top:]
    likeliest = likeliest[np.argsort(-values[likeliest], kind="stable")]
    return float(values[token]), tuple(TopLogprob(int(one), float(values[one])) for one in likeliest)
