"""The preconditions of a rollout compare what it would cost with what the device has and its plan allows now.

    to fetch      metered (the link is paid by the byte)   window   disk
    to load       window   thermal (it is throttled)       ram

The plan says what it may cost, the device what it has; both are values here, read by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.fleet.conditions import DeviceConditions
from tidegate.rollout.plan import ModelPlan, in_window

HANDOVER_RATIO: Final = 1.3  # of a worker's memory: its peak while the model loads (ONNX Runtime #21165)


@dataclass(frozen=True, slots=True)
class DeviceResources:
    """The device's resources now. `utc_s`: None while the device does not know the time."""

    conditions: DeviceConditions
    utc_s: float | None
    free_disk_bytes: int  # less the spare ones (`model_store.py`): negative where there are fewer
    free_memory_bytes: int


def fetch_hindrance(plan: ModelPlan, missing_bytes: int, device: DeviceResources) -> str:
    """Why the artefacts cannot be fetched now, "" when they can."""
    if not missing_bytes:
        return ""
    if device.conditions.metered and plan.net.metered == "defer":
        return "metered: the link is paid by the byte, and the plan waits for another"
    free = device.free_disk_bytes
    if 0 < free < missing_bytes:
        return f"disk: {missing_bytes} bytes are needed, {free} are free"
    if free < missing_bytes:  # the rest of the disk is not empty, but spare: 0 alone would not say how much to remove
        return (
            f"disk: {missing_bytes} bytes are needed, 0 are free beside the spare ones; {missing_bytes - free} too few"
        )
    return _window(plan, device)


def load_hindrance(plan: ModelPlan, device: DeviceResources, *, beside: bool) -> str:
    """Why the model cannot be loaded now, "" when it can. `beside`: a generation of it runs already."""
    if device.conditions.throttled:
        return "thermal: the device computes slower now, to cool down"
    if beside and plan.activate == "handover" and not fits_beside(plan, device):
        needed = round(HANDOVER_RATIO * plan.ram_bytes)
        return f"ram: {needed} bytes are needed beside the running generation, {device.free_memory_bytes} are free"
    return _window(plan, device)


def fits_beside(plan: ModelPlan, device: DeviceResources) -> bool:
    """Whether the new generation fits beside the old one; one fits if its plan names no memory."""
    return device.free_memory_bytes >= HANDOVER_RATIO * plan.ram_bytes


def _window(plan: ModelPlan, device: DeviceResources) -> str:
    if not plan.window:
        return ""
    if device.utc_s is None:
        return f"window: it is {plan.window} UTC, and this device does not know the time yet"
    return "" if in_window(plan.window, device.utc_s) else f"window: it is {plan.window} UTC"


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory for new processes without swapping, as the kernel estimates it; infinite where that is unknown."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
