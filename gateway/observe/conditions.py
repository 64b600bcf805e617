"""The conditions that hold now, of targets and of what is no target, as JSON for the admin port and as a metric.

What the conditions are and what follows from them is decided in `gateway/core/health/degradation.py`; each change is
logged by `gateway/targets/condition_log.py`. A condition of the fleet or of this gateway itself (`OtherCondition`)
stands beside them: two agents of one name have one entry, and perhaps no target.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.found_targets import FoundTargets
from gateway.core.fleet.name_claims import NameClaims
from gateway.core.fleet.target import TargetView
from gateway.core.health.degradation import Condition
from gateway.store.shared_store import SharedStore
from tidegate.estimate.stall_cost import StallCost

MOST_SERIES: Final = 500


def active_conditions(fleet: Fleet) -> list[tuple[TargetView, Condition]]:
    """Every condition that holds now, the oldest first."""
    found = [(target, one) for target in fleet.targets.values() for one in target.degradation.active.values()]
    return sorted(found, key=lambda pair: pair[1].since)


class OtherCondition(NamedTuple):
    """A condition of what is no target: a device's name, or this gateway."""

    subject: str
    name: str
    since: float
    evidence: str

    def as_json(self, now: float) -> dict[str, Any]:
        return {
            "target": self.subject,
            "condition": self.name,
            "for_s": round(now - self.since, 1),
            "evidence": self.evidence,
            "model": None,
            "variant": None,
        }


def name_conditions(claims: NameClaims, now: float) -> list[OtherCondition]:
    """A condition for each name that two agents claim."""
    return [
        OtherCondition(f"edge/{one.device}", "name_conflict", one.since, one.evidence(now))
        for one in claims.standing(now)
    ]


def loop_conditions(gateway: str, cost: StallCost) -> list[OtherCondition]:
    """The condition of a gateway whose own event loop is held up, while that costs deadlines."""
    return [OtherCondition(f"gateway/{gateway}", "loop_stalled", cost.since, cost.evidence)] if cost.evidence else []


def discovery_conditions(found: FoundTargets) -> list[OtherCondition]:
    """A condition for each source that is away or says what cannot be used, and for each target that is refused."""
    away = [
        OtherCondition(f"source/{one.name}", "source_away", one.away_since, one.why)
        for one in found.sources.values()
        if one.away_since is not None
    ]
    unusable = [
        OtherCondition(f"source/{one.name}", "source_unusable", one.warned_at, one.warning)
        for one in found.sources.values()
        if one.warning
    ]
    refused = [OtherCondition(target_id, "id_conflict", since, why) for _, target_id, why, since in found.refusals()]
    return [*away, *unusable, *refused]


def store_conditions(store: SharedStore | None) -> list[OtherCondition]:
    """The condition of a store that gateways share, while it does not answer."""
    if store is None or store.away_since is None:
        return []
    return [
        OtherCondition(f"store/{store.address.rpartition('//')[2]}", "store_away", store.away_since, f"{store.trouble}")
    ]


def conditions_json(fleet: Fleet, now: float, others: Iterable[OtherCondition] = ()) -> list[dict[str, Any]]:
    """The same conditions, and the others, as JSON."""
    return [other.as_json(now) for other in others] + [
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


def condition_family(fleet: Fleet, others: Iterable[OtherCondition] = ()) -> Metric:
    """A series for each condition that holds now, of more than `MOST_SERIES` for the oldest."""
    family = GaugeMetricFamily("tidegate_condition", "1 while it ails the target.", labels=("target", "condition"))
    found = [(other.subject, other.name) for other in others]
    found += [(target.id, one.name) for target, one in active_conditions(fleet)]
    for labels in found[:MOST_SERIES]:
        family.add_metric(labels, 1.0)
    return family
