"""A pin limits how far from its origin a request may travel: it names the outermost zone that may see the request.

    zone    edge    a device of the fleet          pin    edge    edges only
            site    on the premises                       site    edges and the site's own targets
            cloud   anywhere else                         any     no limit

A pin is a promise about data, not a preference: placement leaves out every target outside the pin, and if no target is
left the request is refused, never served from further away. Of two pins the stricter counts.
"""

from __future__ import annotations

from typing import Final, Literal

Zone = Literal["edge", "site", "cloud"]
Pin = Literal["edge", "site", "any"]

PINS: Final[tuple[Pin, ...]] = ("edge", "site", "any")  # the strictest first
INSIDE: Final[dict[Pin, frozenset[Zone]]] = {
    "edge": frozenset({"edge"}),
    "site": frozenset({"edge", "site"}),
    "any": frozenset({"edge", "site", "cloud"}),
}


_ZONES: Final[tuple[Zone, ...]] = ("edge", "site", "cloud")  # the innermost first


def outer(one: Zone, other: Zone) -> Zone:
    """Of two zones the one further out: what is computed behind a gateway is no further in than either says."""
    return one if _ZONES.index(one) >= _ZONES.index(other) else other


def stricter(one: Pin, other: Pin) -> Pin:
    return one if PINS.index(one) <= PINS.index(other) else other
