"""A simulated device: one computation at a time, in the order of the real edge queue."""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.core.edge_queue import OPTIMISM, EdgeQueue, QueueTicket
from simulator.event_queue import Alarm, EventQueue
from simulator.workers.job import ForeseenEnd, SimulatedJob
from simulator.workers.slowness import Slowness
from simulator.workers.worker import NO_TAKES, BelievedCost, SimulatedWorker, Takes, true_table
from tidegate.fleet.offers import ModelOffer
from tidegate.netsim.links.regime import Windows
from tidegate.outcome import DeadlineExceeded, ServeError
from tidegate.priority import order_key


class EdgeWorker(SimulatedWorker):
    """Mutable: `take` jobs, `give_up` what is cancelled, `crash` and `restart`."""

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
        takes_ms: Takes = NO_TAKES,
    ) -> None:
        super().__init__(events, id, offers, slowness, standstills)
        self._sigma = sigma
        self._takes_ms = takes_ms
        self._max_queue = max_queue
        self._start()

    def _start(self) -> None:
        self._served = {
            offer.name: BelievedCost(offer, true_table(offer, self._takes_ms), self._sigma) for offer in self.offers
        }
        self._queue = EdgeQueue(max_size=self._max_queue)
        self._jobs: dict[int, SimulatedJob] = {}  # waiting or computing, by ticket
        self._tickets = 0
        self._ticket_of: dict[SimulatedJob, int] = {}
        self._alarm = Alarm(self._events, self._tick)
        self._computing = -1  # the ticket in the slot, and ...
        self._busy_until = 0.0  # ... when it will truly be done

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

    def take(self, job: SimulatedJob, now: float) -> None:
        job.arrived_at = now
        self._tickets += 1
        ticket = QueueTicket(
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

    def give_up(self, job: SimulatedJob, now: float) -> None:
        job.settled = True
        ticket_id = self._ticket_of.get(job)
        if ticket_id is not None and self._queue.remove(ticket_id):
            self._forget(ticket_id)

    def foreseen(self, coming: Sequence[tuple[float, SimulatedJob]], now: float) -> dict[SimulatedJob, ForeseenEnd]:
        free_at = max(now, self._busy_until)
        waiting = [job for job in self._jobs.values() if not job.settled and self._ticket_of[job] != self._computing]
        coming = sorted(coming, key=_instant)
        ends: dict[SimulatedJob, ForeseenEnd] = {}
        while waiting or coming:
            while coming and (coming[0][0] <= free_at or not waiting):
                free_at = max(free_at, coming[0][0])
                waiting.append(coming.pop(0)[1])
            job = min(waiting, key=_order)
            waiting.remove(job)
            seconds = self._takes_s(job, free_at)
            if free_at < job.deadline - OPTIMISM * seconds:
                free_at = self._ends_at(free_at, seconds)
                ends[job] = ForeseenEnd(free_at)
        return ends

    def _takes_s(self, job: SimulatedJob, now: float) -> float:
        return self._served[job.model].takes_s(job.units, job.luck) * self._slowness.at(now)

    def _pump(self, now: float) -> None:
        for ticket in self._queue.expire(now):
            self._refuse(self._forget(ticket.id), DeadlineExceeded("could not be done in time after waiting"), now)
        while (taken := self._queue.take(now)) is not None:
            job = self._jobs[taken.id]
            ends_at = self._ends_at(now, self._takes_s(job, now))
            self._computing, self._busy_until = taken.id, ends_at
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

    def _out_of_time(self, epoch: int, job: SimulatedJob) -> None:
        """The deadline came during the computation: the caller is refused now, the device stays busy until the end."""
        if epoch == self.epoch and self.alive:
            self._refuse(job, DeadlineExceeded("ran out of time while it was being computed"), self._events.now)

    def _forget(self, ticket_id: int) -> SimulatedJob:
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


def _instant(one: tuple[float, SimulatedJob]) -> float:
    return one[0]


def _order(job: SimulatedJob) -> float:
    return order_key(job.deadline, job.priority)
