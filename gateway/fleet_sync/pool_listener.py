"""A pool listener hears over the gateway's session with the broker what pools announce."""

from __future__ import annotations

from typing import Protocol

from tidegate.fleet.topics import PoolTopic


class PoolListener(Protocol):
    """Called on the task of `FleetSync`; must not block."""

    def session(self, *, up: bool, now: float) -> None:
        """A session with the broker has begun, or ended."""
        ...

    def heard(self, pool: str, kind: PoolTopic, payload: bytes, now: float) -> None:
        """A message of a pool's topic came; an empty payload is one that was removed."""
        ...

    def turn(self, now: float) -> float:
        """All that has come is told; returns when to be called again at the latest."""
        ...
