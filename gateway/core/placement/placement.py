"""`Placement` is the interface that decides where a request is computed.

`utility.py` and `placer.py` implement it over the fleet's view. `fallback.py`, `probing.py`, the admission guard and
session affinity wrap another implementation each; `gateway/placement_stack.py` stacks them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Decision


class Placement(Protocol):
    """Decides where a request is computed."""

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        """The target for this request, never one of `exclude`; its reason when there is none."""
        ...
