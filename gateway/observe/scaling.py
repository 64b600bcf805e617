"""The number of pool replicas that the load needs, computed every few seconds and published for an autoscaler.

    GET /scaling      {"pool_replicas_needed": 3, …} on the metrics port; 503 while it is not known yet, so that an
                      autoscaler keeps what there is
    metric            tidegate_pool_replicas_needed, tidegate_pool_load (pool-seconds a second), by `metrics.py`

Several gateways that see each other over MQTT all tell the need of all of them, so one is asked, or the largest is
taken. What is needed is decided in `gateway/core/fleet/scaling.py`; requests report what they cost as they are sent.
What admission refused for lack of room never becomes an attempt, so it is counted from here. How to have it followed
by KEDA or an HPA: docs/degradation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import structlog
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.core.admission.admission import Admission
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.scaling import ReplicaScaler
from gateway.core.peers.demand_terms import DemandTerms
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask

LOOK_S: Final = 5.0
log = structlog.get_logger(__name__)


class ScalingWatch:
    """Looks inside `async with`.

    Args:
        scaling: the fleet's own scaler, which hears of each attempt at a pool.
        others: what other gateways need of the same pool at an instant; None of one that does not know.
    """

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        scaling: ReplicaScaler,
        others: Callable[[float], Sequence[DemandTerms | None]] = lambda _now: (),
    ) -> None:
        self.scaling = scaling
        self._others = others
        self._fleet = fleet
        self._admission = admission
        self._turned_away = 0
        self._task = OwnedTask(self._watch, name="scaling signal")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    def look(self, now: float) -> None:
        """Decide anew, and say it when that changed."""
        refused = self._admission.refused
        turned_away = sum(count for reason, count in refused.items() if reason != "over-budget")  # a tenant's own limit
        self.scaling.turned_away(turned_away - self._turned_away, now)
        self._turned_away = turned_away
        before = self.scaling.needed.replicas
        needed = self._fleet.replicas_needed(now, self._others(now))
        if needed is not None and self.scaling.known and needed.replicas != before:
            load, strain = round(needed.load, 3), round(needed.strain, 2)
            log.info("the pool needs another number of replicas", needed=needed.replicas, load=load, strain=strain)

    def told(self) -> dict[str, Any]:
        """What the endpoint says."""
        needed = self.scaling.needed
        return {
            "pool_replicas_needed": needed.replicas,
            "gateways": 1 + len(self._others(clock.now())),
            "known": self.scaling.known,
            "load": round(needed.load, 4),
            "forecast": round(needed.forecast, 4),
            "spread": round(needed.spread, 4),
            "strain": round(needed.strain, 4),
            "backlog_s": round(needed.backlog_s, 4),
            "target_attainment": self.scaling.spec.target_attainment,
        }

    def routes(self) -> list[web.RouteDef]:
        async def scaling(_request: web.Request) -> web.Response:
            return web.json_response(self.told(), status=200 if self.scaling.known else 503)

        return [web.get("/scaling", scaling)]

    async def _watch(self) -> None:
        while True:
            await clock.sleep(LOOK_S)
            try:
                self.look(clock.now())
            except Exception:
                log.exception("the need for replicas cannot be told")  # a defect here must not end it for good

    def __repr__(self) -> str:
        return f"<ScalingWatch {self.scaling!r}>"


_TERMS: Final = {
    "replicas": "Replicas that this gateway's load takes, without margin, backlog and rounding; gateways' add up.",
    "variance": "Square of the replicas of margin for the load's variation; gateways' add up before the root.",
    "backlog": "Replicas that work off what waits in the pools, which all gateways see: take the largest.",
}


def scaling_families(scaling: ReplicaScaler | None) -> list[Metric]:
    """Nothing while it is not known: an absent metric leaves an autoscaler where it is, a wrong one does not."""
    if scaling is None or not scaling.known:
        return []
    text = "Replicas of the pool that answer the target share of all gateways' requests in time: take the largest."
    return [
        GaugeMetricFamily("tidegate_pool_replicas_needed", text, value=scaling.needed.replicas),
        *[
            GaugeMetricFamily(f"tidegate_pool_demand_{name}", words, value=value)
            for (name, words), value in zip(_TERMS.items(), scaling.needed.terms, strict=True)
        ],
        GaugeMetricFamily("tidegate_pool_load", "Pool-seconds of work asked for a second.", value=scaling.needed.load),
    ]
