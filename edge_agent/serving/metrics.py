"""The edge agent's metrics for Prometheus: what waits, what is computed, how its models and the device are.

Off by default: a small device has other things to do than keep a scraper's connection, and its gateway sees most of
this from its reports. Counters are read where they are kept when somebody scrapes. Names begin with `tidegate_edge_`;
Triton's names (`nv_…`) are there as well.

prometheus-client is imported here and in `tidegate/metrics`: it is needed only by those who set `metrics_port`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from edge_agent.core.help.help_counts import HelpCounts
from edge_agent.core.help.neighbour_counts import NeighbourCounts
from edge_agent.device.sensors import Sensors
from edge_agent.fleet.sync import EdgeSync
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tidegate import clock
from tidegate.metrics.families import counter, gauge, single
from tidegate.metrics.generated import GeneratedCounts
from tidegate.metrics.generation import generation_families
from tidegate.metrics.serving import served_families


class EdgeMetrics:
    """`collect` makes the families, for `tidegate.metrics.exposition`."""

    def __init__(
        self,
        host: EdgeHost,
        runners: Callable[[], Sequence[Runner]],
        scheduler: EdgeScheduler,
        sensors: Sensors,
        sync: EdgeSync | None,
        *,
        sandbox: Mapping[str, bool] | None = None,
        generated: GeneratedCounts | None = None,
        helped: HelpCounts | None = None,
        answered: NeighbourCounts | None = None,
    ) -> None:
        """Args:
        helped: what gateways and neighbours are asked for; None: they are not.
        answered: what neighbours have asked of this device; None: it answers none.
        """
        self._helped = helped
        self._answered = answered
        self._generated = generated or GeneratedCounts()
        self._sandbox = sandbox or {}
        self._host = host
        self._runners = runners
        self._scheduler = scheduler
        self._sensors = sensors
        self._sync = sync

    def collect(self) -> Iterator[Metric]:
        yield from served_families("tidegate_edge", self._host.served, self._host.statistics())
        yield from self._queue_families()
        yield from self._model_families()
        states = [one.state(runner.name) for runner in self._runners() for one in runner.generating.values()]
        yield from generation_families("tidegate_edge", self._generated, states)
        yield from self._device_families()
        if self._helped is not None:
            yield from _help_families(self._helped)
        if self._answered is not None:
            yield from _neighbour_families(self._answered)

    def _queue_families(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        yield single("tidegate_edge_queued", "Requests that wait.", scheduler.queued)
        yield single("tidegate_edge_in_flight", "Requests that are computed.", scheduler.in_flight)
        yield single("tidegate_edge_queue_delay_seconds", "Predicted wait now.", scheduler.queue_delay_s(clock.now()))
        words = "Wait so far of who waits longest."
        yield single("tidegate_edge_queue_oldest_age_seconds", words, scheduler.oldest_age_s)

    def _model_families(self) -> Iterator[Metric]:
        up = [((one.name,), float(one.state == "ready")) for one in self._runners()]
        yield gauge("tidegate_edge_model_up", "Whether the model has a worker that serves.", ("model",), up)
        parts = [((part,), float(inside)) for part, inside in self._sandbox.items()]
        words = "Whether workers have given up files or network."
        yield gauge("tidegate_edge_worker_sandbox", words, ("part",), parts)
        starts = [((one.name,), float(one.restarts)) for one in self._runners()]
        words = "Workers that were started after another had ended."
        yield counter("tidegate_edge_worker_restarts", words, ("model",), starts)
        lost = [((one.name,), float(one.lost_workers.count)) for one in self._runners()]
        yield counter("tidegate_edge_worker_lost", "Of these: workers that hung or died.", ("model",), lost)
        collected = [((one.name,), one.collected_s) for one in self._runners()]
        words = "Garbage collections in the worker that serves."
        yield counter("tidegate_edge_worker_gc_seconds", words, ("model",), collected)

    def _device_families(self) -> Iterator[Metric]:
        seen = self._sensors.now
        battery = [] if seen.battery is None else [((), seen.battery)]
        yield gauge("tidegate_edge_battery_ratio", "Charge of the device's battery, if it has one.", (), battery)
        words = "1 while it computes on its battery."
        yield single("tidegate_edge_on_battery", words, float(seen.on_battery))
        heat = [] if seen.temperature_c is None else [((), seen.temperature_c)]
        yield gauge("tidegate_edge_temperature_celsius", "Of its processor, if it can be read.", (), heat)
        yield single("tidegate_edge_throttled", "1 while it computes slower to cool down.", float(seen.throttled))
        yield single("tidegate_edge_draining", "1 while it takes no new work to end.", float(self._host.draining))
        if self._sync is not None:
            yield single("tidegate_edge_mqtt_connected", "Whether the fleet's broker hears it.", self._sync.connected)
            yield single("tidegate_edge_epoch", "Number of its session with the fleet.", self._sync.epoch)

    def __repr__(self) -> str:
        return f"<EdgeMetrics of {self._host!r}>"


def _help_families(helped: HelpCounts) -> Iterator[Metric]:
    rows = [(key, float(count)) for key, count in helped.requests.items()]
    words = "Requests of local callers that needed help, by why, and by how help ended."
    yield counter("tidegate_edge_help_requests", words, ("reason", "outcome"), rows)
    words = "Seconds that the answers of gateways and neighbours took."
    yield counter("tidegate_edge_help_seconds", words, (), [((), helped.seconds)])
    yield single("tidegate_edge_help_in_flight", "Requests that others are asked for now.", helped.in_flight)
    yield single("tidegate_edge_help_gateways", "Gateways that can be asked now.", helped.gateways)
    yield single("tidegate_edge_help_neighbours", "Neighbours that can be asked now.", helped.neighbours)


def _neighbour_families(answered: NeighbourCounts) -> Iterator[Metric]:
    rows = [((outcome,), float(count)) for outcome, count in answered.requests.items()]
    words = "Requests that neighbours sent here, by how they ended."
    yield counter("tidegate_edge_neighbour_requests", words, ("outcome",), rows)
    words = "Neighbours' requests that wait or are computed."
    yield single("tidegate_edge_neighbour_in_flight", words, answered.in_flight)
