"""Quality and latency of an artefact are measured in the way in which the figures are used later.

Quality is against a reference on the same inputs: the mean cosine of output rows for embeddings, top-1 for classifiers.
Latency is taken interleaved, one call of each candidate in turn, so that a machine that slows down for a moment slows
all of them; the median is kept, because the noise of a shared machine only ever adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate import clock
from tidegate.types import Datatype

Floats = NDArray[Any]


def as_numbers(array: NDArray[Any], datatype: Datatype) -> NDArray[Any]:
    """An output as numbers: BF16 comes as its bits, which are the upper half of a float32's."""
    return (array.astype("<u4") << 16).view("<f4") if datatype is Datatype.BF16 else array


def cosines(reference: Floats, measured: Floats) -> NDArray[np.float64]:
    """The cosine of each row with its reference row; 1 where both are zero, 0 where one of them is."""
    first, second = (array.reshape(len(array), -1).astype(np.float64) for array in (reference, measured))
    lengths = np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1)
    product = lengths[0] * lengths[1]
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    cosine = np.divide((first * second).sum(axis=1), product, out=np.zeros_like(product), where=product > 0)
    return np.clip(np.where(both_zero, 1.0, cosine), -1.0, 1.0)


def top1(scores: Floats, labels: NDArray[Any]) -> float:
    """The part of rows whose highest score, over the last axis, is at the label."""
    return float((scores.argmax(axis=-1) == labels).mean())


def interleaved_s(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int = 15, warm_up: int = 3, most_s: float = 5.0
) -> dict[str, float]:
    """Median seconds of each call. Stops early, after at least three rounds, when `most_s` is spent."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    started = clock.now()
    for _ in range(warm_up):
        for call in calls.values():
            call()
    for round_number in range(repeats):
        if round_number >= 3 and clock.now() - started > most_s:
            break
        for name, call in calls.items():
            before = clock.now()
            call()
            taken[name].append(clock.now() - before)
    return {name: median(seconds) for name, seconds in taken.items()}
