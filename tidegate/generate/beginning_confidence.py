"""How sure a generating model is of an answer's beginning, as one number from 0 to 1, by its tokens' probabilities.

    mean     e to the mean logarithm of the probabilities: their geometric mean, whatever the number of tokens
    least    the probability of the least likely token: one wrong turn is enough

A token that was drawn by chance (temperature above 0) has the probability that the model gave it, not the one that it
was drawn with. No tokens, and numbers that are no logarithms of probabilities, count as 0: as unsure as can be.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite

from tidegate.models.generative import BeginningMeasure


def beginning_confidence(logprobs: Sequence[float], measure: BeginningMeasure) -> float:
    """Args: logprobs: natural logarithms of the probabilities of the first tokens, one each."""
    if not logprobs or not all(isfinite(one) for one in logprobs):
        return 0.0
    chosen = min(logprobs) if measure == "least" else sum(logprobs) / len(logprobs)
    return exp(min(0.0, chosen))
