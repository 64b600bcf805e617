"""The configuration report: how many devices have the settings that are desired of them, and which have not.

As part of `GET /v1/state`, as conditions, and as a metric. Each device's own settings are in `GET /v1/devices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.metrics_core import Metric

from gateway.core.versions.configuration_drift import DriftWatch
from gateway.observe.conditions import OtherCondition
from tidegate.metrics.families import gauge

MOST_SHOWN: Final = 100


def configuration_json(drift: DriftWatch | None, now: float) -> dict[str, Any]:
    """The counts by state, and the devices that have drifted; no counts where this gateway configures none."""
    if drift is None:
        return {"devices": {}, "drifted": []}
    drifted = [
        {"device": device, "for_s": round(now - since, 1), "evidence": evidence}
        for device, since, evidence in drift.standing(now)[:MOST_SHOWN]
    ]
    return {"devices": drift.counts(), "drifted": drifted}


def configuration_conditions(drift: DriftWatch, now: float) -> list[OtherCondition]:
    """A condition for each device that has settled on something else than is desired."""
    return [
        OtherCondition(f"edge/{device}", "configuration_drift", since, evidence)
        for device, since, evidence in drift.standing(now)[:MOST_SHOWN]
    ]


def file_conditions(refused: Mapping[str, tuple[float, str]]) -> list[OtherCondition]:
    """A condition for each device that refuses its own file of settings: by device, since when and why."""
    shown = list(refused.items())[:MOST_SHOWN]
    return [OtherCondition(f"edge/{device}", "device_file_refused", since, words) for device, (since, words) in shown]


def configuration_families(drift: DriftWatch) -> Iterable[Metric]:
    counts = [((state,), float(count)) for state, count in drift.counts().items()]
    words = "Devices by how their settings are to those that are desired of them."
    return [gauge("tidegate_configuration_devices", words, ("state",), counts)]
