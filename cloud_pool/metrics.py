"""The pool metrics expose queues, batches, workers, memory and control turns to Prometheus.

Counters are read from their owners at each scrape; nothing is counted twice for it. Names begin with `tidegate_pool_`;
Triton's names (`nv_…`) are exposed as well, so that dashboards made for Triton work against a pool alone.

prometheus-client is imported only here and in `tidegate/metrics`: a pool needs it only where `metrics_port` is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf

from prometheus_client.metrics_core import Metric

from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.generating_replica import GeneratingReplica
from cloud_pool.workers.health_controller import HealthController
from cloud_pool.workers.model_workers import GenerationWorkers, ModelWorkers
from cloud_pool.workers.replica import Replica
from tidegate import clock
from tidegate.metrics.families import Row, counter, gauge, histogram
from tidegate.metrics.generated import GeneratedCounts
from tidegate.metrics.generation import generation_families
from tidegate.metrics.served import ServedCounts
from tidegate.metrics.serving import served_families
from tidegate.oip.host import ModelStatistics
from tidegate.priority import level_of


class PoolMetrics:
    """`collect` makes the families, for `tidegate.metrics.exposition`."""

    def __init__(
        self,
        scheduler: PoolScheduler,
        supervisor: ModelWorkers,
        steward: HealthController,
        statistics: Callable[[], Iterable[ModelStatistics]],
        live_sequences: Callable[[str], int] = lambda _model: 0,
        coalesced: Callable[[], int] = lambda: 0,
        served: ServedCounts | None = None,
        sandbox: Mapping[str, bool] | None = None,
        generating: GenerationWorkers | None = None,
    ) -> None:
        self._generating = generating
        self._sandbox = sandbox or {}
        self._served = served or ServedCounts()
        self._scheduler = scheduler
        self._supervisor = supervisor
        self._steward = steward
        self._statistics = statistics
        self._live_sequences = live_sequences
        self._coalesced = coalesced

    def collect(self) -> Iterator[Metric]:
        yield from self._queue_families()
        yield from self._batch_families()
        yield from self._worker_families()
        yield from self._device_families()
        yield from self._steward_families()
        yield from self._generation_families()
        yield from served_families("tidegate_pool", self._served, self._statistics())

    def _queue_families(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        yield _gauge("queued", "Parts of requests that wait.", scheduler.queued)
        yield _gauge("in_flight", "Parts of requests with a worker.", scheduler.in_flight)
        yield _gauge("queue_delay_seconds", "Predicted wait now.", scheduler.queue_delay_s(clock.now()))
        yield _counters("refused", "Requests refused: a full queue or no time left.", (), [((), scheduler.refused)])

        words = "Requests that found their level full and wait at a lower one."
        yield _counters("demoted", words, ("lane", "asked", "level"), scheduler.demoted.items())

        words = "Requests answered with another's computation."
        yield _counters("coalesced", words, (), [((), float(self._coalesced()))])

        yield from self._line_families(clock.now())

    def _line_families(self, now: float) -> Iterator[Metric]:
        depths: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str], float] = {}
        for queue in self._scheduler.queues:
            for item in queue.batcher.waiting():
                depths[queue.lane.key, str(level_of(item.priority))] += 1
            waits = [now - item.arrived_at for item in queue.batcher.waiting()]
            oldest[queue.lane.key,] = max([oldest.get((queue.lane.key,), 0.0), *waits])
        yield _gauges("queue_depth", "Parts of requests that wait, by level.", ("lane", "level"), depths.items())
        yield _gauges("queue_oldest_age_seconds", "Wait so far of who waits longest.", ("lane",), oldest.items())

    def _batch_families(self) -> Iterator[Metric]:
        batches = self._scheduler.batches
        rows = (((lane,), one) for lane, one in batches.rows.items())
        yield histogram("tidegate_pool_batch_rows", "Rows of the batches that were computed.", ("lane",), rows)
        delays = (((lane,), one) for lane, one in batches.dispatch_s.items())
        words = "From when a batch was due and a worker free until the worker had it."
        yield histogram("tidegate_pool_dispatch_delay_seconds", words, ("lane",), delays)
        words = "Batches by why they held no more."
        yield _counters("batch_close", words, ("lane", "reason"), batches.closes.items())
        work = (((lane,), units) for lane, units in batches.work_units.items())
        yield _counters("work_units", "Work computed, padding included.", ("lane",), work)
        padding = (((lane,), units) for lane, units in batches.padded_units.items())
        yield _counters("padded_units", "Of the work computed: padding.", ("lane",), padding)

    def _worker_families(self) -> Iterator[Metric]:
        slots = list(self._scheduler.seats)
        drift = self._steward.health
        up = [((slot.name,), float(slot.state == "ready")) for slot in self._places()]
        yield _gauges("worker_up", "Whether the slot has a worker that serves.", ("slot",), up)
        lost = [((slot.name,), float(slot.lost_workers.count)) for slot in self._places()]
        yield _counters("worker_lost", "Workers that hung or died.", ("slot",), lost)
        lives = [(slot.place.name, slot.current) for slot in self._supervisor.slots]
        collected = [((name,), life.worker.collected_s) for name, life in lives if life is not None and life.worker]
        yield _counters("worker_gc_seconds", "Garbage collections in the worker that serves.", ("slot",), collected)
        parts = [((part,), float(inside)) for part, inside in self._sandbox.items()]
        yield _gauges("worker_sandbox", "Whether workers have given up files or network.", ("part",), parts)
        busy = [((slot.name,), slot.busy_s) for slot in slots]
        yield _counters("worker_busy_seconds", "Time spent in batches.", ("worker",), busy)
        served = [((slot.name,), float(slot.served)) for slot in slots]
        yield _counters("worker_served", "Parts of requests computed.", ("worker",), served)
        sums = [((name,), health.drift.sum) for name, health in drift.items()]
        yield _gauges("worker_drift", "CUSUM of its batches' times over its normal.", ("worker",), sums)
        ill = [((name,), float(health.complaint is not None)) for name, health in drift.items()]
        held = [((name,), bytes) for name, bytes in self._steward.memory_bytes.items()]
        yield _gauges("worker_memory_bytes", "Resident memory of the worker's process.", ("worker",), held)
        yield _gauges("worker_complaint", "1 while its health has a complaint.", ("worker",), ill)

    def _generation_families(self) -> Iterator[Metric]:
        workers = self._generating
        variants = [] if workers is None else list(workers.variants.values())
        states = [
            one.generating.state(f"{one.loadable.manifest.name}:{one.loadable.manifest.version}") for one in variants
        ]
        counts = GeneratedCounts() if workers is None else workers.counts
        yield from generation_families("tidegate_pool", counts, states)

    def _places(self) -> list[Replica | GeneratingReplica]:
        """Where workers live."""
        return [*self._supervisor.slots, *([] if self._generating is None else self._generating.replicas)]

    def _device_families(self) -> Iterator[Metric]:
        devices, lanes = self._scheduler.allotment.devices, list(self._supervisor.lanes.values())
        known = [(name, memory) for name, memory in devices.items() if memory.limit_bytes < inf]
        limits = [((name,), memory.limit_bytes) for name, memory in known]
        yield _gauges("memory_limit_bytes", "What may be used of the device's memory.", ("device",), limits)
        held = [((name,), memory.held_bytes) for name, memory in devices.items()]
        yield _gauges("memory_held_bytes", "Held by its workers' models.", ("device",), held)
        reserved = [((name,), memory.reserved_bytes()) for name, memory in devices.items()]
        yield _gauges("memory_reserved_bytes", "Reserved for batches under way.", ("device",), reserved)
        caps = [((lane.key,), lane.memory.cap.units) for lane in lanes if lane.memory.cap.units < inf]
        yield _gauges("memory_cap_units", "Largest batch since one found no memory.", ("lane",), caps)
        owed = [((group,), owed_s) for group, owed_s in self._scheduler.allotment.owed_s(lanes).items()]
        yield _gauges("share_owed_seconds", "What a share should have had and has not.", ("share",), owed)
        stateful = sorted({lane.manifest.name for lane in lanes if lane.manifest.sequence is not None})
        live = [((model,), float(self._live_sequences(model))) for model in stateful]
        yield _gauges("sequences_live", "Sequences whose state is kept.", ("model",), live)

    def _steward_families(self) -> Iterator[Metric]:
        steward, control = self._steward, self._steward.control
        recycled = [((sign,), float(count)) for sign, count in steward.recycles.items()]
        yield _counters("recycles", "Workers replaced while they were well enough, by sign.", ("reason",), recycled)
        turned = [(key, float(count)) for key, count in steward.turns.items()]
        yield _counters("control_turns", "Knobs turned, by the reading that led to it.", ("knob", "reason"), turned)
        yield _gauge("busy_ratio", "Share of the workers' time spent in batches, at the last look.", steward.busy_ratio)
        yield _gauge("memory_ratio", "Memory in use of what may be used, at the last look.", steward.memory_ratio)
        yield _gauge("batch_cap_ratio", "Of the manifests' largest batch.", control.batch_cap_ratio)
        yield _gauge("workers_held_back", "Workers that may not compute for lack of memory.", control.held_back)
        yield _gauge("degraded", "1 while a lesser precision answers.", float(control.degraded))
        standby = self._scheduler.seats.standby
        yield _gauge("standby_helps", "1 while the reserve takes a share.", float(bool(standby and standby.reason)))

    def __repr__(self) -> str:
        return f"<PoolMetrics of {self._scheduler!r}>"


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, (), [((), value)])


def _gauges(name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    return gauge(f"tidegate_pool_{name}", text, labels, rows)


def _counters(name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    return counter(f"tidegate_pool_{name}", text, labels, rows)
