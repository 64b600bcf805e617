"""The step from texts to token ids, by the model's own tokenizer.

Rows of one request are padded to the longest of them, or to the ids' fixed length, where they have one. A text is cut
where the step says (`tidegate/generate/text/truncated_encoding.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.models.manifest import Axis, TensorSpec
from tidegate.models.repository import MAX_TOKENIZER_BYTES
from tidegate.models.steps import TokenizeStep
from tidegate.pipeline.refusal import StepRefused

# Of all texts of a request together. A text of blanks has hardly any tokens and is read to its end all the same, at
# about a second a megabyte: so long the worker would be held for what was priced at a few tokens.
MOST_TEXT_BYTES: Final = 1 << 19


class TextTokens:
    """One step with its tokenizer. Blocks while it reads the file.

    Raises:
        ImportError: the package `tokenizers` is not installed.
        ValueError, OSError: the file is no tokenizer.
    """

    def __init__(self, step: TokenizeStep, path: Path, ids: TensorSpec, axes: dict[str, Axis]) -> None:
        # A worker has the cores that it was given; the library would otherwise start a thread for each of the machine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tidegate.generate.text.truncated_encoding import encode_truncated, truncating_tokenizer

        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(f"has more than {MAX_TOKENIZER_BYTES} bytes")
        self._encode = encode_truncated
        self._step = step
        try:
            self._tokenizer = truncating_tokenizer(path.read_bytes(), step.max_tokens)
        except OSError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"is no tokenizer: {error}") from error
        self._dtype = np.dtype(ids.datatype.numpy_name)
        length = ids.shape[-1]
        self._fixed = length if isinstance(length, int) else 0
        self._least = 0 if isinstance(length, int) else axes[length].min

    def of(self, texts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and mask, integer[rows, tokens]. Raises StepRefused: texts are too long, or one is not UTF-8."""
        size_bytes = sum(map(len, texts))
        if size_bytes > MOST_TEXT_BYTES:
            raise StepRefused(f"the texts have {size_bytes} bytes, and at most {MOST_TEXT_BYTES} of a request are read")
        encodings = self._encode(self._tokenizer, [_text(row, text) for row, text in enumerate(texts)])
        width = self._fixed or max(self._least, 1, *(len(one.ids) for one in encodings)) if encodings else self._least
        ids = np.zeros((len(encodings), width), self._dtype)
        mask = np.zeros((len(encodings), width), self._dtype)
        for row, one in enumerate(encodings):
            count = min(len(one.ids), width)
            ids[row, :count] = one.ids[:count]
            mask[row, :count] = 1
        return ids, mask

    def __repr__(self) -> str:
        return f"<TextTokens {self._step.file} up to {self._step.max_tokens}>"


def _text(row: int, text: bytes | str) -> str:
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise StepRefused(f"text {row} is not UTF-8: {error.reason} at byte {error.start}") from error
