"""What all executions of a gateway share: the dispatcher, as an execution sees it.

An execution lives as long as its request; everything that outlives it is reached through here: placement and hedging,
the targets of this moment, the confidence policies, what earlier requests taught, the flight recorder, and the listener
to attempts. Targets are looked up anew at each attempt: one that has left meanwhile is gone for the next.

The protocol stands in a file of its own so that `execution.py`, which uses it, and `dispatcher.py`, which implements
it, need not import each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.core.history.recorder import FlightRecorder
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.request.handover import HandoverPolicy
from gateway.core.request.hedging import HedgePolicy
from gateway.serving.confidence_policy import ConfidencePolicies
from gateway.serving.work_estimate import AskBuilder
from gateway.targets.target import Target
from tidegate.outcome import ServeError
from tidegate.types import Call


class AttemptListener(Protocol):
    """Observes how attempts end."""

    def answered(self, target: str) -> None: ...

    def failed(self, call: Call, target: str, error: ServeError) -> None: ...


class DispatchContext(Protocol):
    """What all executions share."""

    recorder: FlightRecorder
    placer: Placer
    placement: Placement
    hedges: HedgePolicy
    handovers: HandoverPolicy | None  # None: no answer leaves a target that is well
    judges: ConfidencePolicies
    ask_builder: AskBuilder
    targets: Mapping[str, Target]
    draw: Callable[[], float]
    listener: AttemptListener | None

    def next_key(self) -> int:
        """A key for an attempt, different from all before it."""
        ...

    def spawn(self, attempt: asyncio.Task[None]) -> None:
        """Own the task of an attempt until it has ended, which may be after its request."""
        ...
