"""How far two answers to one request disagree, as one number from 0 (the same) to 1: the mean over the request's rows.

What the number is of one row: `expectation.py`. Beside it stands how far apart both answers lie, which is the same
number but for classes, where the vectors of all classes are compared and not only which one is the largest. An answer
that cannot be compared, since it has another shape, another datatype or no finite number, disagrees altogether; an
output that the caller did not ask for is not compared. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.core.agreement.expectation import AgreementTerms, Metric
from tidegate.arrays import tensor_to_array
from tidegate.outcome import InvalidRequest
from tidegate.types import Datatype, Tensor

_FLOATS: Final = (Datatype.FP16, Datatype.FP32, Datatype.FP64)


class AnswerComparison(NamedTuple):
    """How far two answers disagree by their metric, and how far apart they lie as vectors; both from 0 to 1."""

    score: float
    apart: float


_NOTHING_ALIKE: Final = AnswerComparison(1.0, 1.0)


def compared(terms: AgreementTerms, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> AnswerComparison | None:
    """None: the reference has nothing to compare with."""
    truth = next((one for one in reference if one.name == terms.output), None)
    if truth is None or truth.datatype not in _FLOATS or not truth.elements:
        return None
    found = next((one for one in answer if one.name == terms.output), None)
    if found is None or found.datatype not in _FLOATS or found.shape != truth.shape:
        return _NOTHING_ALIKE
    try:
        rows, wanted = _rows(found), _rows(truth)
    except InvalidRequest:
        return _NOTHING_ALIKE
    if not np.isfinite(wanted).all():
        return None
    apart = row_disagreement("cosine", rows, wanted)
    return AnswerComparison(apart if terms.metric == "cosine" else row_disagreement(terms.metric, rows, wanted), apart)


def row_disagreement(metric: Metric, rows: NDArray[Any], reference: NDArray[Any]) -> float:
    """The mean over rows, float64[row, column]; the reference is finite."""
    finite = np.isfinite(rows).all(axis=1)
    rows = np.where(finite[:, None], rows, 0.0)
    if metric == "top1":
        scores = (rows.argmax(axis=1) != reference.argmax(axis=1)).astype(np.float64)
    else:
        squares = (rows * rows).sum(axis=1) + (reference * reference).sum(axis=1)
        # 1 − 2⟨a, b⟩ / (|a|² + |b|²); two rows of zeros are the same
        overlap = np.divide(2.0 * (rows * reference).sum(axis=1), squares, out=np.ones_like(squares), where=squares > 0)
        scores = 1.0 - overlap
    return float(np.where(finite, np.clip(scores, 0.0, 1.0), 1.0).mean())


def _rows(tensor: Tensor) -> NDArray[np.float64]:
    array = tensor_to_array(tensor).astype(np.float64)
    return array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
