"""The section `ingest`: accepting what devices stored while they were offline."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

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
        "than this, the device with the most ids forgets its oldest, and its older items are refused.",
    )
    priorities: dict[str, Annotated[int, Field(ge=0, le=9)]] = Field(
        {},
        description="Highest priority (0 to 9) that deferred requests of a device may have against those of others, by "
        "the device's name or a pattern such as kiosk-*; the first that matches counts. Others: 0, devices take turns.",
    )
    models: dict[str, tuple[str, ...]] = Field(
        {"*": ("*",)},
        description="Globs of the models that deferred requests of a device may ask for, by the device's name or a "
        "pattern such as kiosk-*; the first that matches counts. Others: none.",
    )

    def right_of(self, device: str) -> int:
        """Return the highest priority that the device's requests may have against those of others."""
        return next((most for pattern, most in self.priorities.items() if fnmatchcase(device, pattern)), 0)

    def may_ask(self, device: str, model: str) -> bool:
        """Whether deferred requests of the device may ask for the model."""
        globs = next((globs for pattern, globs in self.models.items() if fnmatchcase(device, pattern)), ())
        return any(fnmatchcase(model, one) for one in globs)
