"""What passes between a process that needs chat templates rendered and the one that renders them, as lines of JSON.

Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RenderRequest(msgspec.Struct, frozen=True, array_like=True):
    id: int
    template: str
    values: dict[str, Any]
    max_characters: int


class RenderAnswer(msgspec.Struct, frozen=True, array_like=True):
    id: int
    text: str = ""
    error: str | None = None
