"""A file on a bad block: it is there, and the kernel ends each reading of it with EIO."""

from __future__ import annotations

from pathlib import Path


def on_a_bad_block(path: Path) -> None:
    """Put a file in its place that cannot be read, but renamed, replaced and removed, as one on a bad block can."""
    path.unlink()
    path.symlink_to("/proc/self/mem")  # nothing is mapped at its beginning, which is an I/O error to its reader
