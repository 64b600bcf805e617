"""An order that configures devices, made and signed where the operator's key is, as an order of a model is.

A device's document lists its models and its settings; what its newest document says of models is carried over, and the
settings are replaced as a whole. The document for the way back has the settings that were desired before; of a device
of which nothing was desired, none, which brings its own configuration back.

Pure: the gateway's report goes in, an order comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from tidegate.fleet.messages import BadMessage
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.rollout.device_settings import settings_digest
from tidegate.rollout.signing import read_unverified
from tidegate.tools.delivery.order import (
    ListedDevice,
    OrderError,
    OrderSigning,
    signed_order,
    standing_document,
)

EVERY: Final = "all"  # instead of a group's name


@dataclass(frozen=True, slots=True)
class ConfigurationTerms:
    """What the order's documents have in common."""

    configuration: DesiredConfiguration
    issued_s: int
    expires_s: int
    replace_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    """The devices of a group: those to ask, in order, those that have it already, and why others are left out."""

    ask: tuple[ListedDevice, ...]
    have_it: tuple[str, ...]
    left_out: Mapping[str, str]


def chosen_devices(every: Sequence[ListedDevice], group: str, configuration: DesiredConfiguration) -> ChosenDevices:
    """The devices of a group, or of all; those that are alive are asked first, so that silent ones hold nobody up.

    Raises:
        OrderError: no device is in this group.
    """
    groups = {name for one in every if one.reported is not None for name in one.reported.groups}
    everyone = group == EVERY and EVERY not in groups
    found = [one for one in every if everyone or (one.reported is not None and group in one.reported.groups)]
    if not found:
        known = ", ".join(sorted(groups)) or "none"
        raise OrderError(f"no device is in the group {group!r}; there are: {known}; `{EVERY}` means every device")
    ask, have_it, left_out = [], [], {}
    for one in sorted(found, key=lambda device: (device.freshness == "dead", device.name)):
        if why := _unable(one):
            left_out[one.name] = why
        elif _has(one, configuration):
            have_it.append(one.name)
        else:
            ask.append(one)
    return ChosenDevices(tuple(ask), tuple(have_it), left_out)


def make_configuration_order(
    spec: Mapping[str, Any], devices: Sequence[ListedDevice], terms: ConfigurationTerms, signing: OrderSigning
) -> bytes:
    """The order, as the gateway takes it.

    Args:
        spec: its fields but for kind, digest, devices and revisions (`gateway/core/versions/canary.py`).

    Raises:
        OrderError: a device's newest document is not by these keys.
    """
    pairs = {}
    for device in devices:
        standing = standing_document(device, signing, replace_unsigned=terms.replace_unsigned)
        forward = replace(
            standing,
            revision=device.revision + 1,
            issued_s=terms.issued_s,
            expires_s=terms.expires_s,
            keys=signing.successors,
            configuration=terms.configuration,
        )
        before = standing.configuration or DesiredConfiguration()
        pairs[device.name] = forward, replace(forward, revision=device.revision + 2, configuration=before)
    digest = settings_digest(terms.configuration.settings)
    return signed_order({**spec, "kind": "configuration", "model": "configuration", "version": digest}, pairs, signing)


def desired_of(device: ListedDevice) -> tuple[int, DesiredConfiguration | None]:
    """The revision of the newest document that the gateway has for a device, and the configuration in it."""
    if device.document is None:
        return 0, None
    try:
        document = read_unverified(device.document.encode())
    except BadMessage:
        return 0, None
    return document.revision, document.configuration


def _unable(device: ListedDevice) -> str:
    if not device.takes_documents:
        return "it takes no documents: set `rollout.keys` in its configuration"
    if device.reported is None or device.reported.configuration is None:
        return "its agent cannot be configured from outside: bring it a newer one"
    return ""


def _has(device: ListedDevice, configuration: DesiredConfiguration) -> bool:
    is_there = device.configuration is not None and device.configuration.state == "in_sync"
    return is_there and desired_of(device)[1] == configuration
