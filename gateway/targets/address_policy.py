"""The target spec that a device's advertised address asks for, and the devices whose address is not dialled.

Networks are judged in `gateway/core/access/networks.py`. A name passes here and is judged by the address that it
resolves to when it is dialled; where plain unary gRPC resolves for itself, only addresses pass. Each device that is not
dialled is kept with the reason, for operators; the log names the first of them, and after that their count whenever it
has doubled, so that a whole fleet behind a wrong setting is a few lines.
"""

from __future__ import annotations

from typing import Final

import structlog

from gateway.core.access.networks import AllowedNetworks, grpc_address, host_and_port, is_address
from gateway.core.fleet.target import TargetSpec, Transport
from gateway.fleet_sync.freshness import DeviceView, Freshness
from tidegate.oip.check import quoted_input
from tidegate.types import TargetId

log = structlog.get_logger(__name__)

NAMED: Final = 16


class AddressPolicy:
    def __init__(self, networks: AllowedNetworks, transport: Transport) -> None:
        self.refused: dict[str, str] = {}  # by device: why what it advertises is not dialled
        self._judged: dict[str, TargetSpec] = {}  # by device: as it was last let through
        self._networks = networks
        self._transport = transport

    def spec_of(self, view: DeviceView) -> TargetSpec | None:
        """None for a device that is gone, says no address, or says one that may not be dialled."""
        address = grpc_address(view.urls)
        if view.freshness is Freshness.DEAD or address is None:
            self.forget(view.name)
            return None
        judged = self._judged.get(view.name)
        if judged is not None and judged.address == address:  # as after nearly every heartbeat
            return judged
        if not self._may_dial(view.name, address):
            self._judged.pop(view.name, None)
            return None
        spec = TargetSpec(str(TargetId("edge", view.name)), "edge", address, self._transport, static=False)
        self._judged[view.name] = spec
        return spec

    def forget(self, device: str) -> None:
        """It advertises nothing."""
        self.refused.pop(device, None)
        self._judged.pop(device, None)

    def _may_dial(self, device: str, address: str) -> bool:
        reason = self._why_not(address)
        if not reason:
            self.forget(device)
        elif self.refused.get(device) != reason:
            self.refused[device] = reason
            self._say(device, reason, len(self.refused))
        return not reason

    def _say(self, device: str, reason: str, count: int) -> None:
        if count <= NAMED:
            log.warning("a device advertises an address that is not allowed", device=device, reason=reason)
        elif count & (count - 1) == 0:
            log.warning("devices advertise addresses that are not allowed", devices=count, one=device, reason=reason)

    def _why_not(self, address: str) -> str:
        parts = host_and_port(address)
        if parts is None:
            return f"{quoted_input(address)} is no HOST:PORT"
        host, _ = parts
        if self._transport == "unary" and not is_address(host):
            return f"{host} is a name; with edge_transport: unary devices must advertise addresses"
        return self._networks.why_not(host)

    def __repr__(self) -> str:
        return f"<AddressPolicy to {self._networks!r}, {len(self.refused)} not dialled>"
