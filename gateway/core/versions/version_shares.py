"""Version shares decide which version answers a request that names none, during a rollout.

A device answers the version that it has, so during a rollout two versions stand side by side, and a request that does
not care has to care. Each version gets the share of the edges that serve it: as a rollout goes on, requests move with
the devices, and nobody is left with work that went to others. An edge whose new version is *soaking* counts for a
quarter: careful, and still enough to reach the requests that its soak waits for; a version that only soaks is never
below `LEAST`. Pools count where no edge has a version at all: their place in the plan is behind the edges.

The order beyond the first is that of fallback: by share, then the standing one, which is in the pool most
often.

Invariants: shares add up to 1 where any target serves a version, and a version that none serves has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

SOAK_WEIGHT: Final = 0.25
LEAST: Final = 0.02


class VersionTargets(NamedTuple):
    """How many targets serve a version now."""

    edges: int = 0
    soaking: int = 0
    pools: int = 0


def shares_by_version(standing: Mapping[str, VersionTargets]) -> dict[str, float]:
    """The share of requests for each version that any target serves."""
    weights = {version: one.edges + SOAK_WEIGHT * one.soaking for version, one in standing.items()}
    if not any(weights.values()):
        weights = {version: float(one.pools) for version, one in standing.items()}
    total = sum(weights.values())
    if not total:
        return {}
    raised = {version: max(weight, LEAST * total) for version, weight in weights.items() if weight}
    whole = sum(raised.values())
    return {version: weight / whole for version, weight in raised.items()}


def sample_order(versions: Sequence[str], shared: Mapping[str, float], draw: float) -> list[str]:
    """The versions to try, in this order: the first by chance and share, then the others.

    Args:
        versions: all that there are, the standing one first.
        draw: uniform in [0, 1).
    """
    if not shared:
        return list(versions)
    for first, share in shared.items():  # noqa: B007  # the last one stays where rounding leaves a rest
        draw -= share
        if draw < 0.0:
            break
    rest = sorted((one for one in versions if one != first), key=lambda one: -shared.get(one, 0.0))
    return [first, *rest]
