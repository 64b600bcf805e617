"""The catalogue lists what a pool serves: the loadable variants of the configured models in the configured precision.

Each model is served in its highest version, in those of its pool variants that have the configured precision, and
behind them those of the further precisions, for callers that demand them; or, if it has none of these, in all of them:
the variant's name is declared in every offer and answer, so this is never silent. A version whose manifest cannot be
read is passed over where the model has another one, and is among the `problems`.

A model that is named in the configuration must be there and be right. Without names everything with a pool variant is
served that is right: what is wrong with one model is among the `problems` too, and keeps no other away.

Artefacts are verified against their digests before anything is loaded: this reads every byte of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    @property
    def in_words(self) -> str:
        """The problems, a line for each."""
        return "".join(f"\n{name}: {why}" for (name, _), why in sorted(self.problems.items()))


def read_catalogue(
    repository: Repository,
    models: Sequence[str] | None,
    precision: str,
    also: Sequence[str] = (),
    allowed: tuple[EngineName, ...] = TRUSTED,
    *,
    check: Callable[[Manifest], None] = lambda _: None,
) -> PoolCatalogue:
    """The named models, or all that have a variant for pools and are right. Blocks.

    Args:
        check: raises StartError for a model that may not run here.

    Raises:
        RepositoryError: a named model is wrong, or there is nothing to serve.
        StartError: a named model does not exist, or may not run here; or none can be served.
    """
    root = repository.root

    def read(wanted: str) -> PoolCatalogue:
        found = _read_model(root, wanted, (precision, *also), allowed)
        for one in found.loadables:
            check(one.public or one.manifest)
        return found

    found = _what_is_right(root, read) if models is None else _joined([read(one) for one in sorted(set(models))])
    if not found.loadables and found.problems:
        raise StartError(f"no model of {root} could be loaded:{found.in_words}")
    if not found.loadables:
        raise RepositoryError(f"{root}: no model has a variant for the pool, so there is nothing to serve")
    return found


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


def _what_is_right(root: Path, read: Callable[[str], PoolCatalogue]) -> PoolCatalogue:
    """Each model with a variant for pools that can be read."""
    manifests = ReadManifests(root)
    versions, _ = manifests.look()
    parts, problems = list[PoolCatalogue](), dict(manifests.damaged)
    for name, ones in sorted(versions.items()):
        if not any(one.variants_for("pool") for one in ones):
            continue
        try:
            parts.append(read(name))
        except (RepositoryError, StartError) as error:
            problems[name, ones[-1].version] = str(error)
    return PoolCatalogue(_joined(parts).loadables, problems)


def _joined(parts: Iterable[PoolCatalogue]) -> PoolCatalogue:
    loadables, problems = dict[str, PoolLoadable](), dict[tuple[str, str], str]()
    for part in parts:
        loadables |= {one.key: one for one in part.loadables}
        problems |= part.problems
    return PoolCatalogue(tuple(loadables.values()), problems)


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
