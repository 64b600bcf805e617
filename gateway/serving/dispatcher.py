"""Answers calls by placing them on targets: one execution (`execution.py`) a call, and what all executions share.

`work_estimate.py` describes a call to placement. A step of a sequence is placed on the target that keeps its state, in
a single attempt (`gateway/core/request/affinity.py`), under an id that no other tenant can use. Its client may bring
the target with it, signed by another gateway (`gateway/core/access/sequence_home.py`).

Attempts that have a task of their own are owned here until they have ended, also beyond their request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from itertools import count

from msgspec.structs import replace

from gateway.core.access.sequence_home import SequenceHomes
from gateway.core.access.sequence_scope import scope_sequence, scoped_sequence_id
from gateway.core.history.recorder import FlightRecorder
from gateway.core.placement.ask import NOTHING
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.request.affinity import Affinity
from gateway.core.request.handover import HandoverPolicy
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy
from gateway.serving.confidence_policy import ConfidencePolicies
from gateway.serving.context import AttemptListener
from gateway.serving.execution import RequestExecution
from gateway.serving.own_places import OwnPlaces
from gateway.serving.row_limit import most_rows
from gateway.serving.work_estimate import AskBuilder, ManifestOf
from gateway.targets.target import Target
from tidegate import clock
from tidegate.models.share_weights import ShareWeights
from tidegate.oip.reply import HOME_KEY
from tidegate.oip.sequence import SequenceStep, sequence_of
from tidegate.outcome import InvalidRequest
from tidegate.runtime.owned_task import cancel_and_wait, forget_cancellation
from tidegate.types import Call, Reply


class Dispatcher:
    """Answers calls by placing them on targets. `targets` may change at any time; attempts under way are left alone."""

    def __init__(
        self,
        placer: Placer,
        targets: Mapping[str, Target],
        manifest_of: ManifestOf,
        *,
        draw: Callable[[], float],
        memory: FlightRecorder | None = None,
        hedges: HedgePolicy | None = None,
        handovers: HandoverPolicy | None = None,
        overloaded: Callable[[], bool] = lambda: False,
        placement: Placement | None = None,
        weight_of: Callable[[str], float] = lambda _tenant: 1.0,
        shares: ShareWeights | None = None,
        listener: AttemptListener | None = None,
        homes: SequenceHomes | None = None,
    ) -> None:
        """Args:
        memory: keeps finished requests for explanations.
        handovers: lets answers leave targets that are well for better places; None: none does.
        overloaded: whether escalations stop now.
        placement: decides instead of the placer alone, such as the admission guard around it.
        weight_of: the weight of a tenant's answers relative to others'.
        shares: the weight of a model's answers relative to others'.
        listener: observes how attempts end.
        homes: signs where a sequence's state is, and believes other gateways; None: only this one knows.
        """
        self.recorder = FlightRecorder(256) if memory is None else memory  # one that is empty is false
        self.placer = placer
        self.placement: Placement = placement or placer
        self.hedges: HedgePolicy = hedges or DeadlineHedging()
        self.handovers = handovers
        self.affinity = Affinity()
        self._homes = homes
        self.judges = ConfidencePolicies(manifest_of, overloaded)
        self.targets = targets
        self.draw = draw
        self._manifest_of = manifest_of
        self.ask_builder = AskBuilder(manifest_of, placer.fleet, weight_of, shares)
        self.listener: AttemptListener | None = listener
        self._keys = count()
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, call: Call) -> Awaitable[Reply]:
        """The answer, from wherever it was placed.

        Raises:
            ServeError: no target could answer before the deadline; `call.deadline` must be set.
        """
        taken_at = clock.now()
        if call.request.parameters:
            kept = self._remembered(call)  # first: a wrong id is refused in its caller's words
            call = scope_sequence(call)
            if kept is not None:
                return self._step(call, *kept, taken_at)
        placement = self._placement_for(call)
        return RequestExecution(self, call, self.ask_builder.ask(call), taken_at=taken_at, placement=placement).run()

    def most_rows(self, call: Call, enough: int) -> int | None:
        """How many rows, `enough` at most, a call like this one may have somewhere now; None: it has no place."""
        if call.deadline is None:
            request = call.request
            manifest = self._manifest_of(request.model_name, request.model_version)
            call = call.due(call.arrived_at + manifest.default_budget_s)
        ask = self.ask_builder.ask(call)
        return most_rows(self.placer.fleet.offered(ask.model, ask.version), ask, clock.now(), enough=enough)

    def _placement_for(self, call: Call) -> Placement:
        """What another gateway sent is not sent on to a third one, and what a device asks for not to that device."""
        left_out = self.left_out(call)
        return OwnPlaces(self.placement, left_out) if left_out else self.placement

    def left_out(self, call: Call) -> Set[str]:
        """The targets that are no place for this call: of a caller's own, none."""
        if not call.path:
            return NOTHING
        sites, asker = self.placer.fleet.sites, call.asker
        return {*sites, asker} if asker else sites

    def _remembered(self, call: Call) -> tuple[SequenceStep, float] | None:
        """The sequence step of a call to a stateful model, and how long its state is kept; None for any other call."""
        kept = self._manifest_of(call.request.model_name, call.request.model_version).sequence
        step = None if kept is None else sequence_of(call.request.parameters)
        if kept is None or step is None:
            return None
        return step._replace(id=scoped_sequence_id(call.tenant, step.id)), kept.ttl_s

    async def _step(self, call: Call, step: SequenceStep, ttl_s: float, taken_at: float) -> Reply:
        told, call = self._home_told(call, step)
        ask = self.ask_builder.ask(call)
        sticky = self.affinity.placement(ask.model, step, self._placement_for(call), clock.now(), told)
        reply = await RequestExecution(self, call, ask, sticky, taken_at=taken_at).run()
        assert reply.route is not None
        self.affinity.answered(ask.model, step, reply.route.served_by, clock.now() + ttl_s)
        if self._homes is None or step.end:
            return reply
        model, target = call.request.model_name, reply.route.served_by
        return replace(reply, sequence_home=self._homes.token(model, step.id, target, clock.utc_s() + ttl_s))

    def _home_told(self, call: Call, step: SequenceStep) -> tuple[str | None, Call]:
        """The target that a client's token names, and the call without it. Raises InvalidRequest."""
        parameters = call.request.parameters
        token = call.headers.get(HOME_KEY) or parameters.get(HOME_KEY)
        if HOME_KEY in parameters:
            kept = {name: value for name, value in parameters.items() if name != HOME_KEY}
            call = replace(call, request=replace(call.request, parameters=kept))
        if self._homes is None or step.start or not token:
            return None, call
        if not isinstance(token, str):
            raise InvalidRequest(f"parameter {HOME_KEY!r} must be a text, not {token!r}")
        return self._homes.target(token, call.request.model_name, step.id, clock.utc_s()), call

    def next_key(self) -> int:
        return next(self._keys)

    def spawn(self, attempt: asyncio.Task[None]) -> None:
        """Own the task of an attempt until it has ended."""
        self._tasks.add(attempt)
        attempt.add_done_callback(self._over)

    def _over(self, attempt: asyncio.Task[None]) -> None:
        self._tasks.discard(attempt)
        forget_cancellation(attempt)

    async def close(self) -> None:
        """Wait for attempts that were cancelled but have not ended yet."""
        await cancel_and_wait(*self._tasks)

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self.targets)} targets, {len(self._tasks)} attempts in tasks of their own>"
