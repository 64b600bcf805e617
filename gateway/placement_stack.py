"""Stacks a gateway's placement, and builds the admission and the hedging that go with it, from its configuration.

As with a request's layers (`gateway/app.py`), each part of the stack decides by the part inside of it.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from gateway.config.gateway import GatewayConfig
from gateway.core.admission.admission import Admission
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.placement_guard import AdmissionGuard
from gateway.core.admission.tenants import TenantQuotas
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.crowd import FROM_GATEWAYS
from gateway.core.placement.fallback import FallbackPlacer
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.placement.probing import ProbePlacer
from gateway.core.placement.utility import UtilityPlacer, UtilityWeights
from gateway.core.request.handover import HandoverPolicy
from gateway.core.request.handover_by_chance import ChanceHandovers
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy

log = structlog.get_logger(__name__)

PlacementLayer = Callable[[Placement], Placement]


def admission_of(config: GatewayConfig, fleet: Fleet, draw: Callable[[], float]) -> Admission:
    limit = AdaptiveLimit(
        config.max_in_flight,
        targets=lambda: fleet.queues,
        slots=lambda: fleet.slots,
        fixed=not config.adaptive_limit,
    )
    tenants = TenantQuotas({name: tenant.spec for name, tenant in config.tenants.items()})
    # Not every kind of source says a tier.
    has_sites = any(getattr(one, "tier", "") == "site" for one in (*config.targets, *config.discovery))
    return Admission(limit, tenants, draw=draw, shed=config.shed, has_sites=has_sites, on_change=_log_overload)


def policy_of(
    config: GatewayConfig, fleet: Fleet, draw: Callable[[], float], overloaded: Callable[[], bool]
) -> tuple[Placer, HedgePolicy]:
    """The innermost placer, and the hedging that goes with it: hedging by chance needs a placer that claims chances."""
    if config.policy == "cheapest":
        return Placer(fleet), DeadlineHedging()
    budget = None if config.cloud_budget is None else CloudBudget(config.cloud_budget)
    placer = UtilityPlacer(fleet, UtilityWeights.weighing(config.cost_weight), cloud_budget=budget)
    placer.share_targets(crowd_draw_of(config, draw, config.gateways))
    return placer, ChanceHedging(placer, overloaded=overloaded, races=config.first_token_race)


def handovers_of(
    config: GatewayConfig, placer: Placer, hedges: HedgePolicy, overloaded: Callable[[], bool]
) -> HandoverPolicy | None:
    """The planned handovers, paid from the purse of those hedges; None: off, or the policy claims no chances."""
    if not (config.planned_handover and isinstance(placer, UtilityPlacer) and isinstance(hedges, ChanceHedging)):
        return None
    return ChanceHandovers(placer, hedges, overloaded=overloaded)


def crowd_draw_of(config: GatewayConfig, draw: Callable[[], float], gateways: int) -> Callable[[], float] | None:
    """The chance that chooses which targets are looked at while there are so many gateways; None: all are."""
    shares = gateways >= FROM_GATEWAYS if config.shares_targets is None else config.shares_targets
    return draw if shares else None


def placement_of(
    placer: Placer, fleet: Fleet, admission: Admission, draw: Callable[[], float], overloaded: Callable[[], bool]
) -> Placement:
    """A decision's way, outermost part first. A sequence's steps add `StickyPlacer` around it, one for each request."""
    return stacked(
        fallback(fleet),  # outermost: a defect in any part below is no outage
        guard(fleet, admission),  # around probing: the tenant pays for the target that is really sent the request
        probing(fleet, draw, overloaded),
        inner=placer,
    )


def stacked(*layers: PlacementLayer, inner: Placement) -> Placement:
    """`inner` with `layers` around it: the first has the last word."""
    placement = inner
    for layer in reversed(layers):
        placement = layer(placement)
    return placement


def fallback(fleet: Fleet) -> PlacementLayer:
    """Places by least request when the placement inside fails."""
    return lambda inner: FallbackPlacer(inner, fleet, on_change=log_prediction_failure)


def guard(fleet: Fleet, admission: Admission) -> PlacementLayer:
    """Charges tenants for what is placed, and in overload refuses what is not worth it."""
    return lambda inner: AdmissionGuard(inner, fleet, admission)


def probing(fleet: Fleet, draw: Callable[[], float], overloaded: Callable[[], bool]) -> PlacementLayer:
    """Sends some requests to targets of which too little is known."""
    return lambda inner: ProbePlacer(inner, fleet, draw, overloaded=overloaded)


def log_prediction_failure(error: Exception | None) -> None:
    if error is None:
        log.warning("placement works again")
    else:
        log.error("placement fails: requests are placed by least request until it works again", exc_info=error)


def _log_overload(on: bool, reason: str) -> None:
    log.warning("overloaded: no hedges, and the least important are shed" if on else "no longer overloaded", why=reason)
