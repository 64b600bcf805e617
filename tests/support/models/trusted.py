"""Puts a file that a test made on the trust list of its repository, as an operator would."""

from __future__ import annotations

from pathlib import Path

from tidegate.models.digest import sha256_of
from tidegate.models.trusted_digests import TrustedDigests


def trust_file(path: Path, root: Path | None = None) -> TrustedDigests:
    """The list of `root`, or of the repository that the file lies in, with the file on it."""
    trusted = TrustedDigests(root) if root is not None else TrustedDigests.of_artefact(path)
    trusted.add({sha256_of(path): "made by a test"})
    return trusted
