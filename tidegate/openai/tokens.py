"""Turns texts into token ids with each model's own tokenizer, without holding the event loop.

The tokenizer is a Rust library that lets go of Python's lock while it works on a batch. A short text takes some tens of
microseconds, less than a thread's round trip, and is done in place; more goes to a thread, some of it at a time: a
thread cannot be stopped, so a caller that leaves, or whose time is up, would keep it for a body's worth of work, and
those behind it would wait for all of that. Tokenizers are read from the model's folder once, at the start where `load`
is called then, so that no request pays for it.

Texts are cut to the model's length as `tidegate/generate/text/truncated_encoding.py` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tidegate.generate.text.text_models import ModelFolders
from tidegate.generate.text.truncated_encoding import encode_truncated, truncating_tokenizer
from tidegate.models.manifest import Manifest, Text
from tidegate.models.repository import RepositoryError, read_tokenizer
from tidegate.oip.offload import LARGE_BYTES, CodecThreads
from tidegate.openai.embeddings import TokenRow, text_of
from tidegate.runtime.process import StartError

INLINE_CHARACTERS: Final = 2048
# Of one job in a thread: a tenth of a second of most texts, and long beside the thread's round trip.
JOB_CHARACTERS: Final = 2**16
JOB_TEXTS: Final = 64
_AS_BYTES: Final = LARGE_BYTES // INLINE_CHARACTERS  # of a body that takes as long: no part of a long one is inline


class Tokenizers:
    """The tokenizers of a repository's models."""

    def __init__(self, repository: ModelFolders) -> None:
        self._repository = repository
        self._loaded: dict[tuple[str, int], Any] = {}  # versions with the same tokenizer share it: it has megabytes
        self._loading = asyncio.Lock()
        self._aside = CodecThreads()  # a caller that leaves does not stop its thread: few of them may be at work

    def __repr__(self) -> str:
        return f"<Tokenizers {len(self._loaded)} loaded>"

    async def load(self, manifests: Sequence[Manifest]) -> None:
        """Read the tokenizers of those models that take text.

        Raises:
            StartError: a tokenizer is not there, is another or cannot be read; names the file.
        """
        for manifest in manifests:
            if manifest.text is not None:
                await self._tokenizer(manifest)

    async def rows(self, manifest: Manifest, texts: Sequence[str]) -> list[TokenRow]:
        """Each text as a row of tokens, cut to the model's length."""
        tokenizer = await self._tokenizer(manifest)
        characters = sum(map(len, texts))
        if characters <= INLINE_CHARACTERS:
            return _rows(tokenizer, texts)
        rows: list[TokenRow] = []
        for job in jobs_of(texts):
            rows += await self._aside.run(characters * _AS_BYTES, partial(_rows, tokenizer, job))
        return rows

    async def _tokenizer(self, manifest: Manifest) -> Any:
        text = text_of(manifest)
        key = (text.sha256 or f"{manifest.name}/{manifest.version}", text.max_tokens)
        if key not in self._loaded:
            async with self._loading:
                if key not in self._loaded:
                    path = self._repository.folder(manifest) / text.tokenizer
                    self._loaded[key] = await asyncio.to_thread(_load, path, text)
        return self._loaded[key]


def jobs_of(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts, in order and as many at a time as one job may have; one that has more by itself is a job."""
    begin = characters = 0
    for index, text in enumerate(texts):
        if index > begin and (index - begin == JOB_TEXTS or characters + len(text) > JOB_CHARACTERS):
            yield texts[begin:index]
            begin, characters = index, 0
        characters += len(text)
    yield texts[begin:]


def _load(path: Path, text: Text) -> Any:
    try:
        return truncating_tokenizer(read_tokenizer(path, text), text.max_tokens)
    except RepositoryError as error:
        raise StartError(f"cannot read the tokenizer: {error}") from error
    except Exception as error:  # the library raises nothing narrower
        raise StartError(f"cannot read the tokenizer {path}: {error}") from error


def _rows(tokenizer: Any, texts: Sequence[str]) -> list[TokenRow]:
    encodings = encode_truncated(tokenizer, texts)
    return [TokenRow(encoding.ids, truncated=bool(encoding.overflowing)) for encoding in encodings]
