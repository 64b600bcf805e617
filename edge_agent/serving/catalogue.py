"""The catalogue lists the models of a device's repository that may run on an edge, each with verified artefacts.

Of each model one version is served, the highest where none is named; a small device has no memory for the others.
Digests are checked before anything is loaded: a copy that was cut off would otherwise show as wrong answers, or as a
crash of the runtime.

Blocks on the disk: call it in a thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.serving.runner import EdgeLoadable
from tidegate.models.manifest import EngineName, Manifest
from tidegate.models.repository import Repository
from tidegate.models.trust import TRUSTED, check_engine
from tidegate.models.trusted_digests import check_trusted
from tidegate.outcome import ModelNotFound
from tidegate.runtime.process import StartError


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model with the variants that run here, in the manifest's order."""

    manifest: Manifest
    loadables: tuple[EdgeLoadable, ...]


def read_catalogue(
    repository: Repository,
    wanted: Sequence[str] | None,
    allowed: tuple[EngineName, ...] = TRUSTED,
    *,
    or_none: bool = False,
) -> tuple[CatalogueEntry, ...]:
    """The models to serve: `wanted` by name, or all that have a variant for edges.

    Args:
        or_none: whether a repository that is not there, or holds nothing for an edge, is an empty one.

    Raises:
        StartError: a wanted model does not exist or has nothing for an edge; there is nothing to serve at all.
        RepositoryError: a manifest or an artefact cannot be used.
    """
    if or_none and not wanted and not repository.root.exists():
        return ()
    if wanted is None:
        names = sorted({manifest.name for manifest in repository.manifests() if manifest.variants_for("edge")})
    else:
        names = list(dict.fromkeys(wanted))
    if not names and not or_none:
        raise StartError(f"{repository.root}: no model has a variant for edges (a variant with `where: [edge]`)")
    twice = [name for name, count in Counter(one.partition(":")[0] for one in names).items() if count > 1]
    if twice:
        raise StartError(f"key 'models': {twice[0]} is there in two versions; a device serves one version of a model")
    return tuple(read_entry(repository, name, allowed) for name in names)


def read_entry(repository: Repository, wanted: str, allowed: tuple[EngineName, ...]) -> CatalogueEntry:
    """One model, NAME in its highest version or NAME:VERSION. Raises as `read_catalogue`."""
    name, _, version = wanted.partition(":")
    try:
        manifest = repository.manifest(name, version)
    except ModelNotFound as error:
        raise StartError(f"key 'models': {error.message}") from error
    variants = manifest.variants_for("edge")
    if not variants:
        raise StartError(f"model {name}:{manifest.version} of {repository.root} has no variant for edges")
    for variant in variants:
        check_engine(manifest, variant, allowed)
        repository.verify(manifest, variant)
        check_trusted(repository, manifest, variant)
    return CatalogueEntry(
        manifest, tuple(EdgeLoadable(variant, repository.artefact(manifest, variant)) for variant in variants)
    )
