"""Own places: what was sent here to be placed once more goes to this gateway's own devices and pools, and no further.

An upstream gateway chose this site by what its own places can do (`gateway/core/fleet/site_summary.py`). If the site
could send such a request on to a third gateway, two gateways that list each other would pass it to and fro until its
budget is spent. One hop between gateways, by construction, is the whole of the rule.

A device that asks for help has said that it is not the place for the request, so that it is left out too.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Decision


class OwnPlaces:
    """A `Placement` that leaves out some targets: the sites, and the device that asks."""

    def __init__(self, placement: Placement, left_out: Set[str]) -> None:
        self._placement = placement
        self._left_out = left_out

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        left_out = self._left_out | ask.left_out if ask.left_out else self._left_out
        return self._placement.decide(ask._replace(left_out=left_out), now, exclude)

    def __repr__(self) -> str:
        return f"<OwnPlaces {self._placement!r}>"
