"""One log line for each condition that begins or ends on a target."""

from __future__ import annotations

import structlog

from gateway.core.fleet.target import TargetView
from gateway.core.health.degradation import ConditionChange

log = structlog.get_logger(__name__)


def log_condition(target: TargetView, change: ConditionChange) -> None:
    """A condition has begun or ended."""
    condition = change.condition
    if change.begun:
        log.warning("something ails a target", target=target.id, condition=condition.name, evidence=condition.evidence)
    else:
        lasted_s = round(change.at - condition.since, 1)
        log.info("it ails the target no longer", target=target.id, condition=condition.name, lasted_s=lasted_s)
