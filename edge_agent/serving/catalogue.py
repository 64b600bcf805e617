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
from pathlib import Path

import structlog

from edge_agent.serving.runner import EdgeLoadable
from tidegate.models.manifest import EngineName, Manifest
from tidegate.models.repository import ReadManifests, Repository, RepositoryError
from tidegate.models.trust import TRUSTED, check_engine
from tidegate.models.trusted_digests import check_trusted
from tidegate.outcome import ModelNotFound
from tidegate.runtime.process import StartError

log = structlog.get_logger(__name__)


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
        or_none: whether a repository that is not there, or holds nothing for an edge, is an empty one. Models may come
            later then, so that one of all which is wrong keeps no other away: it is logged, and left out.

    Raises:
        StartError: a wanted model does not exist or has nothing for an edge; there is nothing to serve at all.
        RepositoryError: a manifest or an artefact cannot be used.
    """
    if or_none and not wanted and not repository.root.exists():
        return ()
    if or_none and wanted is None:
        return _what_is_right(repository.root, allowed)
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


def _what_is_right(root: Path, allowed: tuple[EngineName, ...]) -> tuple[CatalogueEntry, ...]:
    """Each model for edges that can be served. Raises StartError where there are models, and none of them can be."""
    found, problems = ReadManifests(root).look()
    entries = []
    for name, manifests in sorted(found.items()):
        if name not in problems and any(one.variants_for("edge") for one in manifests):
            try:
                entries.append(read_entry(Repository(root, only=(name,)), name, allowed))
            except (StartError, RepositoryError) as error:
                problems[name] = str(error)
    for name, reason in sorted(problems.items()):
        log.error("a model is not served", model=name, reason=reason)
    if problems and not entries:
        reasons = "".join(f"\n{name}: {reason}" for name, reason in sorted(problems.items()))
        raise StartError(f"no model of {root} could be read:{reasons}")
    return tuple(entries)


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
