"""The next token, chosen from a model's logits: temperature, `top_k`, `top_p` and `min_p`, in transformers' order.

    p(token) ~ e^(logit / temperature), of the `top_k` likeliest, of the fewest of those whose mass is `top_p` or more,
               of those of them that are at least `min_p` times as likely as the likeliest

One uniform number decides, and that is a function of the seed and the token's place in the answer. So a sequence with a
seed says the same in any batch, and an engine that is given the first half of an answer goes on as the one that made
it would have.

A vocabulary is never sorted as a whole: only what may be at the edge of what is kept. Among equals the lower id is
kept, and what is kept stands in the order of its ids.

Pure. Sources: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020 (nucleus sampling); Nguyen
et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", ICLR 2025; Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (SplitMix64, whose n-th number is computed without those
before it).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.generate.request import Sampling

LEAST_TEMPERATURE: Final = 1e-3  # below it all the mass is on one token, and quotients overflow
_BINS_A_NEPER: Final = 32.0  # so the masses of a bin differ by three in a hundred
_BINS: Final = 1024  # the last one has all below e^-32
_WORD: Final = 2**64 - 1
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's


def is_greedy(sampling: Sampling) -> bool:
    """Whether the likeliest token is the only one that can come."""
    return sampling.temperature < LEAST_TEMPERATURE or sampling.top_p <= 0.0 or sampling.top_k == 1


def draw_at(seed: int, place: int) -> float:
    """The number that decides which token stands at a place of an answer: uniform, from 0 to below 1.

    Args:
        seed: any whole number; its lowest 64 bits count.
        place: from 0.
    """
    mixed = (seed + (place + 1) * _STEP) & _WORD
    mixed = (mixed ^ mixed >> 30) * _MIX_1 & _WORD
    mixed = (mixed ^ mixed >> 27) * _MIX_2 & _WORD
    return float((mixed ^ mixed >> 31) >> 11) * 2.0**-53


def sampled_token(logits: NDArray[Any], sampling: Sampling, draw: float) -> int:
    """The token that `draw` falls on.

    Args:
        logits: float[vocabulary], finite but for -inf.
        draw: uniform, from 0 to below 1.
    """
    if is_greedy(sampling):
        return int(logits.argmax())
    mass = np.exp((logits - logits.max()) * np.float32(1.0 / sampling.temperature))
    kept: NDArray[np.int64] | None = None  # the ids of what `mass` is of; None: of all
    if 0 < sampling.top_k < len(mass):
        kept = _likeliest(mass, sampling.top_k)
        mass = mass[kept]
    if sampling.top_p < 1.0:
        nucleus = _nucleus(mass, sampling.top_p)
        kept, mass = nucleus if kept is None else kept[nucleus], mass[nucleus]
    if sampling.min_p > 0.0:  # the likeliest has the mass 1
        strong = np.flatnonzero(mass >= np.float32(sampling.min_p))
        kept, mass = strong if kept is None else kept[strong], mass[strong]
    reached = mass.cumsum(dtype=np.float64)
    # Never beyond the last token that has any mass, however the product is rounded.
    at = min(np.searchsorted(reached, draw * reached[-1], side="right"), np.searchsorted(reached, reached[-1]))
    return int(at if kept is None else kept[at])


def _likeliest(mass: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest, in order of their ids."""
    least = np.partition(mass, len(mass) - count)[len(mass) - count]
    above, equal = np.flatnonzero(mass > least), np.flatnonzero(mass == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def _nucleus(mass: NDArray[Any], share: float) -> NDArray[np.int64]:
    """The ids of the fewest whose mass is that share of all or more, in order of their ids.

    The largest mass is 1. Masses are counted in bins of their logarithm, so that only one bin has to be sorted.
    """
    with np.errstate(divide="ignore"):
        depth = np.log(mass)
    bins = np.minimum(depth * np.float32(-_BINS_A_NEPER), _BINS - 1).astype(np.intp)
    reached = np.bincount(bins, weights=mass, minlength=_BINS).cumsum()
    wanted = share * reached[-1]
    edge = int(np.searchsorted(reached, wanted))  # the bin in which it is reached
    among = np.flatnonzero(bins == edge)
    among = among[np.argsort(-mass[among], kind="stable")]
    above = reached[edge - 1] if edge else 0.0
    needed = int(np.searchsorted(above + mass[among].cumsum(dtype=np.float64), wanted)) + 1
    return np.sort(np.concatenate([np.flatnonzero(bins < edge), among[:needed]]))
