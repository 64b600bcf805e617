"""The section `help`: which devices may ask this gateway for help, and what each of them may have."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import Field

from gateway.config.auth import GrantConfig
from tidegate.caller import Grant
from tidegate.config import Section


class AskingDeviceConfig(GrantConfig):
    """Devices, matched by name, and what they are granted for requests of their local callers."""

    name: str = Field(
        min_length=1,
        description="A device's name, or a pattern such as kiosk-*. The first entry that matches counts.",
    )


class DeviceHelpConfig(Section):
    """Devices that send requests of their local callers here (`docs/asking-for-help.md`)."""

    devices: tuple[AskingDeviceConfig, ...] = Field(
        min_length=1, description="Devices and their grants; a device that no entry matches is not helped."
    )
    max_in_flight_per_device: int = Field(
        16,
        ge=1,
        le=1024,
        description="Requests of one device under way at once. More takes longer bursts, and more of what others need.",
    )

    def grant_of(self, device: str) -> Grant | None:
        """What the device of this name is granted; None: it is not helped."""
        return next((one.grant for one in self.devices if fnmatchcase(device, one.name)), None)
