"""The edge sync publishes the agent's state over MQTT: birth, inventory, a heartbeat a second, and a goodbye.

    epoch on disk → CONNECT with the will of that epoch → subscriptions granted → birth → inventory → heartbeats …

The order matters. The epoch is safe before the broker learns of it, so no later session can be mistaken for a past one.
The subscriptions are granted before the birth, so a gateway's reply to the birth is received. The goodbye is
acknowledged before the DISCONNECT, so a gateway need not wait for a will.

`edge_agent/core/reporting.py` decides what to publish and when; this file sends it, and performs a gateway's commands:
publish everything again (`resync`), begin a session with a greater epoch (`epoch_hint`), or stay away for a while,
because another agent has this device's name (`name_taken`, `edge_agent/core/name_dispute.py`). Serving requests never
waits for any of this: without a broker the agent serves every caller that reaches it.
"""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import Callable
from typing import Protocol

import structlog

from edge_agent.core.acl_check import AclCheck, AclFinding
from edge_agent.core.name_dispute import NameDispute
from edge_agent.core.reporting import AgentState, Farewell, Publication, Reporting
from edge_agent.fleet.epoch import EpochStore
from tidegate import clock
from tidegate.fleet.messages import (
    BadMessage,
    Birth,
    Command,
    GatewayState,
    decode_command,
    decode_gateway_state,
    decode_up,
)
from tidegate.fleet.name_conflict import NAME_TAKEN
from tidegate.fleet.stored import Receipt, decode_receipt
from tidegate.fleet.topics import DeviceTopic, StoredTopic, Topics, checked_name
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttDisconnected, MqttLink, MqttMessage, PublishAck, Will
from tidegate.mqtt.loop import MqttLoop

RESYNC_GAP_S = 1.0  # however many gateways ask
MAX_GATEWAYS = 64

log = structlog.get_logger(__name__)


class Ear(Protocol):
    """A listener for sessions, gateways and receipts. Called on the loop; must not block."""

    def session(self, *, up: bool) -> None: ...

    def heard(self, state: GatewayState, *, retained: bool) -> None:
        """A gateway published its state, or the broker its retained one."""
        ...

    def receipt(self, receipt: Receipt) -> None: ...


def log_name_taken(device: str, epoch: int, reason: str, wait_s: float) -> None:
    """Log that a gateway has given this device's name to another agent."""
    log.error(
        "another agent has this device's name: this one stays away from the fleet",
        device=device,
        epoch=epoch,
        reason=reason,
        wait_s=round(wait_s, 1),
        way_out="end one of the two agents, or give this one another `name`",
    )


class EdgeSync:
    """Owns the link to the broker and its task (`MqttLoop`), from `async with` to its end.

    Args:
        url: of the broker, "mqtt://host:1883".
        fleet: the namespace that agents and gateways share.
        device: this agent's name in it; one live agent per name.
        state: the state to report, read before each publication; must be cheap.
        epochs: where this device's session number is kept.
        draw: chance, uniform in [0, 1).
        agent_version: for people, published in the birth.
        interval_s: between heartbeats.
        backoff_cap_s: the longest wait between attempts at a broker that is there; a gateway allows 30 s for it.
        tls: for an address with `mqtts://`, see `MqttLink`.
        ear: called with sessions, gateways and receipts.
        groups: the groups whose desired documents are subscribed to, beside the device's own.
        on_desired: called with each document, by its scope; None: documents are not subscribed to.
        boot: identifies this start of the agent, which began at `started_at`; "": it begins now.
        dispute: what gateways have said about another agent of this name.
        neighbours: the devices of which the addresses are wanted; the broker must let this one read their births.
    """

    def __init__(
        self,
        url: str,
        *,
        fleet: str,
        device: str,
        state: Callable[[], AgentState],
        epochs: EpochStore,
        draw: Callable[[], float],
        agent_version: str = "",
        interval_s: float = 1.0,
        backoff_cap_s: float = 30.0,
        tls: Callable[[], ssl.SSLContext] | None = None,
        ear: Ear | None = None,
        groups: tuple[str, ...] = (),
        on_desired: Callable[[str, bytes], None] | None = None,
        boot: str = "",
        started_at: float | None = None,
        dispute: NameDispute | None = None,
        neighbours: tuple[str, ...] = (),
    ) -> None:
        self.neighbours: dict[str, tuple[str, ...]] = {}  # where each has said that it is reached, HOST:PORT
        self._neighbours = neighbours
        self.dispute = NameDispute(draw) if dispute is None else dispute
        self._ear = ear
        self._on_desired = on_desired
        self.gateways: dict[str, GatewayState] = {}  # the last state of each, the one heard longest ago first
        self._topics = Topics(fleet)
        self._device = checked_name(device, "the device's name")
        self._acl = AclCheck(self._topics, device)
        self._state = state
        self._epochs = epochs
        self._boot = boot or uuid.uuid4().hex[:16]
        documents = self._topics.for_rollout(device, groups) if on_desired is not None else ()
        self._reporting = Reporting(
            device,
            boot=self._boot,
            started_at=clock.now() if started_at is None else started_at,
            draw=draw,
            agent_version=agent_version,
            interval_s=interval_s,
        )
        self._loop = MqttLoop(
            lambda on_activity: MqttLink(
                url,
                client_id=device,
                subscriptions=(*self._topics.for_device(device), *documents, *self._topics.of_neighbours(neighbours)),
                draw=draw,
                on_activity=on_activity,
                before_connect=self._begin_epoch,
                backoff_cap_s=backoff_cap_s,
                tls=tls,
            ),
            name=f"edge-sync {device}",
            take_in=self._take_in,
            turn=self._turn,
            farewell=self._say_goodbye,
            crash_means="state reporting has crashed; gateways will think this agent dead",
        )
        self._link = self._loop.link
        self._minimum_epoch = 1
        self._resync_from = 0.0
        self._farewell: Farewell = "shutdown"

    async def __aenter__(self) -> EdgeSync:
        await self._loop.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._loop.__aexit__()

    @property
    def link(self) -> MqttLink:
        """The link to the broker."""
        return self._link

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def epoch(self) -> int:
        """The epoch of the newest session, for load reports on other paths; 0 before the first."""
        return self._epochs.current

    def notify(self) -> None:
        """Note a change of state; `edge_agent/core/reporting.py` decides whether it is published now."""
        self._loop.wake()

    def send_stored(self, kind: StoredTopic, gateway: str, payload: bytes) -> bool:
        """Hand one message from the store over; False when there is no session or no room in it."""
        return self._link.publish(self._topics.stored(self._device, kind, gateway), payload, qos=1)

    def leave_with(self, reason: Farewell) -> None:
        """Set the reason of the goodbye, instead of `shutdown`."""
        self._farewell = reason

    def cut(self) -> None:
        """Cut the connection as a power cut does; for simulations that end this agent in the same turn."""
        self._link.cut()

    async def _begin_epoch(self) -> Will:
        # In a thread, since it waits for the disk and the loop serves requests.
        epoch = await asyncio.to_thread(self._epochs.bump, clock.utc_s(), at_least=self._minimum_epoch)
        will = self._reporting.will(epoch)
        return Will(self._topics.up(self._device, will.kind), will.payload, will.qos, will.retain)

    def _turn(self) -> float | None:
        self._publish(self._reporting.due(self._state(), clock.now(), clock.utc_s()))
        return self._reporting.next_wake(self._state())

    def _say_goodbye(self) -> bool:
        return self._publish(self._reporting.farewell(self._farewell))

    def _take_in(self, event: LinkEvent) -> None:
        match event:
            case MqttConnected():
                self._publish(
                    self._reporting.connected(self._epochs.current, self._state(), clock.now(), clock.utc_s())
                )
                self._try_the_acl(event.protocol)
                if self._ear is not None:
                    self._ear.session(up=True)
            case PublishAck():
                self._tell(self._acl.answered(event.topic, event.refusal))
            case MqttDisconnected():
                self._reporting.disconnected()
                if self._ear is not None:
                    self._ear.session(up=False)
            case MqttMessage():
                self._hear(event)

    def _try_the_acl(self, protocol: str) -> None:
        topics = self._acl.topics(protocol)
        if not topics:
            self._tell(self._acl.cannot_tell())
        for topic in topics:
            self._link.publish(topic, b"{}", qos=1, answered=True)

    def _tell(self, finding: AclFinding | None) -> None:
        if finding is not None:
            getattr(log, finding.severity)(finding.words, device=self._device)

    def _hear(self, message: MqttMessage) -> None:
        try:
            if message.topic == self._topics.command(self._device):
                self._obey(decode_command(message.payload))
            elif message.topic == self._topics.receipt(self._device):
                receipt = decode_receipt(message.payload)
                if self._ear is not None and not message.retained:
                    self._ear.receipt(receipt)
            elif self._on_desired is not None and (scope := self._topics.parse_desired(message.topic)):
                self._on_desired(scope, message.payload)
            elif gateway := self._topics.parse_gateway(message.topic):
                self._note_gateway(gateway, decode_gateway_state(message.payload), retained=message.retained)
            elif neighbour := self._topics.parse_up(message.topic):
                self._note_neighbour(*neighbour, message.payload)
        except BadMessage as error:
            log.info("ignored a message", topic=message.topic, reason=str(error))

    def _obey(self, command: Command) -> None:
        now = clock.now()
        if command.op == "resync" and now >= self._resync_from:
            self._resync_from = now + RESYNC_GAP_S
            self._publish(self._reporting.resync(self._state(), now, clock.utc_s()))
        elif command.op == "epoch_hint" and self._is_meant(command):
            self._minimum_epoch = command.minimum or 1
            self._link.restart("a gateway knows a greater epoch")
        elif command.op == "name_taken" and self._is_meant(command):
            wait_s = self.dispute.refused(command.reason or NAME_TAKEN, now)
            log_name_taken(self._device, self._reporting.epoch, command.reason, wait_s)
            self._reporting.disconnected()  # without a goodbye, which would speak for the other agent as well
            self._link.stand_down("another agent has this name", wait_s)

    def _is_meant(self, command: Command) -> bool:
        """Whether the hint is about the current session, and not a late message about a past one."""
        return command.seen == self._reporting.epoch and command.boot in ("", self._boot)

    def _note_gateway(self, name: str, state: GatewayState, *, retained: bool) -> None:
        if state.gateway != name:
            return  # the broker's ACL vouches only for the name in the topic
        if name not in self.gateways and len(self.gateways) >= MAX_GATEWAYS:
            del self.gateways[self._least_wanted_gateway()]
        self.gateways.pop(name, None)
        self.gateways[name] = state
        if self._ear is not None:
            self._ear.heard(state, retained=retained)

    def _least_wanted_gateway(self) -> str:
        """Where gateways are named by their pods, each deployment leaves names behind that never come back."""
        gone = (name for name, state in self.gateways.items() if not state.online)
        return next(gone, None) or next(iter(self.gateways))

    def _note_neighbour(self, name: str, kind: DeviceTopic, payload: bytes) -> None:
        birth = decode_up(kind, payload) if name in self._neighbours and kind is DeviceTopic.BIRTH else None
        if isinstance(birth, Birth) and birth.device == name:  # the broker's ACL vouches only for the name in the topic
            self.neighbours[name] = birth.urls

    def _publish(self, publications: list[Publication]) -> bool:
        """Send in order; whether there was anything to send and the session took all of it."""
        taken = [
            self._link.publish(self._topics.up(self._device, one.kind), one.payload, qos=one.qos, retain=one.retain)
            for one in publications
        ]
        return bool(taken) and all(taken)

    def __repr__(self) -> str:
        return f"<EdgeSync {self._device} {self._reporting!r} {self._link!r}>"
