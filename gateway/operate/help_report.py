"""The help report: the devices that may ask for help now, as JSON for commands and as metric families.

What became of their requests is counted with all others, under the protocol `help`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import single


def help_json(askers: Mapping[str, int] | None) -> list[dict[str, Any]]:
    """By device with a stream for help. Args: askers: requests under way, by device; None: no device is helped."""
    return [{"device": device, "under_way": count} for device, count in sorted((askers or {}).items())]


def help_families(askers: Mapping[str, int]) -> Iterable[Metric]:
    """Args: askers: requests under way, by device."""
    return [
        single("tidegate_help_devices", "Devices with a stream by which they can ask for help.", len(askers)),
        single("tidegate_help_in_flight", "Requests that devices ask for and wait for.", sum(askers.values())),
    ]
