"""The catalogue lists what a pool serves: the loadable variants of the configured models in the configured precision.

Each model is served in its highest version, in those of its pool variants that have the configured precision, and
behind them those of the further precisions, for callers that demand them; or, if it has none of these, in all of them:
the variant's name is declared in every offer and answer, so this is never silent. A model that is named in the
configuration must be there; without names, everything with a pool variant is served.

Artefacts are verified against their digests before anything is loaded: this reads every byte of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cloud_pool.core.memory.device_memory import MemoryNeed, shortfall
from cloud_pool.core.memory.footprint import expected_bytes_per_unit
from cloud_pool.workers.device_worker import PoolLoadable
from tidegate.models.manifest import EngineName, Manifest, Variant
from tidegate.models.repository import Repository, RepositoryError
from tidegate.models.trust import TRUSTED, check_engine
from tidegate.models.trusted_digests import check_trusted
from tidegate.outcome import ModelNotFound
from tidegate.runtime.process import StartError


def read_catalogue(
    repository: Repository,
    models: Sequence[str] | None,
    precision: str,
    also: Sequence[str] = (),
    allowed: tuple[EngineName, ...] = TRUSTED,
) -> list[PoolLoadable]:
    """Verified variants, the preferred one of each model first. Blocks.

    Raises:
        RepositoryError: a manifest or an artefact is wrong, or there is nothing to serve.
        StartError: a configured model does not exist.
    """
    if models is None:
        names = {manifest.name for manifest in repository.manifests() if manifest.variants_for("pool")}
    else:
        names = set(models)
    manifests = {(one.name, one.version): one for name in sorted(names) for one in [_manifest(repository, name)]}
    loadables = [
        loadable
        for manifest in manifests.values()
        for loadable in _loadables(repository, manifest, (precision, *also), allowed)
    ]
    if not loadables:
        raise RepositoryError(f"{repository.root}: no model has a variant for the pool, so there is nothing to serve")
    return loadables


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


def _manifest(repository: Repository, wanted: str) -> Manifest:
    name, _, version = wanted.partition(":")
    try:
        return repository.manifest(name, version)
    except ModelNotFound as error:
        raise StartError(f"key 'models': {error.message}") from error


def _loadables(
    repository: Repository, manifest: Manifest, precisions: Sequence[str], allowed: tuple[EngineName, ...]
) -> list[PoolLoadable]:
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
    return [PoolLoadable(artefacts, variant, repository.artefact(manifest, variant), public) for variant in variants]


def _variants(manifest: Manifest, precisions: Sequence[str]) -> tuple[Variant, ...]:
    """In the order of the wishes; the first is what answers where nobody demands one."""
    here = manifest.variants_for("pool")
    found = [one for precision in dict.fromkeys(precisions) for one in here if one.precision == precision]
    return tuple(found) or here
