"""Log lines for changes of a target's health: its conditions, its ejection, and panic in the fleet."""

from __future__ import annotations

import structlog

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.name_claims import NameConflict
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


def log_name_conflict(conflict: NameConflict, begun: bool, now: float) -> None:
    """Two agents of one name were noticed, or it is over."""
    if begun:
        log.warning(
            "two live agents have one name: one is kept, and the other is told to stay away",
            device=conflict.device,
            kept=conflict.kept.in_words(now),
            refused=conflict.refused.in_words(now),
            why="it has run longer",
        )
    else:
        log.info("a name has one agent again", device=conflict.device, lasted_s=round(now - conflict.since, 1))


class HealthLog:
    """Logs one line when a target is ejected or used again, and one when panic begins or ends."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._panicked = False

    def log_health(self, target: TargetView, now: float) -> None:
        """An observer of the fleet (`Fleet.on_health`)."""
        if target.ejected:
            state, reason = target.state(now)
            log.warning("target is taken out", target=target.id, state=state, reason=reason)
        else:
            log.info("target is trusted again", target=target.id)
        balance = self._fleet.balance
        if balance.panic != self._panicked:
            self._panicked = balance.panic
            report = log.warning if balance.panic else log.info
            report(
                "most targets fail: all are used" if balance.panic else "most targets work again", fleet=str(balance)
            )

    def __repr__(self) -> str:
        return f"<HealthLog{' in panic' if self._panicked else ''}>"
