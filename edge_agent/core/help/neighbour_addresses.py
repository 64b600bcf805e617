"""Where the neighbours are that a device may ask: as configured, as published over MQTT, or as announced by mDNS.

In this order: who may write to the broker is known, and to a local network anybody may say anything. One list may serve
all devices of a site, since a device passes over its own name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType


def neighbours_by_mqtt(configured: Sequence[str], own: str) -> tuple[str, ...]:
    """The names of `NAME[@HOST:PORT]` that have no address, without this device's own."""
    return tuple(one for one in configured if "@" not in one and one != own)


def neighbour_addresses(
    configured: Sequence[str],
    published: Mapping[str, Sequence[str]],
    own: str,
    announced: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Address → "edge/NAME" of the neighbours of which one is known.

    Args:
        configured: `NAME[@HOST:PORT]`, each.
        published: name → HOST:PORT, the best first.
        own: this device's name.
        announced: name → HOST:PORT, of those among whom this device may ask; names that are not configured come last.
    """
    found: dict[str, str] = {}
    named = [one.partition("@")[::2] for one in configured]
    for name, address in named:
        reached = address or next(iter(published.get(name, ())), "")
        if reached and name != own:
            found[reached] = f"edge/{name}"
    known = {own, *(peer.removeprefix("edge/") for peer in found.values())}
    for name in dict.fromkeys((*(name for name, _ in named), *sorted(announced))):
        if name not in known and name in announced:
            found.setdefault(announced[name], f"edge/{name}")  # an announcement takes no other's address
    return found
