"""Answers calls by placing them on targets: one flight (`execution.py`) for each, and what all of them share.

What placement is asked for a call, `work_estimate.py` says. A step of a sequence goes where its state is kept, once
(`gateway/core/request/affinity.py`), under a name that no other tenant can say.

Attempts that have a task of their own are owned here until they have ended, also beyond their flight.
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
        witness: AttemptListener | None = None,
    ) -> None:
        """Args:
        memory: keeps finished requests for explanations.
        overloaded: ends escalations.
        places: what decides, if not the placer alone: the gate of admission around it.
        weight_of: how much more than others' an answer to this tenant is worth.
        witness: told of how attempts end.
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
        self.ask_builder = AskBuilder(manifest_of, placer.fleet, weight_of)
        self.listener: AttemptListener | None = witness
        self._keys = count()
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, call: Call) -> Awaitable[Reply]:
        """The answer, from wherever it was placed.

        Raises:
            ServeError: nobody could answer before the deadline; `call.deadline` must be set.
        """
        taken_at = clock.now()
        if call.request.parameters:
            kept = self._remembered(call)  # first: a wrong id is refused in its caller's words
            call = scope_sequence(call)
            if kept is not None:
                return self._step(call, *kept, taken_at)
        return RequestExecution(self, call, self.ask_builder.ask(call), taken_at=taken_at).run()

    def _remembered(self, call: Call) -> tuple[SequenceStep, float] | None:
        """The step of a sequence that a call to a model with a memory is, and how long that lasts."""
        kept = self._manifest_of(call.request.model_name, call.request.model_version).sequence
        step = None if kept is None else sequence_of(call.request.parameters)
        if kept is None or step is None:
            return None
        return step._replace(id=scoped_sequence_id(call.tenant, step.id)), kept.ttl_s

    async def _step(self, call: Call, step: SequenceStep, ttl_s: float, taken_at: float) -> Reply:
        ask = self.ask_builder.ask(call)
        homeward = self.affinity.placement(ask.model, step, self.placement, clock.now())
        reply = await RequestExecution(self, call, ask, homeward, taken_at=taken_at).run()
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
