"""Every model this gateway knows: the manifests of its repository, of foreign servers, and of shipped versions.

Every request reads it, so it is a few dictionaries. The repository outranks a foreign description of the same version:
its manifest has bounds, qualities and a tokenizer that metadata lacks.

A version that was shipped to devices (`gateway/delivery/rollouts`) is known by its full name, and is not what "the
latest" means: while it is on its way most devices lack it. Where it takes and gives the same as the latest, the two are
siblings, and a request that names no version may be answered by either (`layers/versions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._siblings: dict[str, tuple[str, ...]] = {}
        self._index()

    def ship(self, manifests: Iterable[Manifest]) -> None:
        """Take in versions that devices have or may come to have."""
        self._shipped |= {(one.name, one.version): one for one in manifests}
        self._index()

    def siblings(self, name: str) -> tuple[str, ...]:
        """Versions that may stand in for one another, the latest first; none where nothing of the model was shipped."""
        return self._siblings.get(name, ())

    def learn(self, manifests: Iterable[Manifest]) -> None:
        """Take in the manifests of a foreign server; a later description replaces an earlier one."""
        self._foreign |= {(one.name, one.version): one for one in manifests}
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
        self._siblings = {name: self._alike(latest[name, ""]) for name in {one.name for one in self._shipped.values()}}

    def _alike(self, latest: Manifest) -> tuple[str, ...]:
        others = (one for one in reversed(self._sorted) if one.name == latest.name and one.version != latest.version)
        return (latest.version, *(one.version for one in others if interchangeable(one, latest)))

    def _not_found(self, name: str, version: str) -> str:
        versions = [one.version for one in self._sorted if one.name == name]
        if versions:
            return f"model {name!r} has no version {version!r}; it has {', '.join(versions)}"
        names = ", ".join(sorted({one.name for one in self._sorted})) or "none"
        return f"no model is called {name!r}; known models: {names}"

    def __repr__(self) -> str:
        return f"<Catalog {len(self._own)} own, {len(self._foreign)} foreign, {len(self._shipped)} shipped>"
