"""Every model this gateway knows: the manifests of its repository, of foreign servers, and of shipped versions.

Every request reads it, so it is a few dictionaries. The repository outranks a foreign description of the same version:
its manifest has bounds, qualities and a tokenizer that metadata lacks.

A version that was shipped to devices (`gateway/delivery/rollouts`) is known by its full name, and is not what "the
latest" means: while it is on its way most devices lack it. Which version a request gets that names none depends on what
targets serve, which the catalog does not know (`gateway/default_versions.py`); it says which versions there are, and
which of them take and give the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.core.versions.default_version import KnownVersions
from tidegate.models.alike import interchangeable
from tidegate.models.manifest import Feature, Manifest
from tidegate.models.repository import version_key
from tidegate.outcome import ModelNotFound

_UNKNOWN_FEATURE: Feature = "items"


class Catalog:
    """Mutable: `learn` adds what a foreign server described."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self._own = {(one.name, one.version): one for one in manifests}
        self._foreign: dict[tuple[str, str], Manifest] = {}
        self._shipped: dict[tuple[str, str], Manifest] = {}
        self._several: dict[str, KnownVersions] = {}
        self._index()

    def ship(self, manifests: Iterable[Manifest]) -> None:
        """Take in versions that devices have or may come to have."""
        self._shipped |= {(one.name, one.version): one for one in manifests}
        self._index()

    @property
    def shipped(self) -> Collection[Manifest]:
        """The versions that `ship` has taken in, in that order."""
        return self._shipped.values()

    def several(self, name: str) -> KnownVersions | None:
        """The versions of a model that has more than one; the same object until they change."""
        return self._several.get(name)

    def learn(self, manifests: Iterable[Manifest]) -> None:
        """Take in the manifests of a foreign server; a later description replaces an earlier one."""
        self._foreign |= {(one.name, one.version): one for one in manifests}
        self._index()

    def adopt(self, name: str, manifests: Iterable[Manifest]) -> None:
        """Take these as the versions of one model in the repository, instead of those before."""
        others = {of: one for of, one in self._own.items() if of[0] != name}
        self._own = others | {(one.name, one.version): one for one in manifests}
        self._index()

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        return self._sorted

    def manifest(self, name: str, version: str = "") -> Manifest:
        """One version, or the highest when `version` is empty. Raises ModelNotFound."""
        found = self._by_key.get((name, version))
        if found is None:
            raise ModelNotFound(self._not_found(name, version))
        return found

    def own(self, name: str) -> Manifest | None:
        """The highest version in the repository; None of a model that it lacks."""
        versions = [version for own, version in self._own if own == name]
        return self._own[name, max(versions, key=version_key)] if versions else None

    def feature_of(self, name: str, version: str) -> Feature:
        found = self._by_key.get((name, version))
        return found.cost.feature if found else _UNKNOWN_FEATURE

    def _index(self) -> None:
        standing = {**self._foreign, **self._own}
        known = {**self._shipped, **standing}
        self._sorted = tuple(sorted(known.values(), key=lambda one: (one.name, version_key(one.version))))
        latest = {(one.name, ""): one for one in self._sorted}  # sorted: the highest version is the last to be put in
        latest |= {(one.name, ""): one for one in self._sorted if (one.name, one.version) in standing}
        self._by_key = {**latest, **known}
        versions: dict[str, list[Manifest]] = {}
        for one in reversed(self._sorted):
            versions.setdefault(one.name, []).append(one)
        shipped = {one.name for one in self._shipped.values()}
        found = {
            name: KnownVersions(
                standing=tuple(one.version for one in every if (name, one.version) in standing),
                shipped=tuple(one.version for one in every if (name, one.version) not in standing),
                alike=_alike(every),
                rolled_out=name in shipped,
            )
            for name, every in versions.items()
            if len(every) > 1
        }
        # what has not changed stays the same object: what was derived from it stays good
        self._several = {
            name: one if one != self._several.get(name) else self._several[name] for name, one in found.items()
        }

    def _not_found(self, name: str, version: str) -> str:
        versions = [one.version for one in self._sorted if one.name == name]
        if versions:
            return f"model {name!r} has no version {version!r}; it has {', '.join(versions)}"
        names = ", ".join(sorted({one.name for one in self._sorted if one.half is None})) or "none"
        return f"no model is called {name!r}; known models: {names}"

    def __repr__(self) -> str:
        return f"<Catalog {len(self._own)} own, {len(self._foreign)} foreign, {len(self._shipped)} shipped>"


def _alike(manifests: Iterable[Manifest]) -> dict[str, frozenset[str]]:
    """By version of one model: those interchangeable with it, itself included."""
    groups: list[list[Manifest]] = []
    for one in manifests:
        group = next((group for group in groups if interchangeable(group[0], one)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    found = [frozenset(one.version for one in group) for group in groups]
    return {version: group for group in found for version in group}
