"""A simulated site: a gateway with its devices, as one worker at the end of an upstream gateway's stream.

The gateway behind it is a `SimulatedGateway` as any other: the same fleet view, placement and request machine. Its
summary is the real one (`gateway/core/fleet/site_summary.py`), told with each heartbeat as the real link tells it.
Callers of its own come straight to the gateway, and are tallied there.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.core.admission.admission import AdmissionRequest
from gateway.core.fleet.site_summary import SiteSummary
from gateway.core.request.machine import Answer, Refuse
from simulator.event_queue import EventQueue
from simulator.workers.job import ForeseenEnd, SimulatedJob
from simulator.workers.slowness import Slowness
from simulator.workers.worker import SimulatedWorker
from simulator.world.arrivals import SimulatedRequest
from simulator.world.gateway import SimulatedExecution, SimulatedGateway
from tidegate.fleet.offers import ModelOffer
from tidegate.netsim.links.regime import Windows
from tidegate.types import Accepted, LoadReport


class SimulatedSite(SimulatedWorker):
    """Mutable: `take` jobs of upstream gateways."""

    def __init__(self, events: EventQueue, id: str, gateway: SimulatedGateway) -> None:
        super().__init__(events, id, (), Slowness(), Windows([]))
        self.gateway = gateway
        self.summaries = 0  # that were told, to all upstream gateways together
        self._under_way: dict[SimulatedJob, SimulatedExecution] = {}
        self._summary = SiteSummary(gateway.fleet, self.epoch, lambda: gateway.router.door.in_flight)

    @property
    def queued(self) -> int:
        return 0

    @property
    def in_flight(self) -> int:
        return self.gateway.router.door.in_flight

    def queue_delay_s(self, now: float) -> float:
        return self._summary.load(now).queue_delay_s

    def load_report(self, now: float) -> LoadReport:
        return self._summary.load(now)

    def news(self, now: float) -> tuple[ModelOffer, ...] | None:
        self.summaries += 1
        offers = self._summary.offers(now)
        if offers == self.offers:
            return None
        self.offers = offers
        return offers

    def take(self, job: SimulatedJob, now: float) -> None:
        job.arrived_at = now
        asked = job.request
        assert isinstance(asked, SimulatedRequest)  # as of each job of a gateway
        kind = replace(asked.kind, budget_ms=1e3 * max(0.0, job.deadline - now), retries=0)
        request = asked._replace(kind=kind, at=now)
        door = self.gateway.router.door
        refusal = door.enter(AdmissionRequest(kind.tenant, kind.priority, lambda: request.number), now)
        if refusal is not None:
            self._refuse(job, refusal, now)
            return
        execution = SimulatedExecution(self.gateway, request, _Upstream(self, job))
        self._under_way[job] = execution
        execution.start()  # which may end it at once

    def give_up(self, job: SimulatedJob, now: float) -> None:
        job.settled = True
        execution = self._under_way.pop(job, None)
        if execution is not None:
            execution.cancel(now)

    def foreseen(self, coming: Sequence[tuple[float, SimulatedJob]], now: float) -> dict[SimulatedJob, ForeseenEnd]:
        raise NotImplementedError("an oracle sees devices, not sites")

    def ended(self, job: SimulatedJob, end: Answer | Refuse, inner: SimulatedJob | None, now: float) -> None:
        """The request of a job is over."""
        self._under_way.pop(job, None)
        if job.settled:
            return
        if isinstance(end, Refuse) or inner is None:
            assert isinstance(end, Refuse)
            self._refuse(job, end.error, now)
            return
        job.settled, job.useful_s = True, inner.useful_s
        # As `gateway/layers/from_gateway.py`: all but the queue is compute, the way to the device included.
        compute_s = now - job.arrived_at - inner.queue_s
        job.asker.answered(job, inner.queue_s, compute_s, self.load_report(now))

    def __repr__(self) -> str:
        return f"<SimulatedSite {self.id} {len(self._under_way)} under way, {self.gateway!r}>"


class _Upstream:
    """The caller of a request in a site: the job of an upstream gateway."""

    def __init__(self, site: SimulatedSite, job: SimulatedJob) -> None:
        self._job = job
        self._site = site

    def accepted(self, word: Accepted) -> None:
        self._job.asker.accepted(self._job, word)

    def ended(self, end: Answer | Refuse, inner: SimulatedJob | None, now: float) -> None:
        self._site.ended(self._job, end, inner, now)

    def __repr__(self) -> str:
        return f"<_Upstream of {self._job!r}>"
