"""The address of a dial: as configured, or, for a device, checked at each dial (`core/access/networks.py`)."""

from __future__ import annotations

import asyncio
import socket

from gateway.core.access.networks import AllowedNetworks, host_and_port
from tidegate.servers.address import format_address


async def unchecked_address(address: str) -> str:
    """What an operator wrote is not questioned."""
    return address


async def allowed_address(networks: AllowedNetworks, address: str) -> str:
    """`address` with its host resolved. Raises ValueError where it must not be dialled, OSError where it is unknown."""
    parts = host_and_port(address)
    if parts is None:
        raise ValueError(f"{address!r} is no HOST:PORT")
    host, port = parts
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return format_address(networks.pick(host, [str(one[4][0]) for one in found]), int(port))
