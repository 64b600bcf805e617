"""What a generating engine may take, and which tokens end its texts: as its model's manifest and its host say.

Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec


class GenerationLimits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """0 and () leave it to the artefact."""

    slots: int = 0  # sequences at a time
    context: int = 0  # tokens of a prompt and its answer
    cache_bytes: int = 0  # of all attention caches together
    stop_tokens: tuple[int, ...] = ()  # which end a text, and are not part of it


NO_LIMITS: Final = GenerationLimits()
