"""The conditions that targets are in now, as JSON for the admin port and as a metric.

What the conditions are and what follows from them is decided in `gateway/core/health/degradation.py`; each change is
logged by `gateway/targets/condition_log.py`.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetView
from gateway.core.health.degradation import Condition

MOST_SERIES: Final = 500


def active_conditions(fleet: Fleet) -> list[tuple[TargetView, Condition]]:
    """Every condition that holds now, the oldest first."""
    found = [(target, one) for target in fleet.targets.values() for one in target.degradation.active.values()]
    return sorted(found, key=lambda pair: pair[1].since)


def conditions_json(fleet: Fleet, now: float) -> list[dict[str, Any]]:
    """The same conditions as JSON."""
    return [
        {
            "target": target.id,
            "condition": one.name,
            "for_s": round(now - one.since, 1),
            "evidence": one.evidence,
            "model": one.model or None,
            "variant": None if one.variant is None else "/".join(one.variant),
        }
        for target, one in active_conditions(fleet)
    ]


def condition_family(fleet: Fleet) -> Metric:
    """A series for each condition that holds now, of more than `MOST_SERIES` for the oldest."""
    family = GaugeMetricFamily("tidegate_condition", "1 while it ails the target.", labels=("target", "condition"))
    for target, one in active_conditions(fleet)[:MOST_SERIES]:
        family.add_metric((target.id, one.name), 1.0)
    return family
