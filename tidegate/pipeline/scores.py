"""Steps on a model's outputs: token vectors to one, scores to probabilities, the best of them and their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.models.steps import LabelsStep, PoolingStep, TopKStep
from tidegate.pipeline.refusal import StepRefused

MOST_LABEL_BYTES: Final = 64 * 2**20
_LEAST: Final = np.float32(1e-12)  # what a vector's length is taken for at least, so that none is divided by 0


def pool(step: PoolingStep, vectors: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[np.float32]:
    """float[rows, tokens, size] to float32[rows, size]; a row without any token is zeros."""
    vectors = vectors.astype(np.float32, copy=False)
    kept = np.ones(vectors.shape[:2], bool) if mask is None else mask.astype(bool)
    if step.how == "first":
        pooled = vectors[:, 0] if vectors.shape[1] else np.zeros((vectors.shape[0], vectors.shape[2]), np.float32)
    elif step.how == "max":
        largest = np.where(kept[:, :, None], vectors, -np.inf).max(axis=1, initial=-np.inf)
        pooled = np.where(kept.any(axis=1, keepdims=True), largest, 0.0)
    else:
        counts = np.maximum(kept.sum(axis=1), 1).astype(np.float32)
        pooled = np.einsum("rts,rt->rs", vectors, kept.astype(np.float32)) / counts[:, None]
    if step.unit_length:
        pooled = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), _LEAST)
    return np.ascontiguousarray(pooled, np.float32)


def softmax(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Along the last axis, as float32."""
    wide = scores.astype(np.float32, copy=False)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.ascontiguousarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def top_k(step: TopKStep, scores: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The largest of each row and their places; of equal ones the first. NaN counts as least.

    Raises:
        StepRefused: rows have fewer than `k`.
    """
    if scores.shape[1] < step.k:
        raise StepRefused(f"there are {scores.shape[1]} scores, fewer than k = {step.k}")
    places = np.argsort(-scores.astype(np.float32, copy=False), axis=1, kind="stable")[:, : step.k]
    values = np.take_along_axis(scores, places, axis=1)
    return np.ascontiguousarray(values, np.float32), np.ascontiguousarray(places, np.int64)


class Labels:
    """The names of a file, a line each. Raises ValueError, OSError where the file is none."""

    def __init__(self, step: LabelsStep, path: Path) -> None:
        if path.stat().st_size > MOST_LABEL_BYTES:
            raise ValueError(f"has more than {MOST_LABEL_BYTES} bytes")
        self._file = step.file
        # Of lines alone: `splitlines` also ends one at a form feed, U+0085 and U+2028, and each name behind would be
        # another class's. Editors put a mark before UTF-8, which is no part of the first name.
        text = path.read_text(encoding="utf-8-sig")
        lines = text.removesuffix("\n").split("\n") if text else []
        self._names = np.empty(len(lines), object)
        self._names[:] = [line.encode() for line in lines]

    def of(self, places: NDArray[Any]) -> NDArray[Any]:
        """The name of each place. Raises StepRefused for one that the file has no line for."""
        count = len(self._names)
        if places.size and (places.min() < 0 or places.max() >= count):
            wrong = int(places.max() if places.max() >= count else places.min())
            raise StepRefused(f"place {wrong} has no name: {self._file!r} has {count} lines")
        names: NDArray[Any] = self._names[places]
        return names

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<Labels {self._file} of {len(self._names)}>"
