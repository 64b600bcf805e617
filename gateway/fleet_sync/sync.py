"""The gateway's side of MQTT: every message of a device goes into one register, and gaps are asked about.

Devices are discovered here with no configuration: births are retained, so a gateway that starts learns of every device
at once, and within a heartbeat whether each still lives. What a message means is decided in `registry.py` and
`device.py`; this file carries messages in and effects out, and reports when the view has changed (`on_change`): at most
every 20 ms, however many heartbeats come, and also when a device fell silent. A listener then reads the devices that
have changed and no others (`FleetRegister.changed`).

The gateway's own presence (`gw/NAME/state`, retained, with a will) and its heartbeat show devices that a gateway
listens, and what time it is. Other gateways see it by them too, and say on `peer/NAME` what is asked of them.

A gateway in several processes (`workers`) has one session, its keeper's, which speaks as above: devices and brokers see
one gateway. The others listen only, by way of the keeper (`gateway/workers/broker_relay.py`).
"""

from __future__ import annotations

import heapq
import itertools
import ssl
from collections.abc import Callable
from math import inf

import structlog

from gateway.core.access.broker_rights import BrokerRights
from gateway.core.peers.peers import PeerReport, Peers
from gateway.fleet_sync.freshness import DeviceView
from gateway.fleet_sync.gateway_report import decode_report, encode_report
from gateway.fleet_sync.pool_listener import PoolListener
from gateway.fleet_sync.registry import Effect, EpochHint, FleetRegister, NameTaken
from gateway.ingest.receiver import Ingest
from tidegate import clock
from tidegate.fleet.messages import BadMessage, Command, GatewayState, decode_gateway_state, encode
from tidegate.fleet.stored import Receipt, encode_stored
from tidegate.fleet.topics import Topics, checked_name
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttDisconnected, MqttLink, MqttMessage, Will
from tidegate.mqtt.loop import MqttLoop
from tidegate.mqtt.session import PublishAck

log = structlog.get_logger(__name__)

HEARTBEAT_S = 5.0
COALESCE_S = 0.02
MAX_INBOX = 65536  # after an outage a whole fleet says several things each before any of it is taken in
MAX_EFFECTS = 1024
UNBORN_IS_ODD = 50  # devices that beat and whose births did not come, a heartbeat of ours after the session began


class FleetSync:
    """Owns the link to the broker and its task (`MqttLoop`), from `async with` to its end.

    Args:
        url: of the broker, "mqtt://host:1883".
        fleet: the namespace that agents and gateways share.
        gateway_name: one live gateway per name.
        on_change: called on the loop after `register` has changed; must not block.
        draw: chance, uniform in [0, 1).
        register: another than the default one, for other limits.
        backoff_cap_s: the longest wait between attempts to reach the broker.
        tls: for an address with `mqtts://`, see `MqttLink`.
        links: HOST:PORT where devices may dial this gateway.
        rights: where it is kept whether the broker lets this gateway speak.
        peers: the view of the other gateways, which is kept here.
        ingest: takes what devices have stored, and sends its receipts by `send_receipt`; None: devices keep it.
        pools: hears what pools announce; None: that is not subscribed to.
        listening: makes the link, given the callback for activity, of one that hears everything and says nothing; None:
            a session of its own.
        on_event: called with each event of the link, before it is taken in.
    """

    def __init__(
        self,
        url: str,
        fleet: str,
        gateway_name: str,
        on_change: Callable[[], None],
        draw: Callable[[], float],
        *,
        register: FleetRegister | None = None,
        backoff_cap_s: float = 5.0,
        tls: Callable[[], ssl.SSLContext] | None = None,
        links: tuple[str, ...] = (),
        ingest: Ingest | None = None,
        rights: BrokerRights | None = None,
        peers: Peers | None = None,
        pools: PoolListener | None = None,
        listening: Callable[[Callable[[], None]], MqttLink] | None = None,
        on_event: Callable[[LinkEvent], None] = lambda _: None,
    ) -> None:
        self._topics = Topics(fleet)
        self._name = checked_name(gateway_name, "the gateway's name")
        # `or` would drop a register that is still empty, which is false.
        self.register = FleetRegister(self._topics, draw=draw) if register is None else register
        self._rights = rights or BrokerRights(fleet, gateway_name)
        self._peers = peers or Peers(gateway_name)
        self._listens_only = listening is not None
        self._on_event = on_event
        self._links = links
        self._ingest = ingest  # takes what devices have stored; None: they keep it
        subscriptions = self._topics.for_gateways
        if ingest is not None:
            subscriptions += self._topics.stored_for(gateway_name)
        self._pools = pools
        if pools is not None:
            subscriptions += self._topics.of_pools
        self._on_change = on_change
        self._epoch = max(1, int(clock.utc_s() * 1000))
        self._loop = MqttLoop(
            listening
            or (
                lambda on_activity: MqttLink(
                    url,
                    client_id=f"gw~{gateway_name}",
                    subscriptions=subscriptions,
                    draw=draw,
                    on_activity=on_activity,
                    before_connect=self._make_will,
                    max_inbox=MAX_INBOX,
                    backoff_cap_s=backoff_cap_s,
                    tls=tls,
                )
            ),
            name=f"fleet-sync {gateway_name}",
            take_in=self._take_in,
            turn=self._turn,
            farewell=lambda: not self._listens_only and self._say_state(online=False),
            crash_means="fleet state has crashed; devices will look dead",
        )
        self._link = self._loop.link
        self._effects: list[tuple[float, int, Effect]] = []
        self._serial = itertools.count(1)
        self._session = 0
        self._changed = False
        self._tell_from = -inf  # not before, so that changes are reported together
        self._view_changes_at = inf  # by silence alone
        self._heartbeat_at = inf
        self._connected_at = -inf
        self._complained = 0  # in which session

    async def __aenter__(self) -> FleetSync:
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
    def session(self) -> int:
        """Which session with the broker this is, from 1; 0 while there is none."""
        return self._session if self._link.connected else 0

    def devices(self, now: float) -> tuple[DeviceView, ...]:
        return self.register.devices(now)

    def publish_report(self, report: PeerReport) -> bool:
        """Tell the other gateways; False while there is no broker."""
        return self._link.publish(self._topics.peer(self._name), encode_report(self._name, self._epoch, report))

    def publish_desired(self, device: str, message: bytes) -> bool:
        """Say what a device shall run; False when there is no session or no room, and it was not said."""
        return self._link.publish(self._topics.desired(device), message, qos=1, retain=True)

    async def _make_will(self) -> Will:
        return Will(self._topics.gateway_state(self._name), encode(GatewayState(self._name, False, self._epoch)))

    def _turn(self) -> float | None:
        self._perform_due_effects()
        self._beat()
        self._tell()
        tell_at = self._tell_from if self._changed else inf
        effect_at = self._effects[0][0] if self._effects else inf
        pools_at = inf if self._pools is None else self._pools.turn(clock.now())
        until = min(tell_at, effect_at, self._heartbeat_at, self._view_changes_at, pools_at)
        return until if until < inf else None

    def _take_in(self, event: LinkEvent) -> None:
        self._on_event(event)
        match event:
            case MqttMessage() if self._is_stored(event) or self._is_of_peer(event) or self._is_of_a_pool(event):
                pass
            case MqttMessage():
                folded_before = self.register.counts["folded"]
                effects = self.register.fold(event.topic, event.payload, clock.now(), retained=event.retained)
                self._changed |= self.register.counts["folded"] != folded_before or not event.payload
                room = 0 if self._listens_only else MAX_EFFECTS - len(self._effects)
                for effect in effects[:room]:
                    heapq.heappush(self._effects, (effect.at, next(self._serial), effect))
            case MqttConnected(session=session):
                self._session = session
                self._tell_pools(up=True)
                self.register.control_plane(up=True, now=clock.now())
                self._peers.connected(up=True, now=clock.now())
                self._connected_at = clock.now()
                if not self._listens_only:
                    self._say_state(online=True)
                    self._heartbeat_at = self._connected_at
                self._changed = True
            case PublishAck():  # of our presence; nothing else asks for an answer
                self._tell_rights(event.refusal)
            case MqttDisconnected():
                self._tell_pools(up=False)
                self.register.control_plane(up=False, now=clock.now())
                self._peers.connected(up=False, now=clock.now())
                self._heartbeat_at = inf
                self._changed = True

    def _is_stored(self, message: MqttMessage) -> bool:
        """Whether it was for the ingest, which has it then."""
        if self._ingest is None or message.retained:
            return False
        device = self._topics.parse_stored(message.topic, self._name)
        if device is None:
            return False
        self._ingest.message(device, message.payload)
        return True

    def _is_of_peer(self, message: MqttMessage) -> bool:
        """Whether it was of a gateway, and has been taken in then, unless it is no message."""
        now, said = clock.now(), self._topics.parse_peer(message.topic)
        gateway = said or self._topics.parse_gateway(message.topic)
        if gateway is None:
            return False
        try:
            if said:
                report = decode_report(message.payload)
                if report.gateway == gateway:
                    self._peers.report(gateway, report.epoch, report.content, now)
            elif message.payload:
                state = decode_gateway_state(message.payload)
                if state.gateway == gateway:
                    self._peers.state(gateway, state.epoch, now, online=state.online)
                    self._notice_namesake(state)
        except BadMessage as error:
            log.debug("a gateway's message is no message", gateway=gateway, why=str(error))
        return True

    def _notice_namesake(self, state: GatewayState) -> None:
        if state.gateway != self._name or state.epoch == self._epoch or self._listens_only:
            return
        now = clock.now()
        knew = self._peers.has_namesake(now)
        self._peers.namesake(self._session, now)
        if self._peers.has_namesake(now) and not knew:
            log.error(
                "another gateway has this one's name, and each ends the other's session: change `name` of one",
                name=self._name,
                broker=str(self._link.url),
            )

    def _is_of_a_pool(self, message: MqttMessage) -> bool:
        parsed = self._topics.parse_pool(message.topic) if self._pools is not None else None
        if self._pools is None or parsed is None:
            return False
        self._pools.heard(*parsed, message.payload, clock.now())
        return True

    def _tell_pools(self, *, up: bool) -> None:
        if self._pools is not None:
            self._pools.session(up=up, now=clock.now())

    def send_receipt(self, device: str, receipt: Receipt) -> bool:
        """Publish a receipt to a device; False while there is no broker."""
        return self._link.publish(self._topics.receipt(device), encode_stored(receipt), qos=1)

    def _perform_due_effects(self) -> None:
        while self._effects and self._effects[0][0] <= clock.now():
            effect = heapq.heappop(self._effects)[2]
            if self.register.is_wanted(effect):
                self._link.publish(self._topics.command(effect.device), encode(self._command(effect)), qos=1)

    def _command(self, effect: Effect) -> Command:
        id = f"{self._name}-{self._epoch:x}-{next(self._serial)}"[-64:]
        if isinstance(effect, EpochHint):
            return Command(id, "epoch_hint", seen=effect.seen, boot=effect.boot, minimum=effect.minimum)
        if isinstance(effect, NameTaken):
            return Command(id, "name_taken", seen=effect.seen, boot=effect.boot, reason=effect.reason)
        return Command(id, "resync")

    def _beat(self) -> None:
        if clock.now() >= self._heartbeat_at:
            self._complain_of_births()
            self._heartbeat_at = clock.now() + HEARTBEAT_S
            self._link.publish(self._topics.gateway_heartbeat(self._name), self._state(online=True))

    def _complain_of_births(self) -> None:
        """Once a session; they are asked, so it heals, but slowly."""
        if self._complained == self._session or self._heartbeat_at == self._connected_at:
            return
        unborn = self.register.unborn
        if unborn >= UNBORN_IS_ODD:
            self._complained = self._session
            log.warning(
                "the broker keeps births back: raise its max_queued_messages, as `tidegate broker config` does",
                devices_without=unborn,
                devices=len(self.register),
            )

    def _say_state(self, *, online: bool) -> bool:
        topic = self._topics.gateway_state(self._name)
        return self._link.publish(topic, self._state(online=online), qos=1, retain=True, answered=online)

    def _tell_rights(self, refusal: str) -> None:
        words = self._rights.answered(refusal)
        if words:
            log.error(words, broker=str(self._link.url))
        elif words is not None:
            log.info("the broker lets this gateway speak", broker=str(self._link.url))

    def _state(self, *, online: bool) -> bytes:
        utc_ms = round(clock.utc_s() * 1000)
        ingest = self._ingest is not None
        shares = self._ingest is not None and self._ingest.shared is not None
        state = GatewayState(
            self._name, online, self._epoch, utc_ms=utc_ms, links=self._links, ingest=ingest, shares=shares
        )
        return encode(state)

    def _tell(self) -> None:
        """Report a change at once, and those that follow together."""
        now = clock.now()
        if now < self._tell_from or not (self._changed or now >= self._view_changes_at):
            return
        self._changed = False
        self._tell_from = now + COALESCE_S
        self._view_changes_at = self.register.next_wake(now) or inf
        self._on_change()

    def __repr__(self) -> str:
        return f"<FleetSync {self._name} {self.register!r} {self._link!r}>"
