"""Many edges on one machine: what one of them has measured holds for all, and what they take is told beforehand.

Edges measure at their start what models cost, and two that measure at once would both report twice the truth. So the
first edge measures alone. The others have the same models, processor and threads; they get its figures and need not
measure, so that as many of them start at a time as there are cores. An edge measures all the same what the first one
does not serve, such as a version that a rollout brought there.

What can go wrong: figures that were taken in a bad moment are then those of all edges. Real calls correct them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import ReadManifests, RepositoryError
from tidegate.serving.served_version import versions_for
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.up.plan import ProcessPlan

COSTS_FILE: Final = "costs.json"  # an edge's, below its `state_dir`
EDGE_BYTES: Final = 190 * 10**6  # an agent and two workers, without weights


def share_costs(first: ProcessPlan, others: Iterable[ProcessPlan]) -> bool:
    """Give the others what the first edge has measured; whether it has told anything. Blocks for the disk."""
    measured = _costs(_path(first))
    for edge in others if measured else ():
        path = _path(edge)
        with suppress(OSError):  # then it measures for itself
            write_atomically(path, json.dumps({**_costs(path), **measured}).encode(), durable=False, parents=True)
    return bool(measured)


def memory_note(edges: int, models: Path, free: float | None) -> str:
    """What to say before so many edges are started; "" where they fit, or where nobody knows.

    Args:
        free: bytes of memory that may still be taken.
    """
    needed = edges * (EDGE_BYTES + _weights(models))
    if free is None or needed <= free:
        return ""
    fitting = max(int(edges * free / needed), 1)
    return (
        f"{edges} edges take some {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: "
        f"the machine may run out of it; --edges {fitting} would fit"
    )


def _weights(models: Path) -> int:
    """Bytes of the artefacts that an edge loads: of each model the largest variant's, in the version that it serves."""
    try:
        versions = ReadManifests(models).look()[0] if models.is_dir() else {}
    except RepositoryError:
        return 0  # the first part that reads it says what is wrong
    served = [fitting[0] for ones in versions.values() if (fitting := _for_edges(models, ones))]
    return sum(max(one.size_bytes for one in each.variants_for("edge")) for each in served)


def _for_edges(models: Path, versions: Sequence[Manifest]) -> list[Manifest]:
    """Those that an edge would serve, the first of them first: files of another size are no reason to read them."""
    return [
        one
        for one in versions_for("edge", versions)[0]
        if all(_is_there(models / one.name / one.version, variant) for variant in one.variants_for("edge"))
    ]


def _is_there(folder: Path, variant: Variant) -> bool:
    files = [(variant.artefact, variant.size_bytes), *((one.name, one.size_bytes) for one in variant.files)]
    try:
        return all((folder / name).stat().st_size == size_bytes for name, size_bytes in files)
    except OSError:
        return False


def _path(edge: ProcessPlan) -> Path:
    return Path(str((edge.config or {})["state_dir"])) / COSTS_FILE


def _costs(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
