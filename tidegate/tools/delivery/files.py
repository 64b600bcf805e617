"""The files of a model version as devices fetch them: their digests, and chunks of a fixed size.

Devices get what is for edges: the manifest, the variants that run there with all their files, those of the pipeline's
steps, the tokenizer and the chat template. A file's chunks are few, since their digests travel in every device's
document, and small enough that a link which breaks every few megabytes gets on.

Blocks on the disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.models.manifest import Manifest
from tidegate.models.repository import MANIFEST_FILE, Repository, RepositoryError
from tidegate.rollout.plan import MAX_CHUNK_BYTES, Artefact

LEAST_CHUNK_BYTES: Final = 256 * 1024
MOST_CHUNKS: Final = 128
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalArtefact:
    """An artefact and where it lies here."""

    artefact: Artefact
    path: Path


def files_of(repository: Repository, manifest: Manifest) -> tuple[LocalArtefact, ...]:
    """What a device needs of this version, verified. Raises RepositoryError: nothing is for edges, or it is wrong."""
    variants = manifest.variants_for("edge")
    if not variants:
        raise RepositoryError(f"model {manifest.name}:{manifest.version} of {repository.root} has no variant for edges")
    for variant in variants:
        repository.verify(manifest, variant)
    repository.verify_tokenizer(manifest)
    names = [MANIFEST_FILE]
    for variant in variants:
        names += [variant.artefact, *(one.name for one in variant.files)]
    names += [one.name for one in manifest.step_files]
    if manifest.text is not None:
        names.append(manifest.text.tokenizer)
    if (generative := manifest.generative) is not None:
        names += [generative.tokenizer, *([generative.chat_template] if generative.chat_template else [])]
    folder = repository.folder(manifest)
    return tuple(local_artefact(folder / name, name) for name in dict.fromkeys(names))


def local_artefact(path: Path, name: str) -> LocalArtefact:
    """A file as an artefact called `name`. Raises RepositoryError."""
    whole, digests = hashlib.sha256(), []
    try:
        size = path.stat().st_size
        chunk_bytes = chunk_for(size)
        with path.open("rb") as file:
            for at in range(0, size, chunk_bytes):
                digest, left = hashlib.sha256(), min(chunk_bytes, size - at)
                while left and (piece := file.read(min(_READ_BYTES, left))):
                    digest.update(piece)
                    whole.update(piece)
                    left -= len(piece)
                digests.append(digest.hexdigest())
    except OSError as error:
        raise RepositoryError(f"cannot read {path}: {error.strerror}") from error
    return LocalArtefact(Artefact(name, whole.hexdigest(), size, chunk_bytes, tuple(digests)), path)


def chunk_for(size_bytes: int) -> int:
    """A power of two."""
    chunk = LEAST_CHUNK_BYTES
    while chunk * MOST_CHUNKS < size_bytes and chunk < MAX_CHUNK_BYTES:
        chunk *= 2
    return chunk
