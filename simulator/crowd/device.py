"""One device of a crowd: the real agent's side of MQTT (`sync.py`) with made-up models and load behind it.

It is the agent's own code that connects, counts epochs, sends births, wills and heartbeats, so a broker and a gateway
are loaded as by real devices. What is missing is what the crowd is not for: it answers no requests. So it advertises an
address from a range that is reserved for documentation and inside no gateway's `advertised_networks`, so no gateway
dials it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from edge_agent.core.reporting import AgentState, Publication
from edge_agent.fleet.sync import EdgeSync
from simulator.crowd.epochs import InMemoryEpochs
from simulator.crowd.habits import Habits
from tidegate import clock
from tidegate.fleet.messages import Command
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.types import LoadReport

MOST_QUEUED = 8


class CountedSync(EdgeSync):
    """An agent's side of MQTT that counts its publications and the commands that it receives."""

    def __init__(self, url: str, counts: Counter[str], **settings: Any) -> None:
        super().__init__(url, **settings)
        self.counts = counts

    def _publish(self, publications: list[Publication]) -> bool:
        for one in publications:
            self.counts[one.kind.name.lower()] += 1
        return super()._publish(publications)

    def _obey(self, command: Command) -> None:
        self.counts[f"told to {command.op}"] += 1
        super()._obey(command)


class SimulatedDevice:
    """`run` is its whole life, until it is cancelled; it disconnects cleanly then.

    Args:
        number: names it, and its address.
        draw: chance, uniform in [0, 1).
        counts: shared by the devices of a crowd.
    """

    def __init__(
        self,
        number: int,
        *,
        url: str,
        fleet: str,
        models: int,
        interval_s: float,
        habits: Habits,
        draw: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self.name = f"sim-{number:05d}"
        self.connected = False
        self._url, self._fleet, self._interval_s = url, fleet, interval_s
        self._habits, self._draw, self._counts = habits, draw, counts
        self._offers = tuple(_offer(n, draw) for n in range(models))
        self._address = f"192.0.2.{number % 254 + 1}:9001"
        self._queued = 0
        self._epochs = InMemoryEpochs()
        self._sync: EdgeSync | None = None

    async def run(self) -> None:
        await clock.sleep(self._habits.arrives_after_s(self._draw))
        while True:
            stay_s = self._habits.stay_s(self._draw)
            async with self._connected() as sync:
                if stay_s < inf:
                    await clock.sleep(stay_s)
                else:
                    await asyncio.Event().wait()
                if self._habits.crashes(self._draw):
                    self._counts["power cuts"] += 1
                    sync.cut()
            await clock.sleep(self._habits.away_s(self._draw))

    @property
    def is_connected(self) -> bool:
        return self._sync is not None and self._sync.connected

    def _connected(self) -> EdgeSync:
        sync = CountedSync(
            self._url,
            self._counts,
            fleet=self._fleet,
            device=self.name,
            state=self._state,
            epochs=self._epochs,
            draw=self._draw,
            agent_version="simulated",
            interval_s=self._interval_s,
        )
        self._sync = sync
        return sync

    def _state(self) -> AgentState:
        step = int(3.0 * self._draw()) - 1
        self._queued = min(MOST_QUEUED, max(0, self._queued + step))
        load = LoadReport(self._epochs.current, 1, self._queued, min(1, self._queued), 0.005 * self._queued)
        return AgentState(self._offers, (self._address,), load)

    def __repr__(self) -> str:
        return f"<SimulatedDevice {self.name} {'connected' if self.is_connected else 'away'}>"


def _offer(number: int, draw: Callable[[], float]) -> ModelOffer:
    call_s = 0.002 + 0.004 * draw()
    cost = tuple((units, call_s * (1.0 + units / 32.0)) for units in (8.0, 64.0, 256.0))
    return ModelOffer(f"sim-model-{number}", "1", (VariantOffer("int8", "int8", cost=cost),), state="ready")
