"""What computes: edges around the real edge queue, pools around the real batcher, and the truth about their speed.

The queues, their predictions and refusals are the very objects that serve (`EdgeQueue`, `Batcher`, `ServiceTime`);
this file does for them what `edge_agent/scheduler.py` and `cloud_pool/scheduler.py` do with asyncio: it takes jobs in,
starts what they release, wakes at the instants they name and sends each answer or refusal back on the stream it came
from. What is simulated is only how long a computation really takes:

    its measured table × the request's own luck (lognormal) × how slow the device is at this moment

A job's luck belongs to the request, so it is equally unlucky wherever it is sent. A computation cannot be
interrupted: what nobody wants any more still takes its time, and is counted as waste.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import exp
from typing import Final, Protocol

from cloud_pool.core.batching import Batcher, Queued
from cloud_pool.core.grouping import Shape, padded_units
from edge_agent.core.admission import EdgeQueue, Ticket
from simulator.events import Alarm, EventQueue
from simulator.links.regime import Stretches, Windows
from simulator.scenario import ModelSpec
from tidegate.estimate.cost_table import CostTable
from tidegate.estimate.service_time import ServiceTime
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.outcome import DeadlineExceeded, ServeError
from tidegate.priority import order_key
from tidegate.types import Accepted, LoadReport

VERSION: Final = "1"
MOVED = 4  # as in `edge_agent/scheduler.py`: the queue has moved by so much since it was last told


class Asker(Protocol):
    """Who a job's answer goes back to: a stream, or nobody for a device's own callers."""

    def accepted(self, job: Job, word: Accepted) -> None: ...
    def answered(self, job: Job, queue_s: float, compute_s: float, load: LoadReport) -> None: ...
    def refused(self, job: Job, error: ServeError, load: LoadReport) -> None: ...


class Job:
    """One request as it stands before a worker: `deadline` is its arrival there and its budget. `id` is below 0 for
    a device's own."""

    __slots__ = (
        "answer_bytes", "arrived_at", "asker", "deadline", "id", "length", "luck", "model", "priority", "rows",
        "settled", "units", "useful_s",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        asker: Asker,
        model: str,
        *,
        rows: int,
        length: int,
        deadline: float,
        priority: int,
        luck: float,
        answer_bytes: int = 0,
    ) -> None:
        self.id = id
        self.asker = asker
        self.model = model
        self.rows = rows
        self.length = length
        self.units = float(rows * length)
        self.deadline = deadline
        self.priority = priority
        self.luck = luck
        self.answer_bytes = answer_bytes
        self.arrived_at = 0.0
        self.settled = False  # answered, refused or given up
        self.useful_s = 0.0  # its share of the compute that made its answer

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.model} {self.rows}x{self.length} due {self.deadline:.3f}>"


class Slowness:
    """How many times slower a device is at an instant than it measured at its warm-up.

    `episodes` draws one factor for each stretch, by the stretch's end, so it does not depend on who looks when.
    """

    def __init__(
        self,
        *,
        thermal: Stretches | None = None,
        factor_of: Callable[[float], float] = lambda _end: 1.0,
        faults: tuple[tuple[Windows, float], ...] = (),
    ) -> None:
        self._thermal = thermal
        self._factor_of = factor_of
        self._faults = faults
        self._episode = (0.0, 1.0)  # (end, factor)

    def at(self, now: float) -> float:
        factor = 1.0
        if self._thermal is not None and (end := self._thermal.until(now)) > now:
            if end != self._episode[0]:
                self._episode = end, self._factor_of(end)
            factor = self._episode[1]
        for windows, times in self._faults:
            if windows.until(now) > now:
                factor *= times
        return factor


class Worker(ABC):
    """What edges and pools have in common: an epoch, load reports, and the compute that they spent."""

    def __init__(
        self, events: EventQueue, id: str, offers: tuple[ModelOffer, ...], slowness: Slowness, standstills: Windows
    ) -> None:
        self.id = id
        self.offers = offers
        self.alive = True
        self.epoch = 1
        self.compute_s = 0.0  # spent for gateways, useful or not
        self.on_moved: Callable[[], None] = lambda: None
        self._events = events
        self._slowness = slowness
        self._standstills = standstills
        self._sequence = 0
        self._told_queued = 0

    def standing_until(self, now: float) -> float:
        """When a stopped process goes on; `now` for one that is not stopped."""
        return self._standstills.until(now)

    def load_report(self, now: float) -> LoadReport:
        self._sequence += 1
        return LoadReport(self.epoch, self._sequence, self.queued, self.in_flight, self.queue_delay_s(now))

    def crash(self) -> None:
        """The process is gone with all its jobs; those who wait hear of it from their streams."""
        self.alive = False

    def restart(self) -> None:
        self.alive = True
        self.epoch += 1
        self._sequence = 0

    @property
    @abstractmethod
    def queued(self) -> int: ...
    @property
    @abstractmethod
    def in_flight(self) -> int: ...
    @abstractmethod
    def queue_delay_s(self, now: float) -> float: ...
    @abstractmethod
    def take(self, job: Job, now: float) -> None:
        """A request has arrived; it will be settled by exactly one answer or refusal, or by `give_up`."""

    @abstractmethod
    def give_up(self, job: Job, now: float) -> None:
        """Nobody waits for this job any more."""

    def _ends_at(self, starts_at: float, seconds: float) -> float:
        """When a computation of so many seconds ends, standstills included."""
        at, left_s = starts_at, seconds
        for start, end in self._standstills.after(starts_at):
            if start >= at + left_s:
                break
            left_s -= max(0.0, start - at)
            at = end
        return at + left_s

    def _refuse(self, job: Job, error: ServeError, now: float) -> None:
        if not job.settled:
            job.settled = True
            job.asker.refused(job, error, self.load_report(now))

    def _moved(self) -> None:
        if abs(self.queued - self._told_queued) >= MOVED:
            self._told_queued = self.queued
            self.on_moved()


def offers_of(models: Mapping[str, ModelSpec], tier: str, slow: float) -> tuple[ModelOffer, ...]:
    """What a worker of this tier offers: each model that runs there, with the table that it measured."""
    offers = []
    for name, model in models.items():
        points = model.edge_ms if tier == "edge" else model.pool_ms
        if points is None:
            continue
        cost = tuple((units, slow * ms / 1e3) for units, ms in points)
        variant = (
            VariantOffer("int8", "int8", cost, model.max_batch, model.edge_max_units, model.edge_quality)
            if tier == "edge"
            else VariantOffer("fp32", "fp32", cost, None, None, model.pool_quality)
        )
        offers.append(ModelOffer(name, VERSION, (variant,)))
    return tuple(offers)


class _Served:
    """One model on one worker: what it believes its calls take, and what they really take."""

    __slots__ = ("believed", "sigma", "true")

    def __init__(self, offer: ModelOffer, sigma: float) -> None:
        points = offer.variants[0].cost
        self.believed = ServiceTime(points)
        self.true = CostTable(points)
        self.sigma = sigma

    def takes_s(self, units: float, luck: float) -> float:
        return self.true.seconds_for(units) * exp(self.sigma * luck)


class EdgeWorker(Worker):
    """A device: one computation at a time, in the order of the real edge queue."""

    def __init__(
        self,
        events: EventQueue,
        id: str,
        offers: tuple[ModelOffer, ...],
        *,
        max_queue: int,
        sigma: float,
        slowness: Slowness,
        standstills: Windows,
    ) -> None:
        super().__init__(events, id, offers, slowness, standstills)
        self._sigma = sigma
        self._max_queue = max_queue
        self._start()

    def _start(self) -> None:
        self._served = {offer.name: _Served(offer, self._sigma) for offer in self.offers}
        self._queue = EdgeQueue(max_size=self._max_queue)
        self._jobs: dict[int, Job] = {}  # waiting or computing, by ticket
        self._tickets = 0
        self._ticket_of: dict[Job, int] = {}
        self._alarm = Alarm(self._events, self._tick)

    def crash(self) -> None:
        super().crash()
        self._start()

    @property
    def queued(self) -> int:
        return self._queue.queued

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    def queue_delay_s(self, now: float) -> float:
        return self._queue.queue_delay_s(now)

    def take(self, job: Job, now: float) -> None:
        job.arrived_at = now
        self._tickets += 1
        ticket = Ticket(
            self._tickets, job.model, job.deadline, self._served[job.model].believed.predict_s(job.units), job.priority
        )
        try:
            word = self._queue.admit(ticket, now)
        except ServeError as error:
            self._refuse(job, error, now)
            return
        self._jobs[ticket.id] = job
        self._ticket_of[job] = ticket.id
        job.asker.accepted(job, word)
        self._pump(now)

    def give_up(self, job: Job, now: float) -> None:
        job.settled = True
        ticket_id = self._ticket_of.get(job)
        if ticket_id is not None and self._queue.remove(ticket_id):
            self._forget(ticket_id)

    def _pump(self, now: float) -> None:
        for ticket in self._queue.expire(now):
            self._refuse(self._forget(ticket.id), DeadlineExceeded("could not be done in time after waiting"), now)
        while (taken := self._queue.take(now)) is not None:
            job = self._jobs[taken.id]
            served = self._served[job.model]
            seconds = served.takes_s(job.units, job.luck) * self._slowness.at(now)
            ends_at = self._ends_at(now, seconds)
            self._events.schedule(ends_at, self._done, self.epoch, taken.id, now)
            if ends_at > job.deadline:
                self._events.schedule(job.deadline, self._out_of_time, self.epoch, job)
        self._arm()
        self._moved()

    def _done(self, epoch: int, ticket_id: int, began_at: float) -> None:
        if epoch != self.epoch or not self.alive:
            return
        now = self._events.now
        self._queue.finish(ticket_id)
        job = self._forget(ticket_id)
        seconds = now - began_at
        if job.id >= 0:
            self.compute_s += seconds
        self._served[job.model].believed.record(job.units, seconds)
        if not job.settled:
            job.settled = True
            job.useful_s = seconds
            job.asker.answered(job, began_at - job.arrived_at, seconds, self.load_report(now))
        self._pump(now)

    def _out_of_time(self, epoch: int, job: Job) -> None:
        """The deadline came during the computation: the caller hears it now, the slot stays taken until the end."""
        if epoch == self.epoch and self.alive:
            self._refuse(job, DeadlineExceeded("ran out of time while it was being computed"), self._events.now)

    def _forget(self, ticket_id: int) -> Job:
        job = self._jobs.pop(ticket_id)
        del self._ticket_of[job]
        return job

    def _arm(self) -> None:
        self._alarm.set(self._queue.next_wake(), self.epoch)

    def _tick(self, epoch: int) -> None:
        if epoch == self.epoch and self.alive:
            self._pump(self._events.now)

    def __repr__(self) -> str:
        return f"<EdgeWorker {self.id} {'alive' if self.alive else 'gone'} {self._queue!r}>"


class _Batch:
    __slots__ = ("began_at", "expected_end_at", "jobs", "model", "units")

    def __init__(self, model: str, jobs: list[Job], units: float, began_at: float, expected_end_at: float) -> None:
        self.model = model
        self.jobs = jobs
        self.units = units
        self.began_at = began_at
        self.expected_end_at = expected_end_at


class _Lane:
    """One model in a pool: its batcher and who waits in it."""

    __slots__ = ("batcher", "served")

    def __init__(self, offer: ModelOffer, spec: ModelSpec, sigma: float) -> None:
        self.served = _Served(offer, sigma)
        self.batcher = Batcher(self.served.believed.predict_s, max_rows=spec.max_batch, max_queue_size=spec.max_queue)


class PoolWorker(Worker):
    """A pool with one device: one batch at a time, chosen by the real batcher."""

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
    ) -> None:
        """Args: luck: a standard normal for each batch."""
        super().__init__(events, id, offers, slowness, standstills)
        self._models = models
        self._sigma = sigma
        self._luck = luck
        self._start()

    def _start(self) -> None:
        self._lanes = {offer.name: _Lane(offer, self._models[offer.name], self._sigma) for offer in self.offers}
        self._jobs: dict[int, Job] = {}  # waiting, by number
        self._number_of: dict[Job, int] = {}
        self._numbers = 0
        self._running: _Batch | None = None
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
        return self._busy_s(now) + sum(lane.batcher.drain_s() for lane in self._lanes.values())

    def take(self, job: Job, now: float) -> None:
        job.arrived_at = now
        lane = self._lanes[job.model]
        self._numbers += 1
        queued = Queued(
            self._numbers, now, job.deadline, Shape(job.rows, job.length, job.units), job.model, job.priority
        )
        try:
            lane.batcher.add([queued], now)
        except ServeError as error:
            self._refuse(job, error, now)
            return
        self._jobs[queued.id] = job
        self._number_of[job] = queued.id
        self._accept(job, lane, now)
        self._pump(now)

    def give_up(self, job: Job, now: float) -> None:
        job.settled = True
        number = self._number_of.pop(job, None)
        if number is not None:
            del self._jobs[number]
            self._lanes[job.model].batcher.remove([number])

    def _accept(self, job: Job, lane: _Lane, now: float) -> None:
        key = order_key(job.deadline, job.priority)
        ahead = [one.batcher.ahead(key) for one in self._lanes.values()]
        own_s = lane.served.believed.predict_s(job.units)
        finish_in_s = self._busy_s(now) + sum(seconds for _, seconds in ahead) + own_s
        job.asker.accepted(job, Accepted(self.in_flight + sum(count for count, _ in ahead), finish_in_s))

    def _busy_s(self, now: float) -> float:
        return max(0.0, self._running.expected_end_at - now) if self._running else 0.0

    def _pump(self, now: float) -> None:
        for lane in self._lanes.values():
            for item in lane.batcher.expire(now):
                self._refuse(self._forget(item.id), DeadlineExceeded("no time is left for it"), now)
        if self._running is None:
            lanes = self._lanes.items()
            if len(self._lanes) > 1:
                lanes = sorted(lanes, key=lambda one: one[1].batcher.head_key)  # type: ignore[assignment]
            for model, lane in lanes:
                if items := lane.batcher.release(now):
                    self._run(model, lane, items, now)
                    break
        self._arm(now)

    def _run(self, model: str, lane: _Lane, items: list[Queued], now: float) -> None:
        units = padded_units([item.shape for item in items])
        jobs = [self._forget(item.id) for item in items]
        self._running = _Batch(model, jobs, units, now, now + lane.served.believed.predict_s(units))
        # The members' own luck is of no account in a batch: every row is computed at the length of the longest.
        seconds = lane.served.takes_s(units, self._luck()) * self._slowness.at(now)
        self._events.schedule(self._ends_at(now, seconds), self._done, self.epoch)

    def _done(self, epoch: int) -> None:
        if epoch != self.epoch or not self.alive:
            return
        now, batch = self._events.now, self._running
        assert batch is not None
        self._running = None
        seconds = now - batch.began_at
        self.compute_s += seconds
        self._lanes[batch.model].served.believed.record(batch.units, seconds)
        all_units = sum(job.units for job in batch.jobs)
        for job in batch.jobs:
            if not job.settled:
                job.settled = True
                job.useful_s = seconds * job.units / all_units
                job.asker.answered(job, batch.began_at - job.arrived_at, seconds, self.load_report(now))
        self._pump(now)

    def _forget(self, number: int) -> Job:
        job = self._jobs.pop(number)
        del self._number_of[job]
        return job

    def _arm(self, now: float) -> None:
        free = self._running is None
        wakes = [lane.batcher.next_wake(now, worker_free=free) for lane in self._lanes.values()]
        self._alarm.set(min((wake for wake in wakes if wake is not None), default=None), self.epoch)

    def _tick(self, epoch: int) -> None:
        if epoch == self.epoch and self.alive:
            self._pump(self._events.now)

    def __repr__(self) -> str:
        return f"<PoolWorker {self.id} {'alive' if self.alive else 'gone'}, {self.queued} waiting>"
