"""Where evidence from the data plane goes: the fleet's register, `gateway.fleet_sync.registry.FleetRegister`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.fleet_sync.freshness import DeviceView
from tidegate.types import LoadReport


class DeviceRegistry(Protocol):
    """The fleet's register, as far as the directory of targets needs it."""

    def devices(self, now: float) -> tuple[DeviceView, ...]: ...

    def changed(self, now: float, most: int) -> Sequence[tuple[str, DeviceView | None]]: ...

    def view(self, name: str, now: float) -> DeviceView | None: ...

    def knows(self, name: str) -> bool: ...

    def data_plane(self, name: str, epoch: int, sequence: int, load: LoadReport | None, now: float) -> bool: ...

    def data_plane_alive(self, name: str, now: float) -> bool: ...

    def data_plane_lost(self, name: str, now: float) -> bool: ...
