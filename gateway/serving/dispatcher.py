"""Answers calls by placing them on targets: one execution (`execution.py`) a call, and what all executions share.

`work_estimate.py` describes a call to placement. A step of a sequence is placed on the target that keeps its state, in
a single attempt (`gateway/core/request/affinity.py`), under an id that no other tenant can use.

Attempts that have a task of their own are owned here until they have ended, also beyond their request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

from gateway.core.access.sequence_scope import scope_sequence, scoped_sequence_id
from gateway.core.history.recorder import FlightRecorder
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.request.affinity import Affinity
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy
from gateway.serving.confidence_policy import ConfidencePolicies
from gateway.serving.context import AttemptListener
from gateway.serving.execution import RequestExecution
from gateway.serving.work_estimate import AskBuilder, ManifestOf
from gateway.targets.target import Target
from tidegate import clock
from tidegate.models.share_weights import ShareWeights
from tidegate.oip.sequence import SequenceStep, sequence_of
from tidegate.runtime.owned_task import cancel_and_wait
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
        overloaded: Callable[[], bool] = lambda: False,
        placement: Placement | None = None,
        weight_of: Callable[[str], float] = lambda _tenant: 1.0,
        shares: ShareWeights | None = None,
        listener: AttemptListener | None = None,
    ) -> None:
        """Args:
        memory: keeps finished requests for explanations.
        overloaded: whether escalations stop now.
        placement: decides instead of the placer alone, such as the admission guard around it.
        weight_of: the weight of a tenant's answers relative to others'.
        shares: the weight of a model's answers relative to others'.
        listener: observes how attempts end.
        """
        self.recorder = FlightRecorder(256) if memory is None else memory  # one that is empty is false
        self.placer = placer
        self.placement: Placement = placement or placer
        self.hedges: HedgePolicy = hedges or DeadlineHedging()
        self.affinity = Affinity()
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
        return RequestExecution(self, call, self.ask_builder.ask(call), taken_at=taken_at).run()

    def _remembered(self, call: Call) -> tuple[SequenceStep, float] | None:
        """The sequence step of a call to a stateful model, and how long its state is kept; None for any other call."""
        kept = self._manifest_of(call.request.model_name, call.request.model_version).sequence
        step = None if kept is None else sequence_of(call.request.parameters)
        if kept is None or step is None:
            return None
        return step._replace(id=scoped_sequence_id(call.tenant, step.id)), kept.ttl_s

    async def _step(self, call: Call, step: SequenceStep, ttl_s: float, taken_at: float) -> Reply:
        ask = self.ask_builder.ask(call)
        sticky = self.affinity.placement(ask.model, step, self.placement, clock.now())
        reply = await RequestExecution(self, call, ask, sticky, taken_at=taken_at).run()
        assert reply.route is not None
        self.affinity.answered(ask.model, step, reply.route.served_by, clock.now() + ttl_s)
        return reply

    def next_key(self) -> int:
        return next(self._keys)

    def spawn(self, attempt: asyncio.Task[None]) -> None:
        """Own the task of an attempt until it has ended."""
        self._tasks.add(attempt)
        attempt.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for attempts that were cancelled but have not ended yet."""
        await cancel_and_wait(*self._tasks)

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self.targets)} targets, {len(self._tasks)} attempts in tasks of their own>"
