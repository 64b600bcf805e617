"""`tabulate` measures a model's cost tables on this machine, in the form of a simulator scenario.

The model's own artefacts are loaded as a target loads them, each in a worker process, and measured by the very warm-up
that targets measure themselves with (`tidegate/workers/warmup.py`): a simulated fleet then starts from the same tables
as a real one would here. A device that is slower than this machine has the same table times `slow` in the scenario.

It can be wrong where a device is not slower by one factor at all sizes: then run this on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import yaml

from tidegate.models.manifest import Manifest, Variant, Where
from tidegate.models.packing import packing_of
from tidegate.models.repository import Repository
from tidegate.workers.process import EngineSpec, WorkerProcess
from tidegate.workers.warmup import CostPoints, measure

TIERS: Final[tuple[Where, ...]] = ("edge", "pool")
OnPoint = Callable[[str, float, float], None]  # (variant, units, seconds)


async def tabulate(
    models: Repository, manifest: Manifest, *, threads: int, budget_s: float, on_point: OnPoint = lambda *_: None
) -> str:
    """YAML for the key `models` of a scenario, each tier by its first variant.

    Args:
        threads: of one computation; 0 for all cores.
        budget_s: seconds that measuring one variant may take.

    Raises:
        ServeError: a worker could not load or run an artefact.
        RepositoryError: an artefact is missing.
    """
    entry: dict[str, Any] = {"feature": manifest.cost.feature, "max_batch": manifest.batching.max_batch_size}
    for tier in TIERS:
        for variant in manifest.variants_for(tier)[:1]:
            points = await _measured(models, manifest, variant, threads, budget_s, on_point)
            entry[f"{tier}_ms"] = [[_round(units), _round(1e3 * seconds)] for units, seconds in points]
            if variant.quality is not None:
                entry[f"{tier}_quality"] = _round(variant.quality.value)
            if tier == "edge" and variant.max_tokens is not None:
                entry["edge_max_units"] = variant.max_tokens
    text: str = yaml.safe_dump({"models": {manifest.name: entry}}, sort_keys=False, default_flow_style=None, width=110)
    return text


async def _measured(
    models: Repository, manifest: Manifest, variant: Variant, threads: int, budget_s: float, on_point: OnPoint
) -> CostPoints:
    models.verify(manifest, variant)
    manifest = manifest.of_model  # the artefact's own cost, as the others'
    outputs = tuple(spec.name for spec in manifest.outputs)
    async with WorkerProcess(f"measure/{variant.name}") as worker:
        artefact = models.artefact(manifest, variant)
        packing = packing_of(manifest, variant.packed)
        await worker.load(
            EngineSpec(
                variant.name, variant.engine, artefact, outputs, threads, packing=packing, compile=variant.compile
            )
        )
        return await measure(
            worker, variant.name, manifest, variant,
            budget_s=budget_s, on_point=lambda units, seconds: on_point(variant.name, units, seconds),
        )  # fmt: skip


def _round(value: float) -> float:
    """Four significant digits: more would be noise."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded
