"""The address policy accepts a device's advertised address only inside networks that the operator allows.

A gateway dials what devices advertise, and devices are in strangers' hands: one that names an address inside the
gateway's own network (a database, the cloud's metadata service at 169.254.169.254) would have the gateway connect to
it. So an address is compared with the allowed networks before it is dialled. A host name says nothing until it is
resolved: then every address that it has must be allowed, at every dial, and the one that was checked is dialled, so
that a name which answers differently a moment later gains nothing.

Not promised: that inside the allowed networks a device names itself. Its certificate says that (`tls`), or else the
name in its hello.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_REMEMBERED: Final = 1 << 15

# Link-local addresses are not among them: clouds keep their metadata there.
PRIVATE: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
LOOPBACK: Final = ("127.0.0.0/8", "::1/128")


class AllowedNetworks:
    """The allowed networks; immutable."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Raises ValueError for what is no network."""
        self._networks: tuple[Network, ...] = tuple(ipaddress.ip_network(one) for one in networks)

    def __contains__(self, host: str) -> bool:
        """Whether `host`, an address and no name, lies in one of them."""
        address = _parsed(host)
        if address is None:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def why_not(self, host: str) -> str:
        """What is wrong with an address; "" where nothing is, and for a name, which has to be resolved first."""
        return "" if not is_address(host) or host in self else f"{host} is in no network of advertised_networks"

    def pick(self, name: str, addresses: Iterable[str]) -> str:
        """The address to dial for `name`. Raises ValueError unless all that it has are allowed."""
        found = list(dict.fromkeys(addresses))
        for address in found:
            if address not in self:
                raise ValueError(f"{name} is {address}, which is in no network of advertised_networks")
        if not found:
            raise ValueError(f"{name} has no address")
        return found[0]

    def __repr__(self) -> str:
        return f"<AllowedNetworks {', '.join(map(str, self._networks)) or 'none'}>"


def is_address(host: str) -> bool:
    return _parsed(host) is not None


@lru_cache(_REMEMBERED)
def _parsed(host: str) -> Address | None:
    """None for a name. Remembered: whoever looks at a whole fleet again and again looks at the same few thousand."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@lru_cache(_REMEMBERED)
def host_and_port(address: str) -> tuple[str, str] | None:
    """Of HOST:PORT or [IPV6]:PORT; None for anything else, such as the schemes that gRPC would take for a target."""
    host, separator, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        return None
    if not is_address(host) and not _is_name(host):
        return None
    return host, port


def grpc_address(urls: tuple[str, ...]) -> str | None:
    """host:port of the first gRPC address; a bare one is taken as gRPC."""
    for url in urls:
        scheme, separator, rest = url.partition("://")
        if not separator:
            return scheme
        if scheme in ("grpc", "link"):
            return rest.rstrip("/")
    return None


def _is_name(host: str) -> bool:
    # A name whose last label is a number is read as an address by some resolvers: 127.1, 0x7f.1, 2130706433.
    labels = host.removesuffix(".").split(".")
    plain = all(label and label.isascii() and label.replace("-", "").replace("_", "").isalnum() for label in labels)
    return plain and not labels[-1][0].isdigit()
