"""The metrics port serves the edge agent's metrics to Prometheus, where a port is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from edge_agent.core.help.help_counts import HelpCounts
from edge_agent.core.help.neighbour_counts import NeighbourCounts
from edge_agent.device.sensors import Sensors
from edge_agent.fleet.sync import EdgeSync
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tidegate.metrics.generated import GeneratedCounts
from tidegate.metrics.loop_lag import LoopLag
from tidegate.metrics.scrape_port import ScrapeServer
from tidegate.runtime.process import StartError
from tidegate.security.certificate_watch import CertificateWatch


async def open_metrics(
    stack: AsyncExitStack,
    address: tuple[str, int],
    host: EdgeHost,
    runners: Callable[[], Sequence[Runner]],
    scheduler: EdgeScheduler,
    sensors: Sensors,
    sync: EdgeSync | None,
    sandbox: Mapping[str, bool],
    generated: GeneratedCounts,
    loop_lag: LoopLag,
    certificate: CertificateWatch,
    more: Callable[[], Iterable[Any]] = tuple,
    helped: HelpCounts | None = None,
    answered: NeighbourCounts | None = None,
) -> str:
    """Where it listens, until the stack ends. Raises StartError.

    Args:
        more: further families, of rooms above this one.
    """
    try:
        # Needed only by those who set the port.
        from edge_agent.serving.metrics import EdgeMetrics
        from tidegate.metrics.certificate_families import certificate_families
        from tidegate.metrics.exposition import Exposition
        from tidegate.metrics.loop_families import loop_families
    except ModuleNotFoundError as error:
        raise StartError("key 'metrics_port' needs prometheus-client: pip install 'tidegate[metrics]'") from error
    metrics = EdgeMetrics(
        host,
        runners,
        scheduler,
        sensors,
        sync,
        sandbox=sandbox,
        generated=generated,
        helped=helped,
        answered=answered,
    )
    exposition = Exposition(metrics.collect)
    exposition.add(lambda: loop_families(loop_lag))
    exposition.add(lambda: certificate_families(certificate.validity_utc_s()))
    exposition.add(more)
    door = ScrapeServer(exposition.render, *address)
    try:
        return (await stack.enter_async_context(door)).address
    except OSError as error:
        raise StartError(f"key 'metrics_port': {address[1]} cannot be listened on: {error}") from error
