"""A simulated request that is cut between layers: the real choice, and two executions one after the other.

The choice is `gateway/core/placement/layer_split.py`, over the simulated fleet's view, as in service; each half is a
`SimulatedExecution` of its own, with the real request machine, over the simulated links and queues. As in service a
lost half is followed by the whole in the time that is left, and both halves have the one place that admission gave.

Simplified: a silent tail is not insured at an edge (`gateway/serving/split_execution.py`), so that a cut fares here no
better than there. Policies without a placer of ours, the baselines, do not cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gateway.core.placement.ask import Ask
from gateway.core.placement.layer_split import CutTerms, SplitOption, choose_split, head_deadline
from gateway.core.request.machine import Answer, Refuse
from simulator.scenarios.scenario import ModelSpec
from simulator.workers.job import VERSION, SimulatedJob
from simulator.world.arrivals import SimulatedRequest
from simulator.world.gateway import SimulatedExecution, SimulatedGateway
from simulator.world.tally import RequestEnd
from tidegate.outcome import Outcome
from tidegate.types import Accepted


def execute_cut(models: Mapping[str, ModelSpec], gateway: SimulatedGateway, request: SimulatedRequest) -> None:
    """Begin a request that was let in: in halves where that is better, else as one."""
    kind, now, placer = request.kind, gateway.events.now, gateway.router.placer
    cuts = models[kind.model].cuts
    if placer is None or not cuts:
        SimulatedExecution(gateway, request).start()
        return
    ask = Ask(
        kind.model,
        VERSION,
        request.units,
        kind.rows,
        request.length,
        now + kind.budget_ms / 1e3,
        priority=kind.priority,
        body_bytes=int(request.units * kind.bytes_per_unit),
        weight=gateway.router.door.weight_of(kind.tenant),
        tenant=kind.tenant,
    )
    terms = [
        CutTerms(
            one.layer, one.head, one.tail, request.units, int(request.units * one.bytes_per_unit), keeps_input=True
        )
        for one in cuts
    ]
    chosen = choose_split(placer, ask, terms, now).chosen
    if chosen is None:
        SimulatedExecution(gateway, request).start()
        return
    _SplitRequest(gateway, request, ask, chosen).start()


class _SplitRequest:
    """One request in halves. Mutable: `start` once; it is the caller of both executions."""

    def __init__(self, gateway: SimulatedGateway, request: SimulatedRequest, ask: Ask, option: SplitOption) -> None:
        self._gateway = gateway
        self._request = request
        self._ask = ask
        self._option = option
        self._began_at = gateway.events.now
        self._is_tail = False
        self._head_s = 0.0  # of compute that the head's answer took

    def start(self) -> None:
        cut, now = self._option.cut, self._gateway.events.now
        self._begin(cut.head, head_deadline(self._option, self._ask, now), answer_bytes=cut.between_bytes)

    def _begin(self, model: str, deadline: float, **changes: float) -> None:
        now = self._gateway.events.now
        kind = replace(self._request.kind, model=model, budget_ms=1e3 * (deadline - now), retries=0, **changes)
        SimulatedExecution(self._gateway, self._request._replace(kind=kind), self, is_half=True).start()

    # RequestCaller

    def accepted(self, word: Accepted) -> None: ...

    def ended(self, end: Answer | Refuse, job: SimulatedJob | None, now: float) -> None:
        if isinstance(end, Refuse) or job is None:
            self._whole(now)
        elif self._is_tail:
            self._finish(end, job, now)
        else:
            self._is_tail, self._head_s = True, job.useful_s
            cut, units = self._option.cut, max(1.0, self._request.units)
            self._begin(cut.tail, self._ask.deadline, bytes_per_unit=cut.between_bytes / units)

    def _whole(self, now: float) -> None:
        """A half is lost: the whole, in the time that is left. It counts as the request, with its place."""
        left_s = self._ask.deadline - now
        kind = replace(self._request.kind, budget_ms=1e3 * max(left_s, 1e-4))
        SimulatedExecution(self._gateway, self._request._replace(kind=kind)).start()

    def _finish(self, end: Answer, job: SimulatedJob, now: float) -> None:
        gateway, request = self._gateway, self._request
        gateway.router.door.leave(request.kind.tenant, now - self._began_at)
        tally, kind = gateway.tally, request.kind
        in_time = now <= self._ask.deadline
        if request.at >= tally.counts_from:
            tally.useful_s["edge"] += self._head_s
            tally.useful_s["pool"] += job.useful_s
            tally.cut += 1
        done = RequestEnd(
            kind.name,
            kind.priority,
            request.at,
            now,
            Outcome.OK if in_time else Outcome.LATE,
            in_time,
            served_by=end.candidate.target.id,
            quality=end.candidate.variant.quality or 0.0,
            attempts=end.route.attempts + 1,
            hedged=end.route.hedged,
            tenant=kind.tenant,
        )
        gateway.end(request, done)

    def __repr__(self) -> str:
        return (
            f"<_SplitRequest {self._request.number} at {self._option.cut.layer}, {'tail' if self._is_tail else 'head'}>"
        )
