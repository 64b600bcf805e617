"""The section `ingest`: accepting what devices stored while they were offline."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tidegate.config import Section


class IngestConfig(Section):
    """Where deferred requests and records are kept, and how many (`docs/offline.md`)."""

    path: Path = Field(description="SQLite file for deferred requests, their answers and records; one gateway each.")
    max_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="Bytes of these at most; then the oldest records are dropped, and after them devices have to wait.",
    )
    max_remembered: int = Field(
        1_000_000,
        ge=1000,
        description="Ids remembered against duplicates, some 100 bytes each, for seven days. If a week brings more "
        "than this, older items are refused.",
    )
