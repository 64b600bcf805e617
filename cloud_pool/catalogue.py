"""What this pool serves: from the repository, the configured models and the wished-for precision, to loadable variants.

Each model is served in its highest version, in those of its pool variants that have the wished-for precision, or,
if it has none of that, in all of them: the variant's name is declared in every offer and answer, so this is never
silent. A model that is named in the configuration must be there; without names, everything with a pool variant is
served.

Artefacts are verified against their digests before anything is loaded: this reads every byte of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloud_pool.worker import Loadable
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository, RepositoryError
from tidegate.outcome import ModelNotFound
from tidegate.process import StartError


def read_catalogue(repository: Repository, models: Sequence[str] | None, precision: str) -> list[Loadable]:
    """Verified variants, the preferred one of each model first. Blocks.

    Raises:
        RepositoryError: a manifest or an artefact is wrong, or there is nothing to serve.
        StartError: a configured model does not exist.
    """
    if models is None:
        names = {manifest.name for manifest in repository.manifests() if manifest.variants_for("pool")}
    else:
        names = set(models)
    loadables = [
        loadable
        for name in sorted(names)
        for loadable in _loadables(repository, _manifest(repository, name), precision)
    ]
    if not loadables:
        raise RepositoryError(f"{repository.root}: no model has a variant for the pool, so there is nothing to serve")
    return loadables


def _manifest(repository: Repository, name: str) -> Manifest:
    try:
        return repository.manifest(name)
    except ModelNotFound as error:
        raise StartError(f"key 'models': {error.message}") from error


def _loadables(repository: Repository, manifest: Manifest, precision: str) -> list[Loadable]:
    variants = _variants(manifest, precision)
    if not variants:
        raise RepositoryError(
            f"model {manifest.name!r} version {manifest.version} has no variant that may run in a pool "
            f"(variants: {', '.join(variant.name for variant in manifest.variants) or 'none'})"
        )
    for variant in variants:
        repository.verify(manifest, variant)
    return [Loadable(manifest, variant, repository.artefact(manifest, variant)) for variant in variants]


def _variants(manifest: Manifest, precision: str) -> tuple[Variant, ...]:
    here = manifest.variants_for("pool")
    return tuple(variant for variant in here if variant.precision == precision) or here
