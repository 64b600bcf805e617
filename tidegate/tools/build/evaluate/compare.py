"""A comparison of two artefacts: how close the answers are, how fast each is, and how large.

Closeness is the mean cosine of the rows of one output (`measured_output`), or top-1: accuracy where labels are known,
and otherwise how often both have the same class on top. An output of one integer a row is the class itself, as
classifiers of scikit-learn give it. Latency is of one thread, as on an edge device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tidegate.engines.engine import Engine, EngineError
from tidegate.models.manifest import Manifest, TensorSpec
from tidegate.tools.build.evaluate.measure import as_numbers, cosines, interleaved_s
from tidegate.types import Datatype

_FLOATS: Final = (Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64)
_INTEGERS: Final = (
    Datatype.INT8, Datatype.INT16, Datatype.INT32, Datatype.INT64,
    Datatype.UINT8, Datatype.UINT16, Datatype.UINT32, Datatype.UINT64,
)  # fmt: skip
Metric = Literal["cosine", "top1"]
Feed = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Closeness:
    """`reference` is the reference's own accuracy, where labels made the metric an accuracy."""

    metric: Metric
    value: float
    samples: int
    reference: float | None = None


def measured_output(manifest: Manifest) -> TensorSpec | None:
    """The first output of scores or vectors, or else of integers; None where all are texts or truths.

    Quantization moves the former, and classifiers of scikit-learn give labels first.
    """
    for wanted in (_FLOATS, _INTEGERS):
        if found := next((spec for spec in manifest.outputs if spec.datatype in wanted), None):
            return found
    return None


def closeness(
    reference: Engine,
    candidate: Engine,
    feeds: Sequence[Feed],
    *,
    output: TensorSpec,
    metric: Metric,
    labels: NDArray[Any] | None = None,
) -> Closeness:
    """How `output` of the candidate compares on `feeds`, run one after another.

    Feeds may be of unequal length: a row is compared with the row of the same feed.

    Raises:
        EngineError: an engine cannot run a feed, or the two answer in other shapes.
    """
    pairs = [(_rows(reference, feed, output), _rows(candidate, feed, output)) for feed in feeds]
    if other := next((pair for pair in pairs if pair[0].shape != pair[1].shape), None):
        shapes = f"{other[0].shape} values in one and {other[1].shape}"
        raise EngineError(f"{output.name!r} cannot be compared: it has {shapes}")
    count = sum(len(truth) for truth, _ in pairs)
    if metric == "cosine":
        return Closeness(metric, float(np.concatenate([cosines(*pair) for pair in pairs]).mean()), count)
    wanted = np.concatenate([_classes(truth, output) for truth, _ in pairs])
    found = np.concatenate([_classes(answer, output) for _, answer in pairs])
    if labels is None:
        return Closeness(metric, float((found == wanted).mean()), count)
    return Closeness(metric, float((found == labels).mean()), count, reference=float((wanted == labels).mean()))


def latencies_s(engines: Mapping[str, Engine], feeds: Mapping[str, Feed]) -> dict[str, dict[str, float]]:
    """Median seconds of each engine on each feed: feed → engine → seconds."""
    found: dict[str, dict[str, float]] = {}
    for label, feed in feeds.items():
        calls: dict[str, Callable[[], Any]] = {name: partial(engine.infer, feed) for name, engine in engines.items()}
        found[label] = interleaved_s(calls)
    return found


def _rows(engine: Engine, feed: Feed, output: TensorSpec) -> NDArray[Any]:
    """The answers as two-dimensional rows; rows of unequal length are only comparable by what pads them."""
    answer = as_numbers(engine.infer(feed)[output.name], output.datatype)
    return answer.reshape(len(answer), -1) if answer.ndim > 1 else answer.reshape(1, -1)


def _classes(rows: NDArray[Any], output: TensorSpec) -> NDArray[Any]:
    """The class of each row."""
    is_class = output.datatype in _INTEGERS and rows.shape[1] == 1
    classes: NDArray[Any] = rows[:, 0] if is_class else rows.argmax(axis=-1)
    return classes
