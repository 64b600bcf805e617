"""The SHA-256 of a file, read in pieces: an artefact may be larger than the memory of the device that checks it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

_PIECE_BYTES = 1 << 20  # past 1 MiB, larger reads no longer make it faster


def sha256_of(path: Path, *, on_bytes: Callable[[int], None] | None = None) -> str:
    """The digest of the file in lower-case hexadecimal; `on_bytes` hears of each piece read. Blocks. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return digest.hexdigest()
