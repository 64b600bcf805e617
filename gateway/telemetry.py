"""Metrics with their scrape, traces and the access log of one gateway, put together in `Telemetry`.

    observers   of the stack: each sees every call
    watchers    of the flight recorder: each sees every request's record, as it is made
    taps        the same, when the record is packed, a moment later

Where several gateways share one address, `metrics_dir` is where they leave their counts for each other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

import structlog
from aiohttp import web

from gateway.config.gateway import GatewayConfig
from gateway.core.admission.admission import Admission
from gateway.core.admission.quarantine import Quarantine
from gateway.core.fleet.scaling import ReplicaScaler
from gateway.core.peers.demand_terms import DemandTerms
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.layers.observe import Observer
from gateway.layers.stack import Layer
from gateway.layers.traced import traced
from gateway.observe.access_log import AccessLog
from gateway.observe.conditions import OtherCondition, condition_family
from gateway.observe.deadline_observer import DeadlineObserver
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.refusal_log import RefusalLog
from gateway.observe.scaling import ScalingWatch, scaling_families
from gateway.observe.trace_sampling import TraceSampler
from gateway.operate.console.history import ConsoleHistory
from gateway.serving.dispatcher import Dispatcher
from tidegate import clock
from tidegate.metrics.certificate_families import certificate_families
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.loop_families import loop_families
from tidegate.metrics.loop_lag import LoopLag
from tidegate.metrics.sharing import SharedMetrics
from tidegate.runtime import events
from tidegate.runtime.process import StartError
from tidegate.security.certificate_watch import CertificateWatch
from tidegate.security.tls import Tls
from tidegate.tracing.collector import collector_of
from tidegate.types import InferRequest

SOON_S: Final = 0.010
log = structlog.get_logger(__name__)


def run_soon(do: Callable[[], None]) -> None:
    """Run deferred work of many requests in one go, a moment later, while its code is in the processor's caches."""
    asyncio.get_running_loop().call_later(SOON_S, do)


class Telemetry:
    """Counts from the start; inside `async with` it shares its counts and exports its spans."""

    def __init__(
        self,
        config: GatewayConfig,
        dispatcher: Dispatcher,
        admission: Admission,
        quarantine: Quarantine,
        version_of: Callable[[InferRequest], str],
        scaling: ReplicaScaler,
        console: ConsoleHistory | None = None,
        others: Callable[[float], list[OtherCondition]] = lambda _now: [],
        tls: Tls | None = None,
        needs: Callable[[float], Sequence[DemandTerms | None]] = lambda _now: (),
    ) -> None:
        """Args:
        console: an observer beside the metrics, which keeps the links' timelines.
        others: the conditions at an instant that are of no target.
        tls: whose certificate is watched; None: there is none.
        needs: what other gateways need of the pool at an instant.
        """
        placer, hedges = dispatcher.placer, dispatcher.hedges
        self.recorder = dispatcher.recorder
        self.metrics = GatewayMetrics(
            placer.fleet,
            admission,
            version_of=version_of,
            quarantine=quarantine,
            most_targets=config.metrics_targets,
            suppressed_hedges=lambda: hedges.tokens.suppressed if isinstance(hedges, ChanceHedging) else 0,
            calibration_error=(lambda: placer.calibration.claimed.ece) if isinstance(placer, UtilityPlacer) else None,
            token_calibration=placer.tokens if isinstance(placer, UtilityPlacer) else None,
            before_reading=self.recorder.pack,
            timeline_of=console.timelines.get if console is not None else lambda _target_id: None,
        )
        self.sharing = SharedMetrics(config.metrics_dir) if config.metrics_dir is not None else None
        self.exposition = Exposition(self.metrics.collect, self.sharing)
        self.scaling = ScalingWatch(placer.fleet, admission, scaling, needs)
        self.metrics.add(lambda: [condition_family(placer.fleet, others(clock.now()))])
        self.metrics.add(lambda: scaling_families(self.scaling.scaling))
        self.loop_lag = LoopLag()
        self.metrics.add(lambda: loop_families(self.loop_lag))
        self.certificate = CertificateWatch(tls)
        self.metrics.add(lambda: certificate_families(self.certificate.validity_utc_s()))
        self.layers: list[Layer] = []  # outside of the observers
        refusals = RefusalLog(self.recorder, dispatcher.ask_builder.ask)
        self.observers: list[Observer] = [self.metrics, self.metrics.generation, refusals]
        self.observers.append(DeadlineObserver(self.loop_lag.cost.missed))
        if console is not None:
            self.observers.append(console)
        if config.access_log != "none":
            write = events.emit if config.access_log == "json" else log.info
            self.observers.append(
                AccessLog(dispatcher.ask_builder.describe, write, sample=config.log_sample, draw=dispatcher.draw)
            )
        self._collector = collector_of(config.tracing, "gateway", config.name)
        self.trace_sampler: TraceSampler | None = None
        if config.tracing is not None and self._collector is not None:
            self.trace_sampler = TraceSampler(config.tracing, self._collector)
            self.metrics.add(self.trace_sampler.families)
            self.layers.append(traced(random.getrandbits, config.tracing.ratio))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack:
            if self.sharing is not None:
                try:
                    await self._stack.enter_async_context(self.sharing)
                except OSError as error:
                    raise StartError(f"key 'metrics_dir': {error}") from error
            if self._collector is not None:
                await self._stack.enter_async_context(self._collector)
            await self._stack.enter_async_context(self.scaling)
            await self._stack.enter_async_context(self.loop_lag)
            await self._stack.enter_async_context(self.certificate)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def routes(self) -> list[web.RouteDef]:
        """The routes of the metrics port."""
        return [web.get("/metrics", self._scrape), *self.scaling.routes()]

    async def _scrape(self, request: web.Request) -> web.Response:
        body, content_type = self.exposition.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def __repr__(self) -> str:
        return f"<Telemetry {self.metrics!r}>"
