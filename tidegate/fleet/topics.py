"""Topic names: one root per fleet, one subtree that a device writes and one that it reads.

    tidegate/v1/FLEET/up/DEVICE/{birth,death,hb,inv,reported}    device → gateways
    tidegate/v1/FLEET/up/DEVICE/probe                   no receiver: tests whether the device may publish
    tidegate/v1/FLEET/up/DEVICE/{evt,res}/GATEWAY       device → one gateway: what it stored while offline
    tidegate/v1/FLEET/down/DEVICE/cmd                   gateway → one device
    tidegate/v1/FLEET/down/DEVICE/desired               gateway → one device: what it shall run (retained, signed)
    tidegate/v1/FLEET/down/g/GROUP/desired              gateway → the devices of a group, which a device's own overrides
    tidegate/v1/FLEET/down/DEVICE/rcpt                  gateway → one device: what it has taken of that, and answers
    tidegate/v1/FLEET/gw/GATEWAY/{state,hb}             gateway → everyone
    tidegate/v1/FLEET/peer/GATEWAY                      gateway → gateways: what is asked of it
    tidegate/v1/FLEET/pool/POOL/{state,death}           pool → gateways: where it is (retained), and its last will

A device writes only below `up/DEVICE/` and reads only below `down/DEVICE/` and `gw/`, so two pattern ACL lines at the
broker cover every device of a fleet. Names are one topic level each: a name with `/`, `+` or `#` in it could write into
another subtree, so it is refused here, at start, and not discovered by the broker's silence (MQTT 3.1.1 brokers
answer a denied PUBLISH with success).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# `~` marks a second connection of the same device (`kiosk-1~cli`); `#` there is refused under Mosquitto's pattern ACLs.
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._~-]{0,63}\Z"
_NAME = re.compile(NAME_PATTERN)
# The fleet of a device, gateway or broker whose configuration names none: the same everywhere, or they never meet.
DEFAULT_FLEET: Final = "site"


class DeviceTopic(StrEnum):
    """The topics that a device writes. Each is a register of its own: MQTT orders only within one topic and QoS."""

    BIRTH = "birth"
    DEATH = "death"
    HEARTBEAT = "hb"
    INVENTORY = "inv"
    REPORTED = "reported"


class StoredTopic(StrEnum):
    """The topics of stored messages, to one gateway by name: only the gateway that took one can detect a duplicate."""

    EVENT = "evt"
    RESULT = "res"


class PoolTopic(StrEnum):
    """The topics that a pool writes, retained. A late will must not replace what the next session has said."""

    STATE = "state"
    DEATH = "death"


_POOL_KINDS: Final = {kind.value: kind for kind in PoolTopic}
_KINDS: Final = {kind.value: kind for kind in DeviceTopic}
# Heartbeats replace one another within a second; all else must arrive.
QOS: Final = {
    DeviceTopic.BIRTH: 1,
    DeviceTopic.DEATH: 1,
    DeviceTopic.HEARTBEAT: 0,
    DeviceTopic.INVENTORY: 1,
    DeviceTopic.REPORTED: 1,
}
RETAINED: Final = frozenset({DeviceTopic.BIRTH, DeviceTopic.DEATH, DeviceTopic.INVENTORY, DeviceTopic.REPORTED})


def is_name(text: str) -> bool:
    """Whether it can be one level of a topic, and so a device's name."""
    return _NAME.fullmatch(text) is not None


def checked_name(name: str, what: str) -> str:
    """`name` itself. Raises ValueError when it cannot be one level of a topic."""
    if not is_name(name):
        raise ValueError(
            f"{what} {name!r} must be 1 to 64 letters, digits and . _ ~ -, starting with a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one fleet."""

    fleet: str

    def __post_init__(self) -> None:
        checked_name(self.fleet, "the fleet's name")

    @property
    def root(self) -> str:
        return f"tidegate/v1/{self.fleet}"

    def up(self, device: str, kind: DeviceTopic) -> str:
        return f"{self.root}/up/{device}/{kind.value}"

    def probe(self, device: str) -> str:
        """A topic without subscribers, by which a device tests whether the broker lets it publish under this name."""
        return f"{self.root}/up/{device}/probe"

    def command(self, device: str) -> str:
        return f"{self.root}/down/{device}/cmd"

    def desired(self, device: str) -> str:
        return f"{self.root}/down/{device}/desired"

    def group_desired(self, group: str) -> str:
        return f"{self.root}/down/g/{group}/desired"

    def stored(self, device: str, kind: StoredTopic, gateway: str) -> str:
        return f"{self.root}/up/{device}/{kind.value}/{gateway}"

    def receipt(self, device: str) -> str:
        return f"{self.root}/down/{device}/rcpt"

    def gateway_state(self, gateway: str) -> str:
        return f"{self.root}/gw/{gateway}/state"

    def gateway_heartbeat(self, gateway: str) -> str:
        return f"{self.root}/gw/{gateway}/hb"

    def peer(self, gateway: str) -> str:
        """What a gateway tells the others of one fleet."""
        return f"{self.root}/peer/{gateway}"

    def pool(self, pool: str, kind: PoolTopic) -> str:
        return f"{self.root}/pool/{pool}/{kind.value}"

    @property
    def of_pools(self) -> tuple[tuple[str, int], ...]:
        """(filter, QoS) of what pools announce; QoS 0 as in `for_gateways`."""
        return tuple((self.pool("+", kind), 0) for kind in PoolTopic)

    def parse_pool(self, topic: str) -> tuple[str, PoolTopic] | None:
        """(pool, kind) of a pool's topic in this fleet, None for any other."""
        prefix = f"{self.root}/pool/"
        name, _, kind = topic.removeprefix(prefix).partition("/")
        known = topic.startswith(prefix) and kind in _POOL_KINDS and _NAME.fullmatch(name)
        return (name, _POOL_KINDS[kind]) if known else None

    @property
    def states_of_all_fleets(self) -> str:
        """A filter for the states of gateways of every fleet at this broker, as far as its ACL lets them be read."""
        return "tidegate/v1/+/gw/+/state"

    def parse_other_fleet(self, topic: str) -> tuple[str, str] | None:
        """(fleet, gateway) of the state of a gateway of another fleet."""
        match topic.split("/"):
            case ["tidegate", "v1", fleet, "gw", gateway, "state"] if fleet != self.fleet and is_name(fleet):
                return (fleet, gateway) if is_name(gateway) else None
        return None

    @property
    def for_gateways(self) -> tuple[tuple[str, int], ...]:
        """(filter, QoS) of everything that a gateway listens to.

        QoS 0: between a broker and a session that ends with its connection, acknowledgements add nothing to TCP. They
        take away: of births under QoS 1 a stock Mosquitto sends 20 at a time and drops all but 1,000 more, and
        heartbeats overtake those that wait.
        """
        devices = tuple((self.up("+", kind), 0) for kind in DeviceTopic)
        return (*devices, (self.gateway_state("+"), 1), (self.gateway_heartbeat("+"), 0), (self.peer("+"), 0))

    def for_device(self, device: str) -> tuple[tuple[str, int], ...]:
        """(filter, QoS) of everything that a device listens to."""
        return (
            (self.command(device), 1),
            (self.receipt(device), 1),
            (self.gateway_state("+"), 1),
            (self.gateway_heartbeat("+"), 0),
        )

    def of_neighbours(self, devices: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        """(filter, QoS) of where these devices are, for another device that may ask them."""
        return tuple((self.up(device, DeviceTopic.BIRTH), 1) for device in devices)

    def stored_for(self, gateway: str) -> tuple[tuple[str, int], ...]:
        """(filter, QoS) of what devices kept for this gateway."""
        return tuple((self.stored("+", kind, gateway), 1) for kind in StoredTopic)

    def parse_stored(self, topic: str, gateway: str) -> str | None:
        """The device that sent what it had kept to this gateway; None for any other topic."""
        prefix = f"{self.root}/up/"
        device, _, rest = topic.removeprefix(prefix).partition("/")
        mine = rest in [f"{kind.value}/{gateway}" for kind in StoredTopic]
        return device if topic.startswith(prefix) and mine and _NAME.fullmatch(device) else None

    def for_rollout(self, device: str, groups: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        """(filter, QoS) of the desired documents for a device of these groups."""
        return (self.desired(device), 1), *((self.group_desired(group), 1) for group in groups)

    def parse_up(self, topic: str) -> tuple[str, DeviceTopic] | None:
        """(device, kind) of a device's topic in this fleet, None for any other."""
        prefix = f"{self.root}/up/"
        if not topic.startswith(prefix):
            return None
        device, _, kind = topic[len(prefix) :].partition("/")
        return (device, _KINDS[kind]) if kind in _KINDS and _NAME.fullmatch(device) else None

    def parse_desired(self, topic: str) -> str | None:
        """The scope ("device/NAME", "group/NAME") whose document this topic carries."""
        levels = topic.removeprefix(f"{self.root}/down/").split("/")
        if not topic.startswith(f"{self.root}/down/") or levels[-1] != "desired" or not _NAME.fullmatch(levels[-2:][0]):
            return None
        match levels:
            case [device, _]:
                return f"device/{device}"
            case ["g", group, _]:
                return f"group/{group}"
        return None

    def is_of_one_gateway(self, topic: str) -> bool:
        """Whether it carries what a device has stored for one gateway."""
        levels = topic.removeprefix(f"{self.root}/up/").split("/")
        return topic.startswith(f"{self.root}/up/") and len(levels) == 3 and levels[1] in tuple(StoredTopic)

    def is_retained(self, topic: str) -> bool:
        """Whether the newest message there is retained, so that who comes later hears it too."""
        said = self.parse_up(topic)
        return (
            said[1] in RETAINED
            if said is not None
            else self.parse_pool(topic) is not None
            or (self.parse_gateway(topic) is not None and topic.endswith("/state"))
        )

    def parse_gateway(self, topic: str) -> str | None:
        """The gateway whose state or heartbeat this topic carries."""
        prefix = f"{self.root}/gw/"
        name, _, kind = topic.removeprefix(prefix).partition("/")
        return name if topic.startswith(prefix) and kind in ("state", "hb") and _NAME.fullmatch(name) else None

    def parse_peer(self, topic: str) -> str | None:
        """The gateway that tells the others something on this topic."""
        name = topic.removeprefix(f"{self.root}/peer/")
        return name if name != topic and _NAME.fullmatch(name) else None
