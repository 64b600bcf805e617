"""What a device announces over mDNS, and what is believed of such an announcement: a name and where it may be.

    SERVICE     _tidegate._tcp.local., an instance a device: NAME@GROUP, the group being of its fleet and site, so that
                two fleets on one network may have devices of one name
    TXT         v=1, fleet=NAME, site=NAME: those of another fleet or site on the same network are passed over
    SRV, A      the gRPC port, and the IPv4 addresses of the device's interfaces

Anybody on the network may announce anything. So nothing here says who answers at an address: that is for the stream
that is opened there, by its certificate, as for addresses that come over MQTT.

A device announces the addresses of all its interfaces, and many of those lead nowhere from here: each machine with
containers has the same 172.17.0.1. So an address in a network of this device's own is taken first, and one that this
device has itself only after those. Pure.

Source: RFC 6762 (multicast DNS), RFC 6763 (service discovery, sections 4 and 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from ipaddress import AddressValueError, IPv4Address, IPv4Interface
from typing import Final

from tidegate.fleet.topics import is_name

SERVICE: Final = "_tidegate._tcp.local."
MOST_NAME_BYTES: Final = 63 - 9  # of a label, beside the group
_MOST_TXT_BYTES: Final = 512
_MOST_ADDRESSES: Final = 16
_VERSION: Final = "1"


def group_of(fleet: str, site: str) -> str:
    """Eight characters that tell this fleet and site from others on the network."""
    return sha256(f"{fleet}\n{site}".encode()).hexdigest()[:8]


def service_of(name: str, group: str) -> str:
    """The instance of a device. A point ends a label, and no name has a blank."""
    return f"{name.replace('.', ' ')}@{group}.{SERVICE}"


def device_of(service: str, group: str) -> str:
    """The name of the device of this group that an instance is of; "" where it is of none."""
    name = service.removesuffix(f"@{group}.{SERVICE}").replace(" ", ".")
    return name if is_name(name) and service == service_of(name, group) else ""


def properties_of(fleet: str, site: str) -> dict[str, str]:
    """What is said in TXT."""
    return {"v": _VERSION, "fleet": fleet, "site": site}


def is_of(txt: Mapping[bytes, bytes | None], fleet: str, site: str) -> bool:
    """Whether an announcement is of this fleet and site."""
    if sum(len(key) + len(value or b"") for key, value in txt.items()) > _MOST_TXT_BYTES:
        return False
    wanted = properties_of(fleet, site).items()
    return all((txt.get(key.encode()) or b"") == value.encode() for key, value in wanted)


def address_of(addresses: Sequence[str], port: int | None, own: Iterable[IPv4Interface]) -> str:
    """HOST:PORT by which an announced device is likeliest reached; "" where there is none."""
    known = tuple(own)
    usable = [one for one in map(_address, addresses[:_MOST_ADDRESSES]) if one is not None]
    if not usable or not port or not 0 < port < 65536:
        return ""

    def rank(address: IPv4Address) -> int:
        if any(address == one.ip for one in known):
            return 1  # another agent on this machine, or a network that each machine has
        return 0 if any(address in one.network for one in known) else 2

    return f"{min(usable, key=rank)}:{port}"


def is_one_address(host: str) -> bool:
    """Whether a server that listens on `host` is reached at that IPv4 address and at no other."""
    return _address(host) is not None


def _address(text: str) -> IPv4Address | None:
    try:
        address = IPv4Address(text)
    except AddressValueError:
        return None
    return None if address.is_multicast or address.is_unspecified or address.is_reserved else address
