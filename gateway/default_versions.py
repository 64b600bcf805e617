"""Default versions: what requests of each model get that name none, derived from what targets serve now.

The decision is `gateway/core/versions/default_version.py`; this joins its three sources: the catalog says which
versions there are, the fleet which of them targets serve, and operators which one they prefer (stored by
`gateway/delivery/trials.py`, which sets it here). Nothing else is kept but what was derived from values that have not
changed since, so that the default can never lag behind the fleet. A model with one version costs a look-up more than
the catalog alone.

Everything that needs to know what a request without a version means asks here: the check of its tensors, its default
budget, its placement, the readiness of its model, and operators' reports.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.core.versions.default_version import (
    KnownVersions,
    VersionLine,
    VersionPreference,
    default_shares,
    default_version,
    fallback_order,
    line_of,
    reference_version,
)
from gateway.core.versions.traffic_split import TrafficSplits
from gateway.core.versions.version_shares import VersionTargets
from tidegate.fleet.offers import SERVING
from tidegate.models.manifest import Manifest


class _Derived(NamedTuple):
    """A model's order, and the line of each reference so far, with the values that they were derived from."""

    known: KnownVersions
    splits: TrafficSplits
    preference: VersionPreference
    order: tuple[str, ...]
    lines: dict[str, VersionLine]


class DefaultVersions:
    """Mutable: `splits` is what operators have set."""

    def __init__(self, catalog: Catalog, fleet: Fleet, splits: TrafficSplits | None = None) -> None:
        self.catalog = catalog
        self.splits = splits or TrafficSplits()
        self._fleet = fleet
        self._derived: dict[str, _Derived] = {}

    def manifest(self, name: str, version: str = "") -> Manifest:
        """One version, or the reference of the model when `version` is empty. Raises ModelNotFound."""
        if not version and (known := self.catalog.several(name)) is not None:
            version = self._reference(name, self._of(name, known))
        return self.catalog.manifest(name, version)

    def line(self, name: str) -> VersionLine | None:
        """The versions that may answer a request that names none; None where the model has one or is unknown."""
        known = self.catalog.several(name)
        if known is None:
            return None
        derived = self._of(name, known)
        reference = self._reference(name, derived)
        line = derived.lines.get(reference)
        if line is None:
            line = derived.lines[reference] = line_of(known, derived.order, reference, derived.preference)
        return line

    def names(self, name: str) -> tuple[str, ...]:
        """The versions that may answer a request that names none, the reference first. Raises ModelNotFound."""
        line = self.line(name)
        return line.names if line is not None else (self.catalog.manifest(name).version,)

    def ready(self, name: str, now: float) -> bool:
        """Whether a request that names no version could be placed. Raises ModelNotFound."""
        return any(self.serves(name, version, now) for version in self.names(name))

    def serves(self, name: str, version: str, now: float) -> bool:
        """Whether a target that may be asked offers the version."""
        return any(one.target.allows(now) for one in self._fleet.offered(name, version))

    def shares(self, name: str, now: float) -> dict[str, float]:
        """The share of requests without a version for each version that gets any. Raises ModelNotFound."""
        line = self.line(name) or VersionLine(self.names(name))
        return default_shares(line, self.count(name, line.names, now))

    def default(self, name: str, now: float) -> str:
        """The version that most requests without a version get. Raises ModelNotFound."""
        line = self.line(name) or VersionLine(self.names(name))
        return default_version(line, self.count(name, line.names, now))

    def count(self, name: str, versions: tuple[str, ...], now: float) -> dict[str, VersionTargets]:
        """By version: the targets that serve it and may be asked."""
        return {version: count_targets(self._fleet, name, version, now) for version in versions}

    def _of(self, name: str, known: KnownVersions) -> _Derived:
        derived, splits = self._derived.get(name), self.splits
        if derived is None or derived.known is not known or derived.splits is not splits:
            preference = splits.preference(name)
            order = fallback_order(known, preference.version)
            derived = self._derived[name] = _Derived(known, splits, preference, order, {})
        return derived

    def _reference(self, name: str, derived: _Derived) -> str:
        first = derived.order[0]
        if self._fleet.offered(name, first):  # almost always, and each request asks several times
            return first
        return reference_version(derived.order, lambda version: self._fleet.offered(name, version))

    def __repr__(self) -> str:
        return f"<DefaultVersions {self.splits!r}>"


def count_targets(fleet: Fleet, model: str, version: str, now: float) -> VersionTargets:
    """How many targets serve this version and may be asked."""
    edges = soaking = pools = 0
    for target in fleet.targets.values():
        if not (target.up and target.takes_work and target.allows(now)):
            continue
        for offer in target.offers:
            if (offer.name, offer.version) == (model, version) and offer.state in SERVING:
                edges += target.spec.tier == "edge" and offer.state == "ready"
                soaking += target.spec.tier == "edge" and offer.state == "soaking"
                pools += target.spec.tier != "edge"
    return VersionTargets(edges, soaking, pools)
