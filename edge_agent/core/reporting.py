"""Reporting decides what an agent publishes about itself, and when: birth, inventory, heartbeats and goodbye.

Cadence. A heartbeat every second, each wait jittered by ±10 % so that a fleet that started at one instant does not beat
at one instant. News does not wait for it: when admission, the battery or the heat changes, the queue moves by more than
half (and by four), or what is offered changes, the next heartbeat comes at once, but no two within 100 ms, so that a
busy queue cannot turn news into a flood.

Rollouts. A changed state is reported at once, a changed configuration too; progress alone, such as bytes that came in,
every five seconds.

Content. Birth and inventory carry a revision that counts changes of what is offered; every heartbeat carries its hash,
so a gateway that missed a change notices it and requests it. Changed addresses are reported by a new birth in the same
session.

The machine takes the agent's state and `now`, and returns what to publish; it sends nothing itself, and returns nothing
outside of a session. The sequences of a session start at 1 per topic and are never reset inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from edge_agent.core.device_conditions import urgent_conditions
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.messages import (
    Admission,
    Birth,
    Death,
    Heartbeat,
    Inventory,
    UpMessage,
    encode,
    inventory_hash,
)
from tidegate.fleet.offers import ModelOffer
from tidegate.fleet.reported import ConfigurationReport, DocumentRefusal, ModelReport, Reported
from tidegate.fleet.topics import QOS, RETAINED, DeviceTopic
from tidegate.types import LoadReport

MIN_GAP_S: Final = 0.1
PROGRESS_GAP_S: Final = 5.0
JITTER_RATIO: Final = 0.1
Farewell = Literal["shutdown", "sleep", "update"]


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """The rollouts as a device reports them; see `tidegate/fleet/reported.py`."""

    accepted: tuple[tuple[str, int], ...] = ()
    models: tuple[ModelReport, ...] = ()
    refused: tuple[DocumentRefusal, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def states(self) -> tuple[object, ...]:
        """The report without progress."""
        still = ((one.name, one.state, one.reason, one.content, one.revision, one.running) for one in self.models)
        return (self.accepted, self.refused, *still)


@dataclass(frozen=True, slots=True)
class AgentState:
    """The reported state of an agent, read afresh before each report."""

    offers: tuple[ModelOffer, ...]
    urls: tuple[str, ...]  # where the agent answers, "host:port", best first
    load: LoadReport  # its epoch and sequence belong to the data plane and are not sent
    admission: Admission = "open"
    conditions: DeviceConditions = UNTOLD
    rollouts: RolloutReport | None = None  # None: models are not rolled out to this device
    configuration: ConfigurationReport | None = None  # None: it cannot be configured from outside

    @property
    def has_report(self) -> bool:
        """Whether there is anything to report beside births, inventories and heartbeats."""
        return self.rollouts is not None or self.configuration is not None


@dataclass(frozen=True, slots=True)
class Publication:
    """One message on one of the device's own topics."""

    kind: DeviceTopic
    payload: bytes

    @property
    def qos(self) -> int:
        return QOS[self.kind]

    @property
    def retain(self) -> bool:
        return self.kind in RETAINED


class Reporting:
    """Mutable: what has been published in this session.

    Args:
        device: this agent's name in its fleet.
        boot: identifies this start of the agent, which separates two agents that claim one epoch.
        started_at: the instant from which the agent's own milliseconds count.
        draw: chance, uniform in [0, 1).
        interval_s: between heartbeats; shorter finds a lost agent sooner and costs more radio.
    """

    def __init__(
        self,
        device: str,
        *,
        boot: str,
        started_at: float,
        draw: Callable[[], float],
        agent_version: str = "",
        interval_s: float = 1.0,
    ) -> None:
        self._device = device
        self._boot = boot
        self._started_at = started_at
        self._draw = draw
        self._agent_version = agent_version
        self._interval_s = interval_s
        self._epoch = 0  # 0: no session
        self._sequences: dict[DeviceTopic, int] = {}
        self._revision = 0
        self._offers: tuple[ModelOffer, ...] | None = None
        self._hash = ""
        self._urls: tuple[str, ...] = ()
        self._told: AgentState | None = None  # as of the last heartbeat
        self._told_at = -inf
        self._told_rollouts: RolloutReport | None = None
        self._told_configuration: ConfigurationReport | None = None
        self._rollouts_at = -inf
        self._due_at = inf

    @property
    def epoch(self) -> int:
        """The epoch of the current session; 0 outside of one."""
        return self._epoch

    def will(self, epoch: int) -> Publication:
        """The will that the broker publishes if the session of `epoch` ends without a goodbye."""
        return Publication(DeviceTopic.DEATH, encode(Death(self._device, epoch, "lost")))

    def connected(self, epoch: int, state: AgentState, now: float, utc_s: float) -> list[Publication]:
        """Begin a session: birth, inventory, and the first heartbeat, in this order."""
        self._epoch = epoch
        self._sequences = {}
        return self.resync(state, now, utc_s)

    def disconnected(self) -> None:
        """End the session; nothing more is due."""
        self._epoch = 0
        self._due_at = inf

    def resync(self, state: AgentState, now: float, utc_s: float) -> list[Publication]:
        """Everything again, because a gateway missed some of it."""
        if not self._epoch:
            return []
        self._note_offers(state)
        first = [self._birth(state, now, utc_s), self._inventory(state, now)]
        reported = [self._reported(state, now)] if state.has_report else []
        return [*first, *reported, self._heartbeat(state, now)]

    def due(self, state: AgentState, now: float, utc_s: float) -> list[Publication]:
        """The publications that are due now; often none."""
        if not self._epoch or now < self._told_at + MIN_GAP_S:
            return []
        publications = []
        if state.urls != self._urls:
            publications.append(self._birth(state, now, utc_s))
        if state.offers is not self._offers and self._note_offers(state):
            publications.append(self._inventory(state, now))
        if state.has_report and now >= self._rollouts_due_at(state):
            publications.append(self._reported(state, now))
        if publications or now >= self._due_at or self._is_news(state):
            publications.append(self._heartbeat(state, now))
        return publications

    def next_wake(self, state: AgentState) -> float | None:
        """When to call `due` again, unless something happens before; None outside of a session."""
        if not self._epoch:
            return None
        has_news = state.urls != self._urls or state.offers != self._offers or self._is_news(state)
        due_at = self._told_at + MIN_GAP_S if has_news else self._due_at
        return max(self._told_at + MIN_GAP_S, min(due_at, self._rollouts_due_at(state)))

    def farewell(self, reason: Farewell) -> list[Publication]:
        """The goodbye that spares the gateways the wait for a will. Ends the session."""
        if not self._epoch:
            return []
        publication = Publication(DeviceTopic.DEATH, encode(Death(self._device, self._epoch, reason)))
        self.disconnected()
        return [publication]

    def _is_news(self, state: AgentState) -> bool:
        told = self._told
        if told is None or state.admission != told.admission:
            return told is not None
        if state.conditions is not told.conditions and urgent_conditions(state.conditions) != urgent_conditions(
            told.conditions
        ):
            return True
        before, after = told.load.queued, state.load.queued
        moved = abs(after - before)
        return moved >= 4 and moved > 0.5 * before

    def _rollouts_due_at(self, state: AgentState) -> float:
        """When the rollouts should be reported next; infinity when nothing about them is new."""
        told, found = self._told_rollouts, state.rollouts
        told_settings, settings = self._told_configuration, state.configuration
        if settings is not None and settings is not told_settings and settings != told_settings:
            return -inf
        if found is None or found is told or found == told:
            return inf
        return -inf if told is None or found.states != told.states else self._rollouts_at + PROGRESS_GAP_S

    def _note_offers(self, state: AgentState) -> bool:
        """Note what is offered; whether it changed."""
        if state.offers == self._offers:
            return False
        self._offers = state.offers
        self._hash = inventory_hash(state.offers)
        self._revision += 1
        return True

    def _birth(self, state: AgentState, now: float, utc_s: float) -> Publication:
        self._note_offers(state)
        self._urls = state.urls
        birth = Birth(
            device=self._device,
            epoch=self._epoch,
            sequence=self._next_sequence(DeviceTopic.BIRTH),
            mono_ms=self._mono_ms(now),
            boot=self._boot,
            urls=state.urls,
            offers=state.offers,
            revision=self._revision,
            interval_ms=round(self._interval_s * 1000),
            admission=state.admission,
            agent=self._agent_version,
            utc_ms=round(utc_s * 1000),
        )
        return _publication(DeviceTopic.BIRTH, birth)

    def _inventory(self, state: AgentState, now: float) -> Publication:
        inventory = Inventory(
            device=self._device,
            epoch=self._epoch,
            sequence=self._next_sequence(DeviceTopic.INVENTORY),
            mono_ms=self._mono_ms(now),
            offers=state.offers,
            revision=self._revision,
        )
        return _publication(DeviceTopic.INVENTORY, inventory)

    def _reported(self, state: AgentState, now: float) -> Publication:
        rollouts = state.rollouts or RolloutReport()
        self._told_rollouts, self._rollouts_at = state.rollouts, now
        self._told_configuration = state.configuration
        reported = Reported(
            device=self._device,
            epoch=self._epoch,
            sequence=self._next_sequence(DeviceTopic.REPORTED),
            mono_ms=self._mono_ms(now),
            accepted=dict(rollouts.accepted),
            models=rollouts.models,
            refused=rollouts.refused,
            groups=rollouts.groups,
            configuration=state.configuration,
            takes_rollouts=state.rollouts is not None,
        )
        return _publication(DeviceTopic.REPORTED, reported)

    def _heartbeat(self, state: AgentState, now: float) -> Publication:
        self._told, self._told_at = state, now
        self._due_at = now + self._interval_s * (1.0 + JITTER_RATIO * (2.0 * self._draw() - 1.0))
        heartbeat = Heartbeat(
            device=self._device,
            epoch=self._epoch,
            sequence=self._next_sequence(DeviceTopic.HEARTBEAT),
            mono_ms=self._mono_ms(now),
            interval_ms=round(self._interval_s * 1000),
            inventory=self._hash,
            queued=state.load.queued,
            in_flight=state.load.in_flight,
            queue_delay_ms=round(min(3_600.0, max(0.0, state.load.queue_delay_s)) * 1000, 3),
            admission=state.admission,
            conditions=state.conditions,
        )
        return _publication(DeviceTopic.HEARTBEAT, heartbeat)

    def _next_sequence(self, kind: DeviceTopic) -> int:
        self._sequences[kind] = self._sequences.get(kind, 0) + 1
        return self._sequences[kind]

    def _mono_ms(self, now: float) -> int:
        return max(0, round((now - self._started_at) * 1000))

    def __repr__(self) -> str:
        session = f"epoch {self._epoch}" if self._epoch else "no session"
        beats = self._sequences.get(DeviceTopic.HEARTBEAT, 0)
        return f"<Reporting {self._device} {session}, {beats} heartbeats, revision {self._revision}>"


def _publication(kind: DeviceTopic, message: UpMessage) -> Publication:
    return Publication(kind, encode(message))
