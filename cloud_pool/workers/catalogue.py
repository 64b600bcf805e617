"""The catalogue lists what a pool serves: the loadable variants of the configured models in the configured precision.

Each model is served in its highest version, in those of its pool variants that have the configured precision, and
behind them those of the further precisions, for callers that demand them; or, if it has none of these, in all of them:
the variant's name is declared in every offer and answer, so this is never silent. A model that is named in the
configuration must be there; without names, everything with a pool variant is served. A version whose manifest cannot be
read is passed over where the model has another one, and is among the `problems`.

Artefacts are verified against their digests before anything is loaded: this reads every byte of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from cloud_pool.core.memory.device_memory import MemoryNeed, shortfall
from cloud_pool.core.memory.footprint import expected_bytes_per_unit
from cloud_pool.workers.device_worker import PoolLoadable
from tidegate.models.manifest import EngineName, Manifest, Variant
from tidegate.models.repository import Damaged, ReadManifests, Repository, RepositoryError
from tidegate.models.trust import TRUSTED, check_engine
from tidegate.models.trusted_digests import check_trusted
from tidegate.outcome import ModelNotFound
from tidegate.runtime.process import StartError


@dataclass(frozen=True, slots=True)
class PoolCatalogue:
    """What a pool may serve of its repository, and why not the rest of what is wanted.

    Attributes:
        loadables: verified variants, the preferred one of each model first.
        problems: by name and version, why each cannot be served.
    """

    loadables: tuple[PoolLoadable, ...]
    problems: Damaged


def read_catalogue(
    repository: Repository,
    models: Sequence[str] | None,
    precision: str,
    also: Sequence[str] = (),
    allowed: tuple[EngineName, ...] = TRUSTED,
) -> PoolCatalogue:
    """The named models, or all that have a variant for pools. Blocks.

    Raises:
        RepositoryError: a manifest or an artefact is wrong, or there is nothing to serve.
        StartError: a configured model does not exist.
    """
    names = _for_pools(repository) if models is None else models
    loadables, problems = dict[str, PoolLoadable](), dict[tuple[str, str], str]()
    for wanted in sorted(set(names)):
        found = _read_model(repository.root, wanted, (precision, *also), allowed)
        loadables |= {one.key: one for one in found.loadables}
        problems |= found.problems
    if not loadables:
        raise RepositoryError(f"{repository.root}: no model has a variant for the pool, so there is nothing to serve")
    return PoolCatalogue(tuple(loadables.values()), problems)


def check_memory(loadables: Sequence[PoolLoadable], *, workers: int, limit_bytes: float, device: str) -> None:
    """Refuse to load what cannot fit. `workers`: so many on this device, each with all of it. Raises StartError."""
    needs = [
        MemoryNeed(
            one.key,
            one.variant.engine,
            weights_bytes(one.variant),
            expected_bytes_per_unit(one.manifest, one.variant) * _least_units(one.manifest),
        )
        for one in loadables
    ]
    if reason := shortfall(needs, workers=workers, limit_bytes=limit_bytes, device=device):
        raise StartError(reason)


def weights_bytes(variant: Variant) -> int:
    """Of its artefact, with the files beside it."""
    return variant.size_bytes + sum(one.size_bytes for one in variant.files)


def _least_units(manifest: Manifest) -> float:
    """The work of the smallest request that the manifest allows."""
    spec = next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)
    if spec is None or manifest.cost.feature == "items":
        return 1.0
    elements = prod(entry if isinstance(entry, int) else manifest.axes[entry].min for entry in spec.shape)
    return max(1.0, float(elements * (spec.datatype.itemsize if manifest.cost.feature == "bytes" else 1)))


def _for_pools(repository: Repository) -> set[str]:
    return {manifest.name for manifest in repository.manifests() if manifest.variants_for("pool")}


def _read_model(root: Path, wanted: str, precisions: Sequence[str], allowed: tuple[EngineName, ...]) -> PoolCatalogue:
    """One model, NAME in its highest version or NAME:VERSION; what is wrong with others there is no reason."""
    name, _, version = wanted.partition(":")
    repository = Repository(root, only=(name,), pass_over=True)
    try:
        manifest = repository.manifest(name, version)
    except ModelNotFound as error:
        there = ", ".join(sorted(ReadManifests(root).look()[0])) or "none"
        words = error.message if repository.manifests() else f"there is no model {name!r} (models: {there})"
        raise StartError(f"key 'models': {words}") from error
    variants = _variants(manifest, precisions)
    if not variants:
        raise RepositoryError(
            f"model {manifest.name!r} version {manifest.version} has no variant that may run in a pool "
            f"(variants: {', '.join(variant.name for variant in manifest.variants) or 'none'})"
        )
    for variant in variants:
        check_engine(manifest, variant, allowed)
        repository.verify(manifest, variant)
        check_trusted(repository, manifest, variant)
    artefacts, public = manifest.of_model, None if manifest.pipeline is None else manifest
    found = [PoolLoadable(artefacts, variant, repository.artefact(manifest, variant), public) for variant in variants]
    return PoolCatalogue(tuple(found), {} if version else repository.damaged)


def _variants(manifest: Manifest, precisions: Sequence[str]) -> tuple[Variant, ...]:
    """In the order of the wishes; the first is what answers where nobody demands one."""
    here = manifest.variants_for("pool")
    found = [one for precision in dict.fromkeys(precisions) for one in here if one.precision == precision]
    return tuple(found) or here
