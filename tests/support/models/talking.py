"""A repository with the paced generating model `talker`, for edges, pools and gateways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER, talker
from tests.support.paced_generation import write_pace
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest
from tidegate.models.repository import save_manifest


def talker_repository(
    root: Path, *, slots: int = 4, cache_bytes: int = 1024, step_ms: float = 2.0, twin: str = "", **pace: Any
) -> Path:
    """Write it below `root`, which is returned. The artefact has these values, the manifest says the same.

    Args:
        step_ms: of one sequence; a batch of four takes half as long again.
        twin: the name of a second variant with the same artefact; "": there is none.
        pace: other values of `PacedGeneration`.
    """
    steps = ((1.0, step_ms), (4.0, 1.5 * step_ms))
    save_talker(root, talker(), steps, slots=slots, cache_bytes=cache_bytes, twin=twin, **pace)
    return root


def save_talker(
    root: Path,
    manifest: Manifest,
    steps: tuple[tuple[float, float], ...],
    *,
    slots: int,
    cache_bytes: int,
    twin: str = "",
    **pace: Any,
) -> Manifest:
    folder = root / manifest.name / manifest.version
    folder.mkdir(parents=True)
    words = {"prefill_ms": 0.05, "context": 512, "ids": (0, 999), **pace}
    path = write_pace(folder, step_ms=steps, slots=slots, **words)
    cost = replace(
        COST,
        prefill_ms=words["prefill_ms"],
        step_ms=tuple((int(batch), ms) for batch, ms in steps),
        cache_bytes=cache_bytes,
        slots=slots,
    )
    variant = replace(
        TALKER.variants[0],
        artefact=path.name,
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
        generation=cost,
    )
    twins = (replace(variant, name=twin),) if twin else ()
    saved = replace(manifest, variants=(variant, *twins))
    save_manifest(folder, saved)
    return saved
