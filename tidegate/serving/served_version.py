"""The served version of a model is the highest whose manifest can be read and that has a variant for the place.

One rule for all that serve out of a repository: pools, devices, and a gateway, which computes nothing and takes any. A
version that is named (NAME:VERSION) is that one and no other.

Where a process starts, a version whose files are damaged, or may not run here, is passed over in the same way: one that
is lower and right is better than none. What serves is not replaced by a lower one, so a load at other times is strict.

Why a version was passed over is told, for the log: what is `damaged` or has `wrong_files` is to be mended, what is
`unfit` may be meant so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.models.manifest import EngineName, Manifest, Variant, Where
from tidegate.models.repository import ReadManifests, Repository, RepositoryError, version_key
from tidegate.models.trust import check_engine
from tidegate.models.trusted_digests import check_trusted
from tidegate.outcome import ModelNotFound
from tidegate.runtime.process import StartError


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One model in the version to serve, with verified artefacts.

    Attributes:
        variants: of those for the place, the chosen ones; the preferred one first.
        damaged: by version, why others of the model cannot be read.
        wrong_files: by version and the highest first, why higher ones that can be read have no files to serve from.
        unfit: by version, why higher ones are nothing for the place.
    """

    manifest: Manifest
    variants: tuple[Variant, ...]
    repository: Repository
    damaged: Mapping[str, str]
    wrong_files: Mapping[str, str]
    unfit: Mapping[str, str]


def versions_for(where: Where | None, versions: Sequence[Manifest]) -> tuple[tuple[Manifest, ...], Mapping[str, str]]:
    """Those with a variant for the place, the one to serve first; and why each higher one than it is passed over.

    Args:
        where: None: any version will do.
        versions: of one model that can be read, lowest first.
    """
    fitting = tuple(one for one in reversed(versions) if where is None or one.variants_for(where))
    unfit = {one.version: f"no variant for {where}s ({_in_words(one)})" for one in versions if one not in fitting}
    return fitting, higher(unfit, fitting[0].version) if fitting else unfit


def higher(reasons: Mapping[str, str], version: str) -> dict[str, str]:
    """Of reasons by version, those of higher ones."""
    return {one: why for one, why in reasons.items() if version_key(one) > version_key(version)}


def read_version(
    root: Path,
    wanted: str,
    where: Where,
    choose: Callable[[Manifest], tuple[Variant, ...]],
    allowed: tuple[EngineName, ...],
    *,
    or_lower: bool,
) -> ServedVersion:
    """One model of a repository, NAME or NAME:VERSION; what is wrong with others there is no reason. Blocks.

    Args:
        choose: which variants of a manifest are served, of those for the place.
        or_lower: whether a version whose files are wrong is passed over where a lower one is right.

    Raises:
        StartError: it does not exist, or has nothing for the place.
        RepositoryError: its manifest or an artefact cannot be used.
    """
    name, _, version = wanted.partition(":")
    repository = Repository(root, only=(name,), pass_over=True)
    fitting, unfit = versions_for(where, _wanted(repository, name, version))
    if not fitting:
        reasons = "".join(f"; version {one}: {why}" for one, why in unfit.items())
        raise StartError(f"model {name!r} of {root} has no variant for {where}s{reasons}")
    damaged = {} if version else {one: why for (_, one), why in repository.damaged.items()}
    wrong: dict[str, RepositoryError] = {}
    for manifest in fitting if or_lower else fitting[:1]:
        try:
            _verify(repository, manifest, variants := choose(manifest), allowed)
        except RepositoryError as error:
            wrong[manifest.version] = error
        else:
            wrong_files = {one: str(error) for one, error in wrong.items()}
            return ServedVersion(manifest, variants, repository, damaged, wrong_files, unfit)
    raise next(iter(wrong.values()))


def _wanted(repository: Repository, name: str, version: str) -> Sequence[Manifest]:
    try:
        one = repository.manifest(name, version)
    except ModelNotFound as error:
        there = ", ".join(sorted(ReadManifests(repository.root).look()[0])) or "none"
        words = error.message if repository.manifests() else f"there is no model {name!r} (models: {there})"
        raise StartError(f"key 'models': {words}") from error
    return [one] if version else repository.manifests()


def _verify(
    repository: Repository, manifest: Manifest, variants: Sequence[Variant], allowed: tuple[EngineName, ...]
) -> None:
    """Raises RepositoryError."""
    for variant in variants:
        check_engine(manifest, variant, allowed)
        repository.verify(manifest, variant)
        check_trusted(repository, manifest, variant)


def _in_words(manifest: Manifest) -> str:
    return f"variants: {', '.join(one.name for one in manifest.variants) or 'none'}"
