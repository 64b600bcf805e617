"""A comparison of two artefacts: how close the answers are, how fast each is, and how large.

Closeness is the mean cosine of the first output's rows, or top-1: accuracy where labels are known, and otherwise how
often both have the same class on top. Latency is of one thread, as on an edge device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tidegate.engines.engine import Engine
from tidegate.tools.build.evaluate.measure import cosines, interleaved_s, top1

Metric = Literal["cosine", "top1"]
Feed = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Closeness:
    """`reference` is the reference's own accuracy, where labels made the metric an accuracy."""

    metric: Metric
    value: float
    samples: int
    reference: float | None = None


def closeness(
    reference: Engine,
    candidate: Engine,
    feeds: Sequence[Feed],
    *,
    output: str,
    metric: Metric,
    labels: NDArray[Any] | None = None,
) -> Closeness:
    """How `output` of the candidate compares on `feeds`, run one after another."""
    truth = np.concatenate([_rows(reference, feed, output) for feed in feeds])
    answer = np.concatenate([_rows(candidate, feed, output) for feed in feeds])
    if metric == "cosine":
        return Closeness(metric, float(cosines(truth, answer).mean()), len(answer))
    if labels is None:
        return Closeness(metric, top1(answer, truth.argmax(axis=-1)), len(answer))
    return Closeness(metric, top1(answer, labels), len(answer), reference=top1(truth, labels))


def latencies_s(engines: Mapping[str, Engine], feeds: Mapping[str, Feed]) -> dict[str, dict[str, float]]:
    """Median seconds of each engine on each feed: feed → engine → seconds."""
    found: dict[str, dict[str, float]] = {}
    for label, feed in feeds.items():
        calls: dict[str, Callable[[], Any]] = {name: partial(engine.infer, feed) for name, engine in engines.items()}
        found[label] = interleaved_s(calls)
    return found


def _rows(engine: Engine, feed: Feed, output: str) -> NDArray[Any]:
    """The answers as two-dimensional rows; rows of unequal length are only comparable by what pads them."""
    answer = engine.infer(feed)[output]
    return answer.reshape(len(answer), -1) if answer.ndim > 1 else answer.reshape(1, -1)
