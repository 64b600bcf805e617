"""A pin limits how far from its origin a request may travel: it names the outermost zone that may see the request.

    zone    edge    a device of the fleet          pin    edge          edges only
            site    on the premises                       edge-input    edges; what an edge computed of it, anywhere
            cloud   anywhere else                         site          edges and the site's own targets
                                                          any           no limit

A pin is a promise about data, not a preference: placement leaves out every target outside the pin, and if no target is
left the request is refused, never served from further away. Of two pins the stricter counts.

`edge-input` keeps the input itself on edges and lets activations of a model that is cut between layers travel
(`tidegate/models/split/layer_split.py`). It and `site` limit different things: both together leave `edge`.
"""

from __future__ import annotations

from typing import Final, Literal

Zone = Literal["edge", "site", "cloud"]
Pin = Literal["edge", "edge-input", "site", "any"]

PINS: Final[tuple[Pin, ...]] = ("edge", "edge-input", "site", "any")
INSIDE: Final[dict[Pin, frozenset[Zone]]] = {
    "edge": frozenset({"edge"}),
    "edge-input": frozenset({"edge"}),
    "site": frozenset({"edge", "site"}),
    "any": frozenset({"edge", "site", "cloud"}),
}


_ZONES: Final[tuple[Zone, ...]] = ("edge", "site", "cloud")  # the innermost first


def outer(one: Zone, other: Zone) -> Zone:
    """Of two zones the one further out: what is computed behind a gateway is no further in than either says."""
    return one if _ZONES.index(one) >= _ZONES.index(other) else other


def stricter(one: Pin, other: Pin) -> Pin:
    """What keeps both promises."""
    if {one, other} == {"edge-input", "site"}:
        return "edge"
    return one if PINS.index(one) <= PINS.index(other) else other
