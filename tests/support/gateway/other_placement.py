"""Puts other placers into gateways of this process by the gateways' names, with all else as it is in service."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gateway.app
from gateway.config.gateway import GatewayConfig
from gateway.core.admission.admission import Admission
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.request.hedging import HedgePolicy
from gateway.placement_stack import fallback, guard, stacked

Policy = Callable[[Fleet], tuple[Placer, HedgePolicy]]


def install(policies: Mapping[str, Policy]) -> None:
    """From now on a gateway of one of these names is placed for by its policy, and probes nobody."""
    tidegates, stack = gateway.app.policy_of, gateway.app.placement_of
    others: list[Placer] = []

    def policy(
        config: GatewayConfig, fleet: Fleet, draw: Callable[[], float], overloaded: Callable[[], bool]
    ) -> tuple[Placer, HedgePolicy]:
        if config.name not in policies:
            return tidegates(config, fleet, draw, overloaded)
        placer, hedges = policies[config.name](fleet)
        others.append(placer)
        return placer, hedges

    def unprobed(
        placer: Placer, fleet: Fleet, admission: Admission, draw: Callable[[], float], overloaded: Callable[[], bool]
    ) -> Placement:
        if placer not in others:
            return stack(placer, fleet, admission, draw, overloaded)
        return stacked(fallback(fleet), guard(fleet, admission), inner=placer)

    gateway.app.policy_of = policy
    gateway.app.placement_of = unprobed
