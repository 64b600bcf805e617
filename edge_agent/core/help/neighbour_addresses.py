"""Where the neighbours are that a device may ask: from its configuration, or from what they publish over MQTT.

One list may serve all devices of a site, since a device passes over its own name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def neighbours_by_mqtt(configured: Sequence[str], own: str) -> tuple[str, ...]:
    """The names of `NAME[@HOST:PORT]` that have no address, without this device's own."""
    return tuple(one for one in configured if "@" not in one and one != own)


def neighbour_addresses(configured: Sequence[str], published: Mapping[str, Sequence[str]], own: str) -> dict[str, str]:
    """Address → "edge/NAME" of the neighbours of which one is known.

    Args:
        configured: `NAME[@HOST:PORT]`, each.
        published: name → HOST:PORT, the best first.
        own: this device's name.
    """
    found: dict[str, str] = {}
    for name, _, address in [one.partition("@") for one in configured]:
        reached = address or next(iter(published.get(name, ())), "")
        if reached and name != own:
            found[reached] = f"edge/{name}"
    return found
