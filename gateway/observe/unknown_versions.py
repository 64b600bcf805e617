"""Unknown versions are served by targets, and this gateway has no manifest of them, so that it sends nothing there.

It happens where another gateway has rolled a version out, or a pool was given a newer repository. Callers of such a
gateway see a model disappear while all its targets are well, so it is said, with the way out. A model that is unknown
in every version is none of this gateway's: devices may serve what is theirs alone.
"""

from __future__ import annotations

from typing import Final

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.observe.conditions import OtherCondition

_NAMED: Final = 3  # targets


class UnknownVersions:
    """Mutable: remembers since when each was seen, whenever somebody asks."""

    def __init__(self, fleet: Fleet, catalog: Catalog) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._since: dict[tuple[str, str], float] = {}

    def conditions(self, now: float) -> list[OtherCondition]:
        """One for each version."""
        known: dict[str, set[str]] = {}
        for manifest in self._catalog.manifests:
            known.setdefault(manifest.name, set()).add(manifest.version)
        found = {key: index for key, index in self._fleet.indexes() if key[1] not in known.get(key[0], {key[1]})}
        self._since = {key: self._since.get(key, now) for key in found}
        return [
            OtherCondition(
                f"model/{model}",
                "version_unknown",
                self._since[model, version],
                _evidence(model, version, list(dict.fromkeys(offer.target.id for offer in index.all.items))),
            )
            for (model, version), index in found.items()
        ]

    def __repr__(self) -> str:
        return f"<UnknownVersions {len(self._since)}>"


def _evidence(model: str, version: str, targets: list[str]) -> str:
    more = f" and {len(targets) - _NAMED} more" if len(targets) > _NAMED else ""
    return (
        f"{', '.join(targets[:_NAMED])}{more} serve {model} {version}, of which this gateway has no manifest: no "
        f"request is sent there. Put that version into its `model_repository` and start it anew (docs/rollout.md)"
    )
