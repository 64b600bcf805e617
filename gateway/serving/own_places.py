"""Own places: what another gateway sent is placed on this site's own devices and pools, never on a further site.

An upstream gateway chose this site by what its own places can do (`gateway/core/fleet/site_summary.py`). If the site
could send such a request on to a third gateway, two gateways that list each other would pass it to and fro until its
budget is spent. One hop between gateways, by construction, is the whole of the rule.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Decision


class OwnPlaces:
    """A `Placement` that leaves out the sites among the targets."""

    def __init__(self, placement: Placement, sites: Set[str]) -> None:
        self._placement = placement
        self._sites = sites

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        return self._placement.decide(ask, now, {*self._sites, *exclude} if exclude else self._sites)

    def __repr__(self) -> str:
        return f"<OwnPlaces {self._placement!r}>"
