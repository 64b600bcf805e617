"""One MQTT session, from CONNECT to its end: paho-mqtt does the protocol, asyncio the sockets.

paho 2.x has pitfalls for code that drives it from a foreign event loop (the numbers are those of the list in
docs/design/edge-state.md, "Driving paho"):
- callbacks in the signature of version 2 (1);
- its `connect()` blocks on DNS and TCP (2): the loop connects the socket, under a timeout, and paho is handed it;
- it doesn't reconnect by itself here (3), or does so inside a callback (4), sends everything at once when it does (6),
  and a bound set after the first connect raises (7): a new client for every session, `reconnect_on_failure=False`;
- a publish while offline is queued though it reports an error (5), without a bound (8): nothing is handed to paho
  unless the session stands, and never more than ten QoS 1 messages; the rest waits in a bounded outbox of our own;
- a lost PUBACK is never requested again on a live connection (9): an old one ends the session;
- PUBACK goes out after `on_message` returns (10): the callback only hands the message to a bounded inbox;
- publishing inside callbacks or from other threads deadlocks (11): everything happens on the loop, outside of them;
- it sets no TCP_NODELAY, which costs 92 ms a QoS 1 round trip (12): set here, with TCP_USER_TIMEOUT;
- a server's keepalive is honoured from 2.2 on (13), which is what we require; a dead link is found after 1.7 keepalives
  (14), so liveness must come from heartbeats, never from here;
- add_reader is missing on Windows' Proactor loop (15): not supported; exceptions propagate out of the read (16): they
  end this session, with their text as the reason.

A flood of messages costs at most a share of the process's time (`cpu_share.py`): beyond it the socket is not read for a
while, and the broker drops messages of QoS 0 that it cannot send. Retained messages are never held up, since a starting
process waits for them, and only the broker sends them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

import structlog

from tidegate import clock
from tidegate.mqtt.broker_socket import ReadAhead, connected_socket
from tidegate.mqtt.broker_url import BrokerUrl, Version
from tidegate.mqtt.cpu_share import DutyCycle
from tidegate.mqtt.errors import BrokerHungUp, BrokerRefused, MqttError, VersionRefused
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.settled_imports import absent

with absent("dns"):
    from paho.mqtt import client as paho
    from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

MAX_OUTSTANDING: Final = 10  # QoS 1 messages without a PUBACK
MAX_UNWRITTEN: Final = 32  # QoS 0 messages that the socket has not taken
MAX_PACKET_BYTES: Final = 131_072
_TICK_S: Final = 1.0
_READ_SHARE: Final = 0.25  # of the time; some 100 µs a message
_READ_BURST_S: Final = 0.1
GATHER_S: Final = 0.02
_PACKETS_AT_ONCE: Final = 32  # a few ms at most
_VERSIONS: Final = {"5": MQTTProtocolVersion.MQTTv5, "3.1.1": MQTTProtocolVersion.MQTTv311}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MqttMessage:
    topic: str
    payload: bytes
    qos: int
    retained: bool  # kept by the broker from before this subscription


@dataclass(frozen=True, slots=True)
class PublishAck:
    """The broker's answer to a publish: "" if taken, else the reason. MQTT 3.1.1 brokers always take a message."""

    topic: str
    refusal: str


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes when the session ends without a DISCONNECT."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = True


class _UnackedPublish(NamedTuple):
    """A QoS 1 message that paho was given, until its PUBACK."""

    at: float
    topic: str
    answered: bool


class _Client(paho.Client):
    """paho's client on a socket that is already connected, since paho would block to connect one itself."""

    ready_socket: ReadAhead | None = None

    def _create_socket(self) -> Any:
        assert self.ready_socket is not None
        return self.ready_socket


class MqttSession:
    """One CONNECT. Lives on the event loop; `ended` resolves with the reason, exactly once."""

    def __init__(
        self,
        version: Version,
        deliver: Callable[[MqttMessage | PublishAck], None],
        ack_timeout_s: float,
        max_outbox: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._version = version
        self._deliver = deliver
        self._ack_timeout_s = ack_timeout_s
        self._max_outbox = max_outbox
        self._url: BrokerUrl | None = None
        self._socket: ReadAhead | None = None
        self._client: _Client | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._granted: asyncio.Future[None] = self._loop.create_future()  # CONNACK, then SUBACK
        self._outbox: deque[tuple[str, bytes, bool, bool]] = deque()
        self._outstanding: dict[int, _UnackedPublish] = {}  # QoS 1, by mid
        self._unwritten: set[int] = set()  # QoS 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._duty = DutyCycle(_READ_SHARE, burst_s=_READ_BURST_S)
        self._heard_retained: bool | None = None  # the last message that was read now; None: no message was
        self._read_at = -inf  # or, while reading rests, when it goes on
        self._rest: asyncio.TimerHandle | None = None

    @property
    def socket(self) -> ReadAhead | None:
        """The connection to the broker; None before it is reached and after the end."""
        return self._socket

    @property
    def unacknowledged(self) -> int:
        """QoS 1 messages that were sent and have no PUBACK yet."""
        return len(self._outstanding)

    # -- beginning -------------------------------------------------------------------------------------------------

    async def reach(self, url: BrokerUrl, context: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        """Connect the socket, over TLS by `context`; no packet is sent yet. Raises OSError."""
        self._url = url
        self._socket = ReadAhead(await connected_socket(url.host, url.port, context, connect_timeout_s))

    async def open(
        self, client_id: str, keepalive_s: int, will: Will | None, subscriptions: tuple[tuple[str, int], ...]
    ) -> None:
        """Send CONNECT and SUBSCRIBE on the connected socket. Raises MqttError."""
        assert self._socket is not None and self._url is not None
        url = self._url
        self._client = client = self._make_client(client_id, will, url)
        client.ready_socket = self._socket
        client.connect(url.host, url.port, keepalive_s, **self._connect_options(url))
        if self._socket.fileno() < 0:  # paho silently closes a socket that breaks under its first packet
            raise BrokerHungUp("the broker hung up: the connection was lost")
        self._attach(client, self._socket)
        await self._step(BrokerHungUp)
        if subscriptions:
            self._granted = self._loop.create_future()
            client.subscribe(list(subscriptions))
            await self._step(MqttError)

    async def _step(self, early_end: type[MqttError]) -> None:
        """Wait for the CONNACK or SUBACK, or for the session's early end."""
        await asyncio.wait((self._granted, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._granted.done():
            raise early_end(f"the broker hung up: {self.ended.result()}")
        self._granted.result()

    def _make_client(self, client_id: str, will: Will | None, url: BrokerUrl) -> _Client:
        client = _Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=_VERSIONS[self._version],
            clean_session=True if self._version == "3.1.1" else None,
            reconnect_on_failure=False,
        )
        client.max_inflight_messages_set(2 * MAX_OUTSTANDING)
        client.max_queued_messages_set(2 * MAX_OUTSTANDING)
        if url.username is not None:
            client.username_pw_set(url.username, url.password)
        if will is not None:
            client.will_set(will.topic, will.payload, will.qos, will.retain)
        return client

    def _connect_options(self, url: BrokerUrl) -> dict[str, Any]:
        if self._version == "3.1.1":
            return {}
        if url.version == "auto":
            # Bare, so that an older broker can read it to the end: amqtt never answers a CONNECT with properties.
            return {"clean_start": True}
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = MAX_PACKET_BYTES
        properties.ReceiveMaximum = 64
        return {"clean_start": True, "properties": properties}

    def _attach(self, client: _Client, sock: ReadAhead) -> None:
        """From here on the loop owns the socket. The callbacks are set after `connect`, which has no use for them."""
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_disconnect = self._on_disconnect
        client.on_socket_register_write = self._on_want_write
        client.on_socket_unregister_write = self._on_written
        client.on_socket_close = self._on_close
        self._loop.add_reader(sock, self._read)
        if client.want_write():
            self._loop.add_writer(sock, self._write)
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    # -- driving paho ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        began_at, self._heard_retained = clock.now(), None
        for _ in range(_PACKETS_AT_ONCE):
            self._drive(lambda client: client.loop_read())
            if self._socket is None or not self._socket.has_more:
                break
        if (sock := self._socket) is None:
            return
        pause_s = self._pause_s(began_at, drained=not sock.has_more)
        if pause_s > 0.0:
            self._loop.remove_reader(sock)
            self._rest = self._loop.call_later(pause_s, self._read_on)
        elif sock.has_more:
            self._rest = self._loop.call_later(0, self._read_more)

    def _pause_s(self, began_at: float, *, drained: bool) -> float:
        """How long to read nothing. What the broker kept is read at once, all else by its share of the time.

        Messages that come in a stream are read together, since waking up for each costs as much as reading it. What is
        here already is no reason to wait for more.
        """
        if self._heard_retained:
            return 0.0
        pause_s = self._duty.spend(began_at, clock.now())
        if self._heard_retained is None or not drained:
            return pause_s
        is_stream = began_at - self._read_at < GATHER_S
        self._read_at = began_at + GATHER_S if is_stream else began_at
        return max(pause_s, GATHER_S) if is_stream else pause_s

    def _read_on(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._read)
            self._read_more()

    def _read_more(self) -> None:
        """Handle bytes that were read or decrypted already: no event will announce them."""
        if self._socket is not None and self._socket.has_more:
            self._read()

    def _write(self) -> None:
        self._drive(lambda client: client.loop_write())

    def _drive(self, step: Callable[[_Client], MQTTErrorCode]) -> None:
        assert self._client is not None
        try:
            result = step(self._client)
        except Exception as error:  # whatever a hostile or broken peer makes paho raise ends this session, no other
            self._finish(f"protocol error: {error!r}")
            return
        if result != MQTTErrorCode.MQTT_ERR_SUCCESS:
            self._finish(paho.error_string(result))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._drive(lambda client: client.loop_misc())
        oldest = min((one.at for one in self._outstanding.values()), default=None)
        if oldest is not None and clock.now() - oldest > self._ack_timeout_s:
            self._finish(f"no acknowledgement for {self._ack_timeout_s:g} s")

    def _on_want_write(self, client: Any, userdata: Any, sock: Any) -> None:
        if self._socket is not None:
            self._loop.add_writer(self._socket, self._write)

    def _on_written(self, client: Any, userdata: Any, sock: Any) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _on_close(self, client: Any, userdata: Any, sock: Any) -> None:
        self._detach()

    def _on_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if self._granted.done():
            return
        if not reason.is_failure:
            self._granted.set_result(None)
            return
        refused = VersionRefused if "protocol version" in str(reason).lower() else BrokerRefused
        self._granted.set_exception(refused(f"the broker refused the connection: {reason}"))

    def _on_subscribe(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        failures = [str(reason) for reason in reasons if reason.is_failure]
        if self._granted.done():
            return
        if failures:
            self._granted.set_exception(BrokerRefused(f"the broker refused a subscription: {failures[0]}"))
        else:
            self._granted.set_result(None)

    def _on_message(self, client: Any, userdata: Any, message: paho.MQTTMessage) -> None:
        self._heard_retained = bool(message.retain)
        self._deliver(MqttMessage(message.topic, bytes(message.payload), message.qos, bool(message.retain)))

    def _on_publish(self, client: Any, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        self._unwritten.discard(mid)
        handed = self._outstanding.pop(mid, None)
        if handed is not None:
            if handed.answered:
                self._deliver(PublishAck(handed.topic, str(reason) if reason.is_failure else ""))
            elif reason.is_failure:
                log.warning("the broker refused a message", topic=handed.topic, reason=str(reason))
            self._loop.call_soon(self._pump)

    def _on_disconnect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if flags.is_disconnect_packet_from_server:
            self._finish(f"the broker hung up: {reason}")
        else:  # paho's text for a closed connection is "Unspecified error"
            self._finish("the connection was lost" if str(reason) == "Unspecified error" else str(reason))

    # -- sending ---------------------------------------------------------------------------------------------------

    def publish(self, topic: str, payload: bytes, *, qos: int, retain: bool, answered: bool = False) -> bool:
        assert self._client is not None
        if self.ended.done():
            return False
        if qos == 0:
            return self._publish_at_once(self._client, topic, payload, retain)
        if len(self._outbox) >= self._max_outbox:
            return False
        self._outbox.append((topic, payload, retain, answered))
        self._idle.clear()
        self._pump()
        return True

    def _publish_at_once(self, client: _Client, topic: str, payload: bytes, retain: bool) -> bool:
        if len(self._unwritten) >= MAX_UNWRITTEN:
            return False  # the socket takes nothing; the next heartbeat will be newer
        self._unwritten.add(client.publish(topic, payload, 0, retain).mid)
        return True

    def _pump(self) -> None:
        if self._client is None or self.ended.done():
            return
        while self._outbox and len(self._outstanding) < MAX_OUTSTANDING:
            topic, payload, retain, answered = self._outbox.popleft()
            mid = self._client.publish(topic, payload, 1, retain).mid
            self._outstanding[mid] = _UnackedPublish(clock.now(), topic, answered)
        if not self._outstanding:
            self._idle.set()

    async def flush(self, timeout_s: float) -> bool:
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait((idle, self.ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return idle.done()
        finally:
            await cancel_and_wait(idle)

    # -- ending ----------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """End with a DISCONNECT, so that the broker keeps its will to itself. Never waits."""
        if self._client is not None and not self.ended.done():
            self.ended.set_result(reason)
            self._client.disconnect()
            self._drive(lambda client: client.loop_write())  # one attempt; a socket that takes nothing is simply closed
        self._finish(reason)

    def cut(self) -> None:
        """End without a DISCONNECT, as a power cut does: the broker publishes the will."""
        self._finish("cut")

    def _finish(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self._detach()

    def _detach(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._rest is not None:
            self._rest.cancel()
        if self._granted.done() and not self._granted.cancelled():
            self._granted.exception()  # a refusal that has no waiter any more is no defect
        sock, self._socket = self._socket, None
        if sock is not None and sock.fileno() >= 0:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()

    def __repr__(self) -> str:
        return f"<mqtt {self._version}, {len(self._outbox)} waiting, {len(self._outstanding)} unacknowledged>"
