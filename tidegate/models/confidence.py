"""How sure a classifier is of its answer, as one number from 0 (not at all) to 1.

Three measures of a row of class probabilities, all 0 where every class is as likely as any other:

    margin    the best probability less the second best
    entropy   1 less the row's entropy over the greatest that so many classes can have
    top1      the best probability

A request's confidence is the least of its rows': it is answered as a whole, and escalated as a whole.

Whatever is no distribution over classes counts as hard, 0.0, and never as easy: no rows, NaN or infinity, another
number of classes than the manifest's, probabilities that are negative or do not add up (scores need `softmax`), bytes
that do not fit their shape, and rows in which all classes are equal, however sure the measure would call them.

Only answers that a better variant could outdo are judged: of the best variant the model has no second opinion. Nor are
answers whose caller did not ask for the output that it is read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import tensor_to_array
from tidegate.models.manifest import Confidence, Manifest
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, RequestedOutput, Tensor

_SUM_TOLERANCE: Final = 0.02  # a float16 softmax over a thousand classes is off by as much
_FLOATS: Final = (Datatype.FP16, Datatype.FP32, Datatype.FP64)


class ConfidenceMeasure:
    """How sure one model is of its answers. Immutable."""

    __slots__ = ("_classes", "_how", "_variants")

    def __init__(self, manifest: Manifest, how: Confidence) -> None:
        """Args: how: what to read it from; a manifest that is being calibrated has none yet."""
        self._how = how
        self._variants = manifest.improvable
        self._classes = next(spec.shape[-1] for spec in manifest.outputs if spec.name == how.output)

    def confidence(self, variant: str, wanted: Sequence[RequestedOutput], outputs: Sequence[Tensor]) -> float | None:
        """Of an answer by `variant`; `wanted` are the outputs that its request named. None: it is not judged."""
        output = self._how.output
        if variant not in self._variants or (wanted and all(one.name != output for one in wanted)):
            return None
        tensor = next((one for one in outputs if one.name == output), None)
        return 0.0 if tensor is None else self.of(tensor)

    def of(self, tensor: Tensor) -> float:
        """Of one answer's output, as it came."""
        if tensor.datatype not in _FLOATS:
            return 0.0
        try:
            rows = tensor_to_array(tensor)
        except InvalidRequest:
            return 0.0
        if isinstance(self._classes, int) and rows.shape[-1:] != (self._classes,):
            return 0.0
        return confidence(rows, self._how)

    def __repr__(self) -> str:
        variants = ", ".join(sorted(self._variants)) or "none"
        return f"<ConfidenceMeasure by {self._how.measure} of {self._how.output}, of {variants}>"


def confidence(rows: NDArray[Any], how: Confidence) -> float:
    """The least of the rows' confidences; the last axis of floats[..., class] is the classes."""
    if rows.ndim == 0 or rows.size == 0 or rows.shape[-1] < 2:
        return 0.0
    scores = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
    if not np.isfinite(scores).all():
        return 0.0
    best_first = -np.sort(-scores, axis=-1)
    if (best_first[:, 0] == best_first[:, -1]).any():
        return 0.0
    shares = _softmax(best_first) if how.softmax else best_first
    if (shares < 0.0).any() or (np.abs(shares.sum(axis=-1) - 1.0) > _SUM_TOLERANCE).any():
        return 0.0
    return float(np.clip(_measured(shares, how), 0.0, 1.0).min())


def _measured(shares: NDArray[np.float64], how: Confidence) -> NDArray[np.float64]:
    """Each row's confidence; rows have their best class first."""
    best: NDArray[np.float64] = shares[:, 0]
    if how.measure == "top1":
        return best
    if how.measure == "margin":
        return best - shares[:, 1]
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0.0)
    surprise: NDArray[np.float64] = -(shares * logs).sum(axis=-1)
    return 1.0 - surprise / log(shares.shape[-1])


def _softmax(best_first: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # the distance of two huge scores may be more than a float holds: its share is 0
        powers = np.exp(best_first - best_first[:, :1])
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
