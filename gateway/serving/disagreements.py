"""The disagreements work list: the inputs on which devices differ from the reference most, for the next model.

An entry holds a digest of the input and the score, and no input; where the operator names a folder, the input itself is
kept there as `MODEL-VERSION-SCORE-DIGEST.npz`, which `numpy.load` and `tidegate model calibrate` read. Both are
bounded: the latest `most` entries, and `most_bytes` of files, of which the oldest go first. Files are written in a
thread; a folder that cannot be written costs a line in the log and no answer.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog

from gateway.core.agreement.agreement_watch import ShadowedAnswer
from gateway.core.agreement.expectation import slice_words
from tidegate import clock
from tidegate.arrays import tensor_to_array
from tidegate.storage.atomic_file import write_atomically
from tidegate.types import Datatype, Tensor

log = structlog.get_logger(__name__)

_SMALL_BYTES: Final = 1 << 16
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._]")


class Disagreement(msgspec.Struct, frozen=True):
    """One input on which a device and the reference differ."""

    at_utc: float
    model: str
    version: str
    variant: str
    target: str
    reference: str
    metric: str
    score: float
    limit: float
    slice: str
    input_sha256: str
    file: str = ""  # of the input, where it was kept


class Disagreements:
    """Mutable: `keep` what differs.

    Args:
        most: entries in memory.
        folder: where inputs are kept; None: nowhere.
        most_bytes: of all files in the folder that this writes.
    """

    def __init__(self, most: int, folder: Path | None = None, most_bytes: int = 0) -> None:
        self._entries: deque[Disagreement] = deque(maxlen=most)
        self._folder = folder
        self._most_bytes = most_bytes
        self.kept = 0  # since the start

    def __iter__(self) -> Iterator[Disagreement]:
        """Newest first."""
        return reversed(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    async def keep(self, answer: ShadowedAnswer, inputs: Sequence[Tensor]) -> None:
        """Add one, if it differs by more than is usual."""
        terms, source = answer.terms, answer.source
        if answer.score <= terms.limit or self._entries.maxlen == 0:
            return
        if sum(len(one.raw) for one in inputs) <= _SMALL_BYTES:
            digest = input_digest(inputs)  # sooner done than a thread is woken
        else:
            digest = await asyncio.to_thread(input_digest, inputs)
        file = ""
        if self._folder is not None:
            name = f"{source.model}-{source.version}-{answer.score:.4f}-{digest[:16]}.npz"
            file = await asyncio.to_thread(_write, self._folder, _UNSAFE.sub("_", name), inputs, self._most_bytes)
        self.kept += 1
        self._entries.append(
            Disagreement(
                at_utc=clock.utc_s(),
                model=source.model,
                version=source.version,
                variant=source.variant,
                target=source.target,
                reference=answer.reference,
                metric=terms.metric,
                score=round(answer.score, 6),
                limit=round(terms.limit, 6),
                slice=slice_words(answer.slice, answer.feature),
                input_sha256=digest,
                file=file,
            )
        )

    def __repr__(self) -> str:
        return f"<Disagreements {len(self._entries)} of {self.kept}>"


def input_digest(inputs: Sequence[Tensor]) -> str:
    """The SHA-256 of names, datatypes, shapes and contents."""
    digest = sha256()
    for tensor in inputs:
        digest.update(f"{tensor.name}\0{tensor.datatype.value}{list(tensor.shape)}\0".encode())
        digest.update(tensor.raw)
    return digest.hexdigest()


def _write(folder: Path, name: str, inputs: Sequence[Tensor], most_bytes: int) -> str:
    """The path of the written file; "" where it was not written."""
    arrays = {one.name: tensor_to_array(one) for one in inputs if one.datatype is not Datatype.BYTES}
    if not arrays:
        return ""
    packed = BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]  # its stub takes the names for options
    content = packed.getvalue()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_room(folder, most_bytes - len(content))
        if len(content) > most_bytes:
            return ""
        write_atomically(folder / name, content, mode=0o600, durable=False)
    except OSError as error:
        log.warning("a disagreement's input cannot be kept", folder=str(folder), reason=error.strerror or str(error))
        return ""
    return str(folder / name)


def _make_room(folder: Path, for_bytes: int) -> None:
    found = sorted(((one.stat(), one) for one in folder.glob("*.npz")), key=lambda pair: pair[0].st_mtime)
    size = sum(stat.st_size for stat, _ in found)
    for stat, path in found:
        if size <= max(0, for_bytes):
            return
        path.unlink(missing_ok=True)
        size -= stat.st_size
