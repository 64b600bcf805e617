"""What a gateway can be told of taking in what devices kept."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tidegate.config import Section


class IngestConfig(Section):
    """Taking what devices kept while they were away (`docs/offline.md`)."""

    path: Path = Field(description="SQLite file for deferred requests, their answers and records; one gateway each.")
    max_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="Bytes of those at most; then the oldest records give way, and after them devices have to wait.",
    )
    max_remembered: int = Field(
        1_000_000,
        ge=1000,
        description="Ids remembered against duplicates, some 100 bytes each, for seven days. Where that is less than a "
        "week's, older things are refused.",
    )
