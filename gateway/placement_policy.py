"""Who is let in and who places, as the configuration says: the pure parts of a gateway, given their numbers."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from gateway.config.gateway import GatewayConfig
from gateway.core.admission.admission import Admission
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.tenants import TenantQuotas
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.placer import Placer
from gateway.core.placement.probing import ProbePlacer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy

log = structlog.get_logger(__name__)


def admission_of(config: GatewayConfig, fleet: Fleet, draw: Callable[[], float]) -> Admission:
    limit = AdaptiveLimit(config.max_in_flight, targets=lambda: len(fleet.targets), fixed=not config.adaptive_limit)
    tenants = TenantQuotas({name: tenant.spec for name, tenant in config.tenants.items()})
    return Admission(limit, tenants, draw=draw, shed=config.shed, on_change=_say_overload)


def _say_overload(on: bool, reason: str) -> None:
    log.warning("overloaded: no hedges, and the least important are shed" if on else "no longer overloaded", why=reason)


def log_prediction_failure(error: Exception | None) -> None:
    if error is None:
        log.warning("placement works again")
    else:
        log.error("placement fails: requests are placed by least request until it works again", exc_info=error)


def policy_of(
    config: GatewayConfig, fleet: Fleet, draw: Callable[[], float], overloaded: Callable[[], bool]
) -> tuple[Placer, HedgePolicy]:
    """Where to place, and the hedging that goes with it: chances are only there where placement deals in them."""
    if config.policy == "cheapest":
        placer = Placer(fleet)
        placer.probes = ProbePlacer(fleet, draw, overloaded=overloaded)
        return placer, DeadlineHedging()
    budget = None if config.cloud_budget is None else CloudBudget(config.cloud_budget)
    by_value = UtilityPlacer(fleet, cloud_budget=budget)
    by_value.probes = ProbePlacer(fleet, draw, overloaded=overloaded)
    by_value.tie_breaking_draw = draw if config.shares_targets else None
    return by_value, ChanceHedging(by_value, overloaded=overloaded)
