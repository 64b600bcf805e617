"""A simulated pool with one device: one batch at a time, chosen by the real batcher, one batcher a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from cloud_pool.core.batching.batcher import Batcher
from cloud_pool.core.batching.grouping import WorkShape, padded_shape
from cloud_pool.core.batching.latency_model import LatencyModel
from cloud_pool.core.batching.queue_item import QueueItem
from simulator.event_queue import Alarm, EventQueue
from simulator.scenarios.scenario import ModelSpec
from simulator.workers.job import ForeseenEnd, SimulatedJob
from simulator.workers.slowness import Slowness
from simulator.workers.worker import NO_TAKES, SimulatedWorker, Takes, TrueCost, true_table
from tidegate.fleet.offers import ModelOffer
from tidegate.netsim.links.regime import Windows
from tidegate.outcome import DeadlineExceeded, ServeError
from tidegate.priority import order_key
from tidegate.types import Accepted


class _RunningBatch:
    __slots__ = ("began_at", "expected_end_at", "jobs", "model", "shape")

    def __init__(
        self, model: str, jobs: list[SimulatedJob], shape: WorkShape, began_at: float, expected_end_at: float
    ) -> None:
        self.model = model
        self.jobs = jobs
        self.shape = shape
        self.began_at = began_at
        self.expected_end_at = expected_end_at


class _PoolInstance:
    """One model in a pool: its batcher with the requests that wait in it."""

    __slots__ = ("_spec", "batcher", "believed", "true")

    def __init__(self, offer: ModelOffer, spec: ModelSpec, true: TrueCost) -> None:
        self.true = true
        self.believed = LatencyModel(offer.variants[0].cost)
        self._spec = spec
        self.batcher = self.another()

    def another(self) -> Batcher:
        """An empty batcher like this instance's."""
        return Batcher(self.believed, max_rows=self._spec.max_batch, max_queue_size=self._spec.max_queue)


class PoolWorker(SimulatedWorker):
    """Mutable: `take` jobs, `give_up` what is cancelled, `crash` and `restart`."""

    def __init__(
        self,
        events: EventQueue,
        id: str,
        offers: tuple[ModelOffer, ...],
        models: Mapping[str, ModelSpec],
        *,
        sigma: float,
        slowness: Slowness,
        standstills: Windows,
        luck: Callable[[], float],
        takes_ms: Takes = NO_TAKES,
    ) -> None:
        """Args: luck: a standard normal for each batch."""
        super().__init__(events, id, offers, slowness, standstills)
        self._models = models
        self._sigma = sigma
        self._takes_ms = takes_ms
        self._luck = luck
        self._start()

    def _start(self) -> None:
        self._instances = {
            offer.name: _PoolInstance(
                offer, self._models[offer.name], TrueCost(true_table(offer, self._takes_ms), self._sigma)
            )
            for offer in self.offers
        }
        self._jobs: dict[int, SimulatedJob] = {}  # waiting, by number
        self._number_of: dict[SimulatedJob, int] = {}
        self._numbers = 0
        self._running: _RunningBatch | None = None
        self._busy_until = 0.0  # truly
        self._alarm = Alarm(self._events, self._tick)

    def crash(self) -> None:
        super().crash()
        self._start()

    @property
    def queued(self) -> int:
        return len(self._jobs)

    @property
    def in_flight(self) -> int:
        return len(self._running.jobs) if self._running else 0

    def queue_delay_s(self, now: float) -> float:
        return self._busy_s(now) + sum(lane.batcher.drain_s() for lane in self._instances.values())

    def take(self, job: SimulatedJob, now: float) -> None:
        job.arrived_at = now
        lane = self._instances[job.model]
        self._numbers += 1
        queued = _queued(self._numbers, job, now)
        try:
            lane.batcher.add([queued], now)
        except ServeError as error:
            self._refuse(job, error, now)
            return
        self._jobs[queued.id] = job
        self._number_of[job] = queued.id
        self._accept(job, lane, now)
        self._pump(now)

    def give_up(self, job: SimulatedJob, now: float) -> None:
        job.settled = True
        number = self._number_of.pop(job, None)
        if number is not None:
            del self._jobs[number]
            self._instances[job.model].batcher.remove([number])

    def foreseen(self, coming: Sequence[tuple[float, SimulatedJob]], now: float) -> dict[SimulatedJob, ForeseenEnd]:
        twins = {model: lane.another() for model, lane in self._instances.items()}
        jobs = dict(self._jobs)
        for model, lane in self._instances.items():
            _put(twins[model], lane.batcher.waiting(), now)
        coming = sorted(coming, key=lambda one: one[0])
        at = max(now, self._busy_until)
        ends: dict[SimulatedJob, ForeseenEnd] = {}
        while coming or any(twins.values()):
            if not any(twins.values()):
                at = max(at, coming[0][0])
            while coming and coming[0][0] <= at:
                arrives_at, job = coming.pop(0)
                jobs[-len(jobs) - 1] = job
                _put(twins[job.model], [_queued(-len(jobs), job, arrives_at)], arrives_at)
            for model, twin in sorted(twins.items(), key=lambda one: one[1].head_key):
                twin.expire(at)
                if items := twin.release(at):
                    units = padded_shape([item.shape for item in items]).units
                    at = self._ends_at(at, self._instances[model].true.takes_s(units, 0.0) * self._slowness.at(at))
                    ends |= {jobs[item.id]: ForeseenEnd(at) for item in items}
                    break
        return ends

    def _accept(self, job: SimulatedJob, lane: _PoolInstance, now: float) -> None:
        key = order_key(job.deadline, job.priority)
        ahead = [one.batcher.ahead(key) for one in self._instances.values()]
        own_s = lane.believed.predict_s(job.units, job.length)
        finish_in_s = self._busy_s(now) + sum(seconds for _, seconds in ahead) + own_s
        job.asker.accepted(job, Accepted(self.in_flight + sum(count for count, _ in ahead), finish_in_s))

    def _busy_s(self, now: float) -> float:
        return max(0.0, self._running.expected_end_at - now) if self._running else 0.0

    def _pump(self, now: float) -> None:
        for lane in self._instances.values():
            for item in lane.batcher.expire(now):
                self._refuse(self._forget(item.id), DeadlineExceeded("no time is left for it"), now)
        if self._running is None:
            lanes = self._instances.items()
            if len(self._instances) > 1:
                lanes = sorted(lanes, key=lambda one: one[1].batcher.head_key)  # type: ignore[assignment]
            for model, lane in lanes:
                if items := lane.batcher.release(now):
                    self._run(model, lane, items, now)
                    break
        self._arm(now)

    def _run(self, model: str, lane: _PoolInstance, items: list[QueueItem], now: float) -> None:
        shape = padded_shape([item.shape for item in items])
        jobs = [self._forget(item.id) for item in items]
        self._running = _RunningBatch(model, jobs, shape, now, now + lane.believed.predict_s(shape.units, shape.length))
        # The members' own luck is of no account in a batch: every row is computed at the length of the longest.
        seconds = lane.true.takes_s(shape.units, self._luck()) * self._slowness.at(now)
        self._busy_until = self._ends_at(now, seconds)
        self._events.schedule(self._busy_until, self._done, self.epoch)

    def _done(self, epoch: int) -> None:
        if epoch != self.epoch or not self.alive:
            return
        now, batch = self._events.now, self._running
        assert batch is not None
        self._running = None
        seconds = now - batch.began_at
        self.compute_s += seconds
        lane = self._instances[batch.model]
        lane.believed.record(batch.shape.units, batch.shape.length, seconds)
        lane.batcher.took(seconds)
        all_units = sum(job.units for job in batch.jobs)
        for job in batch.jobs:
            if not job.settled:
                job.settled = True
                job.useful_s = seconds * job.units / all_units
                job.asker.answered(job, batch.began_at - job.arrived_at, seconds, self.load_report(now))
        self._pump(now)

    def _forget(self, number: int) -> SimulatedJob:
        job = self._jobs.pop(number)
        del self._number_of[job]
        return job

    def _arm(self, now: float) -> None:
        free = self._running is None
        wakes = [lane.batcher.next_wake(now, worker_free=free) for lane in self._instances.values()]
        self._alarm.set(min((wake for wake in wakes if wake is not None), default=None), self.epoch)

    def _tick(self, epoch: int) -> None:
        if epoch == self.epoch and self.alive:
            self._pump(self._events.now)

    def __repr__(self) -> str:
        return f"<PoolWorker {self.id} {'alive' if self.alive else 'gone'}, {self.queued} waiting>"


def _queued(number: int, job: SimulatedJob, now: float) -> QueueItem:
    return QueueItem(number, now, job.deadline, WorkShape(job.rows, job.length, job.units), job.model, job.priority)


def _put(batcher: Batcher, items: Sequence[QueueItem], now: float) -> None:
    """Queue what is not infeasible."""
    for item in items:
        with suppress(ServeError):
            batcher.add([item], now, readmit=True)
