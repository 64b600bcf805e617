"""`artefact_of` describes bytes in memory as an artefact of a rollout."""

from __future__ import annotations

from tidegate.rollout.canonical import digest_of
from tidegate.rollout.plan import Artefact


def artefact_of(path: str, raw: bytes, chunk_bytes: int = 1024 * 1024) -> Artefact:
    """The artefact of these bytes."""
    pieces = (raw[at : at + chunk_bytes] for at in range(0, len(raw), chunk_bytes))
    return Artefact(path, digest_of(raw), len(raw), chunk_bytes, tuple(map(digest_of, pieces)))
