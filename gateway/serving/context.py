"""What all flights of a gateway share: the conductor, as a flight sees it.

A flight lives as long as its request; what outlives it is reached through here and nowhere else: who places and who
hedges, the targets of this moment, how sure a model must be, what earlier flights learned, the memory that explanations
come from, and whoever watches how attempts end. Targets are looked up anew at each attempt: one that has left
meanwhile is gone for the next.

Two files need these words and not each other: `execution.py`, which uses what is here, and `dispatcher.py`, which is
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.core.history.recorder import FlightRecorder
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.request.hedging import HedgePolicy
from gateway.serving.confidence_policy import ConfidencePolicies
from gateway.targets.target import Target
from tidegate.outcome import ServeError
from tidegate.types import Call


class AttemptListener(Protocol):
    """Who wants to know how attempts end."""

    def answered(self, target: str) -> None: ...

    def failed(self, call: Call, target: str, error: ServeError) -> None: ...


class DispatchContext(Protocol):
    """What all flights share."""

    recorder: FlightRecorder
    placer: Placer
    placement: Placement
    hedges: HedgePolicy
    judges: ConfidencePolicies
    targets: Mapping[str, Target]
    draw: Callable[[], float]
    listener: AttemptListener | None

    def next_key(self) -> int:
        """Of an attempt, different from all before it."""
        ...

    def spawn(self, attempt: asyncio.Task[None]) -> None:
        """Own the task of an attempt until it has ended, which may be after its flight."""
        ...
