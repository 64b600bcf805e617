"""A user's own data to calibrate and measure with: an .npz of one array per input, a row per sample, perhaps labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tidegate.models.array_files import UnsafeArrayFile, load_npz
from tidegate.tools.build.errors import BuildError

LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Samples:
    """`feeds` holds one row each, with the first axis kept; `labels` are the right classes, where the file has them."""

    feeds: tuple[dict[str, NDArray[Any]], ...]
    labels: NDArray[Any] | None = None


def load_samples(path: Path, inputs: Sequence[str], *, most: int = 1024) -> Samples:
    """The first `most` samples of the file. Raises BuildError: an input is missing, or the arrays differ in length."""
    arrays = _arrays(path)
    if missing := [name for name in inputs if name not in arrays]:
        raise BuildError(f"{path}: lacks the input {missing[0]!r} (arrays in it: {', '.join(arrays) or 'none'})")
    lengths = {name: arrays[name].shape[0] if arrays[name].shape else 0 for name in inputs}
    labels = _labels(path, arrays[LABELS]) if LABELS in arrays else None
    if labels is not None:
        lengths[LABELS] = len(labels)
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        words = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BuildError(f"{path}: every array needs the same number of rows, at least one, but they have: {words}")
    count = min(most, lengths[inputs[0]])
    feeds = tuple({name: arrays[name][row : row + 1] for name in inputs} for row in range(count))
    return Samples(feeds, None if labels is None else labels[:count])


def _labels(path: Path, labels: NDArray[Any]) -> NDArray[Any]:
    """One number a row. Raises BuildError: compared with classes, others would be wrong or right by their form."""
    if labels.ndim == 0 or labels.size != len(labels) or labels.dtype.kind not in "iufb":
        raise BuildError(
            f"{path}: {LABELS!r} must be the number of the right class of each row, from 0 on, not "
            f"{labels.dtype}{list(labels.shape)}"
        )
    return labels.reshape(-1)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return load_npz(path)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from error
    except UnsafeArrayFile as error:
        raise BuildError(str(error)) from error
