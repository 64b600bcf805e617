"""Why a rollout waits: what it would spend that this device has not, or that its owner does not want spent now.

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

HANDOVER_RATIO: Final = 1.3  # of a worker's memory: what it takes beyond the model while it loads (ONNX Runtime #21165)


@dataclass(frozen=True, slots=True)
class DeviceResources:
    """What this device has now. `utc_s`: None while it does not know the time."""

    conditions: DeviceConditions
    utc_s: float | None
    free_disk_bytes: int
    free_memory_bytes: int


def fetch_hindrance(plan: ModelPlan, missing_bytes: int, device: DeviceResources) -> str:
    """Why not fetch now, "" when it may."""
    if not missing_bytes:
        return ""
    if device.conditions.metered and plan.net.metered == "defer":
        return "metered: the link is paid by the byte, and the plan waits for another"
    if device.free_disk_bytes < missing_bytes:
        return f"disk: {missing_bytes} bytes are needed, {max(0, device.free_disk_bytes)} are free"
    return _window(plan, device)


def load_hindrance(plan: ModelPlan, device: DeviceResources, *, beside: bool) -> str:
    """Why not load now, "" when it may. `beside`: a generation of the model runs already."""
    if device.conditions.throttled:
        return "thermal: the device computes slower now, to cool down"
    if beside and plan.activate == "handover" and not fits_beside(plan, device):
        needed = round(HANDOVER_RATIO * plan.ram_bytes)
        return f"ram: {needed} bytes are needed beside the running generation, {device.free_memory_bytes} are free"
    return _window(plan, device)


def fits_beside(plan: ModelPlan, device: DeviceResources) -> bool:
    """Whether the new generation may run beside the old one. A plan that does not say what it takes may."""
    return device.free_memory_bytes >= HANDOVER_RATIO * plan.ram_bytes


def _window(plan: ModelPlan, device: DeviceResources) -> str:
    if not plan.window:
        return ""
    if device.utc_s is None:
        return f"window: it is {plan.window} UTC, and this device does not know the time yet"
    return "" if in_window(plan.window, device.utc_s) else f"window: it is {plan.window} UTC"


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What new processes may take without swapping, as the kernel estimates it; no limit where nobody says."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
