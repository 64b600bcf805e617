"""What a generating engine may take, and which tokens end its texts: as its model's manifest and its host say.

Pure.
"""

from __future__ import annotations

from math import ceil, inf, isfinite
from typing import Final

import msgspec

from tidegate.models.manifest import Manifest, Variant


class GenerationLimits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """0 and () leave it to the artefact."""

    slots: int = 0  # sequences at a time
    context: int = 0  # tokens of a prompt and its answer
    cache_bytes: int = 0  # of all attention caches together
    stop_tokens: tuple[int, ...] = ()  # which end a text, and are not part of it
    vocabulary_size: int = 0  # ids are below it
    batch_invariant: bool = False  # a text does not depend on the others beside it


DEFAULT_CACHE_TOKENS: Final = 2048  # of each slot, where nobody says how much memory caches may take
_LEAST_CACHE_TOKENS: Final = 1024  # of each slot, however much memory they take
MOST_DEFAULT_BYTES: Final = 2 * 2**30  # beyond those: what nobody asked for leaves a device's memory to its models
# Given to an engine beside what its host counts with: two pages of 32 that padding is written to, and one begun.
SPARE_CACHE_TOKENS: Final = 96
NO_LIMITS: Final = GenerationLimits()


def limits_of(manifest: Manifest, variant: Variant, *, cache_bytes: int = 0) -> GenerationLimits | None:
    """What a variant's engine may take; None of a model that does not generate.

    Args:
        cache_bytes: that the host leaves its attention caches; 0: as the engine likes.
    """
    if (generative := manifest.generative) is None:
        return None
    return GenerationLimits(
        slots=variant.generation.slots if variant.generation is not None else 0,
        context=generative.context,
        cache_bytes=cache_bytes,
        stop_tokens=generative.stop_tokens,
        vocabulary_size=generative.vocabulary_size,
        batch_invariant=variant.generation is not None and variant.generation.batch_invariant,
    )


def cache_limit_bytes(manifest: Manifest, variant: Variant, configured_bytes: int | None) -> float:
    """What all attention caches of a variant may take on one worker: as configured, or by the manifest.

    By default each slot has room for DEFAULT_CACHE_TOKENS, and one answer may have the whole context, as far as
    MOST_DEFAULT_BYTES hold them; each slot has _LEAST_CACHE_TOKENS in any case. Infinite where the manifest does not
    say what a token's cache takes.
    """
    if configured_bytes is not None:
        return configured_bytes
    cost, generative = variant.generation, manifest.generative
    if generative is None or cost is None or not cost.cache_bytes:
        return inf
    context, slots = generative.context, cost.slots
    wanted = cost.cache_bytes * max(context, slots * min(context, DEFAULT_CACHE_TOKENS))
    least = cost.cache_bytes * slots * min(context, _LEAST_CACHE_TOKENS)
    return min(wanted, max(least, MOST_DEFAULT_BYTES))


def engine_cache_bytes(manifest: Manifest, variant: Variant, configured_bytes: int | None) -> int:
    """What a variant's engine is given for its attention caches: so much that what its host counts with has room.

    Configured bytes are a limit to the engine as well, with what it needs beside the tokens. 0: as it likes.
    """
    limit_bytes, cost = cache_limit_bytes(manifest, variant, configured_bytes), variant.generation
    if configured_bytes is not None or not isfinite(limit_bytes) or cost is None:
        return configured_bytes or 0
    return ceil(limit_bytes) + SPARE_CACHE_TOKENS * cost.cache_bytes
