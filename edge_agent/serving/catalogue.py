"""The catalogue lists the models of a device's repository that may run on an edge, each with verified artefacts.

Of each model one version is served, the highest with a variant for edges where none is named
(`tidegate/serving/served_version.py`); a small device has no memory for the others. Where it is damaged, that is the
highest that is right, and the entry says what was passed over.
Digests are checked before anything is loaded: a copy that was cut off would otherwise show as wrong answers, or as a
crash of the runtime.

Blocks on the disk: call it in a thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_agent.serving.runner import EdgeLoadable
from tidegate.models.manifest import EngineName, Manifest, Variant
from tidegate.models.repository import ReadManifests, Repository, RepositoryError
from tidegate.models.trust import TRUSTED
from tidegate.runtime.process import StartError
from tidegate.serving.served_version import higher, read_version, versions_for


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model with the variants that run here, in the manifest's order.

    Attributes:
        passed_over: by version, why others of the model cannot be served.
        unfit: by version, why higher ones are nothing for an edge.
    """

    manifest: Manifest
    loadables: tuple[EdgeLoadable, ...]
    passed_over: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)

    @property
    def instead(self) -> str:
        """What it is served instead of, and why; "" where that is the version to serve."""
        return "\n".join(higher(self.passed_over, self.manifest.version).values())


@dataclass(frozen=True, slots=True)
class EdgeCatalogue:
    """What a device may serve of its repository, and why it may not serve the rest of what is wanted.

    Attributes:
        problems: by model, why it cannot be served. None of them is in `entries`.
    """

    entries: tuple[CatalogueEntry, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def unfit(self) -> list[tuple[str, str, str]]:
        """The name and version of each that is nothing for an edge, and that a lower one is served instead of; why."""
        return [(entry.manifest.name, *one) for entry in self.entries for one in entry.unfit.items()]

    def no_model(self, root: Path) -> StartError:
        """The error of a device that could serve none of what is wanted."""
        reasons = "".join(f"\n{name}: {reason}" for name, reason in sorted(self.problems.items()))
        return StartError(f"no model of {root} could be read:{reasons}")


def read_catalogue(
    repository: Repository,
    wanted: Sequence[str] | None,
    allowed: tuple[EngineName, ...] = TRUSTED,
    *,
    or_none: bool = False,
) -> EdgeCatalogue:
    """The models to serve: `wanted` by name, or all that have a variant for edges. One that is wrong hides no other.

    Args:
        or_none: whether a repository that is not there, or holds nothing for an edge, is an empty one, since models may
            come later.

    Raises:
        StartError: there is nothing to serve at all; a model is wanted in two versions.
        RepositoryError: the repository cannot be read.
    """
    root = repository.root
    if or_none and not wanted and not root.exists():
        return EdgeCatalogue()
    if wanted is not None:
        found = _what_is_right(root, _by_name(wanted), {}, allowed)
    else:
        read, problems = ReadManifests(root).look()
        for_edges = {name: name for name, ones in read.items() if versions_for("edge", ones)[0]}
        lost = {name: why for name, why in problems.items() if name not in for_edges}
        found = _what_is_right(root, for_edges, lost, allowed)
    if not found.entries and not or_none and not found.problems:
        raise StartError(f"{root}: no model has a variant for edges (a variant with `where: [edge]`)")
    return found


def _by_name(wanted: Sequence[str]) -> dict[str, str]:
    """NAME or NAME:VERSION by name. Raises StartError."""
    names = list(dict.fromkeys(wanted))
    twice = [name for name, count in Counter(one.partition(":")[0] for one in names).items() if count > 1]
    if twice:
        raise StartError(f"key 'models': {twice[0]} is there in two versions; a device serves one version of a model")
    return {one.partition(":")[0]: one for one in names}


def _what_is_right(
    root: Path, wanted: Mapping[str, str], problems: Mapping[str, str], allowed: tuple[EngineName, ...]
) -> EdgeCatalogue:
    entries, found = [], dict(problems)
    for name, one in sorted(wanted.items()):
        try:
            entries.append(read_entry(root, one, allowed))
        except (StartError, RepositoryError) as error:
            found[name] = str(error)
    return EdgeCatalogue(tuple(entries), found)


def read_entry(root: Path, wanted: str, allowed: tuple[EngineName, ...], *, or_lower: bool = True) -> CatalogueEntry:
    """One model of a repository, NAME in its highest version or NAME:VERSION; the others there may be wrong.

    Args:
        or_lower: whether a version whose files are wrong is passed over where a lower one is right.

    Raises:
        StartError: it does not exist, or has nothing for an edge.
        RepositoryError: its manifest or an artefact cannot be used.
    """
    found = read_version(root, wanted, "edge", _for_edges, allowed, or_lower=or_lower)
    artefacts = [found.repository.artefact(found.manifest, variant) for variant in found.variants]
    loadables = tuple(EdgeLoadable(*one) for one in zip(found.variants, artefacts, strict=True))
    return CatalogueEntry(found.manifest, loadables, {**found.damaged, **found.wrong_files}, found.unfit)


def _for_edges(manifest: Manifest) -> tuple[Variant, ...]:
    return manifest.variants_for("edge")
