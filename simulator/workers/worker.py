"""The common part of edges and pools: an epoch, load reports, offers, and how long a call really takes.

What is simulated is only that last one:

    its measured table (or `takes_ms`) × luck (lognormal) × how slow the device is at this moment

On an edge the luck belongs to the request, so it is equally unlucky wherever it is sent. A computation cannot be
interrupted: what has been cancelled still takes its time, and is counted as waste.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import exp
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from simulator.event_queue import EventQueue
from simulator.scenarios.scenario import EdgeGroup, ModelSpec, Scenario
from simulator.workers.job import VERSION, ForeseenEnd, SimulatedJob
from simulator.workers.slowness import Slowness
from tidegate.estimate.cost_table import CostTable
from tidegate.estimate.service_time import ServiceTime
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.netsim.links.regime import Windows
from tidegate.outcome import ServeError
from tidegate.types import LoadReport

Takes = Mapping[str, tuple[tuple[float, float], ...]]  # by model: (work units, milliseconds), `slow` included
NO_TAKES: Final[Takes] = MappingProxyType({})

FAILS_IN_S: Final = 0.001
MOVED: Final = 4  # as in `edge_agent/serving/scheduler.py`: the queue has moved by so much since it was last reported


class SimulatedWorker(ABC):
    """What edges and pools have in common: an epoch, load reports, and the compute that they spent."""

    def __init__(
        self, events: EventQueue, id: str, offers: tuple[ModelOffer, ...], slowness: Slowness, standstills: Windows
    ) -> None:
        self.id = id
        self.offers = offers
        self.alive = True
        self.epoch = 1
        self.compute_s = 0.0  # spent for gateways, useful or not
        self._on_moved: Callable[[], None] = lambda: None
        self.trouble: Callable[[float], ServeError | None] = lambda _now: None  # its error for all
        self._events = events
        self._slowness = slowness
        self._standstills = standstills
        self._sequence = 0
        self._reported_queued = 0

    def notify_moves(self, on_moved: Callable[[], None]) -> None:
        """Call `on_moved` whenever the queue has moved far since it was last reported."""
        self._on_moved = on_moved

    def standing_until(self, now: float) -> float:
        """When a stopped process goes on; `now` for one that is not stopped."""
        return self._standstills.until(now)

    def load_report(self, now: float) -> LoadReport:
        self._sequence += 1
        return LoadReport(self.epoch, self._sequence, self.queued, self.in_flight, self.queue_delay_s(now))

    def news(self, now: float) -> tuple[ModelOffer, ...] | None:
        """The offers, if they changed since they were last told; those of a device or a pool never do."""
        return None

    def crash(self) -> None:
        """The process is gone with all its jobs; callers that wait learn of it from their streams."""
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
    def receive(self, job: SimulatedJob, now: float) -> None:
        """A request has arrived: it is taken, or refused at once where there is trouble, which takes no compute."""
        error = self.trouble(now)
        if error is None:
            self.take(job, now)
        else:
            job.arrived_at = now
            self._events.schedule(now + FAILS_IN_S, self._refuse, job, error, now + FAILS_IN_S)

    @abstractmethod
    def take(self, job: SimulatedJob, now: float) -> None:
        """A request has arrived; it will be settled by exactly one answer or refusal, or by `give_up`."""

    @abstractmethod
    def give_up(self, job: SimulatedJob, now: float) -> None:
        """The caller has cancelled this job."""

    @abstractmethod
    def foreseen(self, coming: Sequence[tuple[float, SimulatedJob]], now: float) -> dict[SimulatedJob, ForeseenEnd]:
        """When every job here, and each job that will arrive, will truly be done if nothing else comes; without
        jobs that would be dropped. No gateway may see this; an oracle does."""

    def _ends_at(self, starts_at: float, seconds: float) -> float:
        """When a computation of so many seconds ends, standstills included."""
        at, left_s = starts_at, seconds
        for start, end in self._standstills.after(starts_at):
            if start >= at + left_s:
                break
            left_s -= max(0.0, start - at)
            at = end
        return at + left_s

    def _refuse(self, job: SimulatedJob, error: ServeError, now: float) -> None:
        if not job.settled:
            job.settled = True
            job.asker.refused(job, error, self.load_report(now))

    def _moved(self) -> None:
        if abs(self.queued - self._reported_queued) >= MOVED:
            self._reported_queued = self.queued
            self._on_moved()


class TrueCost:
    """What one model's calls really take on one worker."""

    __slots__ = ("sigma", "table")

    def __init__(self, table: CostTable, sigma: float) -> None:
        self.table = table
        self.sigma = sigma

    def takes_s(self, units: float, luck: float) -> float:
        return self.table.seconds_for(units) * exp(self.sigma * luck)


class BelievedCost(TrueCost):
    """The true cost, and what the worker believes."""

    __slots__ = ("believed",)

    def __init__(self, offer: ModelOffer, table: CostTable, sigma: float) -> None:
        super().__init__(table, sigma)
        self.believed = ServiceTime(offer.variants[0].cost)


def true_table(offer: ModelOffer, takes_ms: Takes) -> CostTable:
    """What calls really take: the offer's own table, but where the scenario knows better."""
    better = takes_ms.get(offer.name)
    return CostTable(offer.variants[0].cost if better is None else [(units, ms / 1e3) for units, ms in better])


def edge_offers(scenario: Scenario, group: EdgeGroup, number: int) -> tuple[ModelOffer, ...]:
    """What the device of this number in its group offers."""
    models = {
        name: replace(model, edge_ms=group.edge_ms.get(name, model.edge_ms))
        for name, model in scenario.models.items()
        if group.models is None or name in group.models
    }
    return offers_of(models, "edge", group.slow_of(number))


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
