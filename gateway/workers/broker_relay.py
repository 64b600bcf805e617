"""The broker relay passes on to workers what the keeper hears from the broker, each as if it had a session there.

    broker ──one session, which speaks──▶ keeper ──unix socket──▶ worker, which only listens

A broker that ties a session to its user, as `tidegate broker config` has Mosquitto do so that no client ends another's,
has one session for one gateway: sessions of workers beside the keeper's ended one another for ever. So workers have
none. A worker that begins late is told what a broker would have retained, first of all: births, deaths, inventories and
states, of which the relay holds the newest of each topic.

A worker that does not read what it is sent is cut off, and is told everything again when it comes back; so is one whose
keeper was replaced. In between a worker knows as little as without a broker: its links to targets stand.

The socket lies in a folder that only this account can enter, so nothing is proven on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from gateway.workers.channel import ProcessChannel
from tidegate import clock
from tidegate.fleet.topics import Topics
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttDisconnected, MqttLink, MqttMessage
from tidegate.runtime.backoff import Backoff

BACKOFF_BASE_S: Final = 0.05
BACKOFF_CAP_S: Final = 1.0
log = structlog.get_logger(__name__)


class RelayedUp(msgspec.Struct, frozen=True, tag=True):
    """The keeper has a session with the broker."""

    protocol: str


class RelayedDown(msgspec.Struct, frozen=True, tag=True):
    """The keeper has no session any more."""

    reason: str


class RelayedMessage(msgspec.Struct, frozen=True, tag=True):
    """A message of the broker's."""

    topic: str
    payload: bytes
    qos: int
    retained: bool


Relayed = RelayedUp | RelayedDown | RelayedMessage


class BrokerRelay:
    """The keeper's side. `opened` serves the socket; `heard` is called with each event of the keeper's link."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._up: RelayedUp | None = None
        self._kept: dict[str, RelayedMessage] = {}  # by topic, as a broker retains them
        self._workers: dict[ProcessChannel[Any], asyncio.Task[Any] | None] = {}

    @asynccontextmanager
    async def opened(self, path: Path) -> AsyncIterator[None]:
        await asyncio.to_thread(path.unlink, missing_ok=True)  # a former keeper's
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()
            for worker in self._workers:
                worker.cut()
            if serving := [task for task in self._workers.values() if task is not None]:
                await asyncio.wait(serving)

    def heard(self, event: LinkEvent) -> None:
        match event:
            case MqttConnected(protocol=protocol):
                self._up = RelayedUp(protocol)
                self._kept.clear()  # the broker says all of it again, and not what was deleted meanwhile
                self._tell(self._up)
            case MqttDisconnected(reason=reason):
                self._up = None
                self._tell(RelayedDown(reason))
            case MqttMessage() if self._topics.is_of_one_gateway(event.topic):
                pass  # what devices have stored is the keeper's alone
            case MqttMessage():
                self._pass_on(event)

    def _pass_on(self, message: MqttMessage) -> None:
        relayed = RelayedMessage(message.topic, message.payload, message.qos, message.retained)
        if self._topics.is_retained(message.topic):
            if message.payload:
                self._kept[message.topic] = msgspec.structs.replace(relayed, retained=True)
            else:
                self._kept.pop(message.topic, None)
        self._tell(relayed)

    def _tell(self, event: Relayed) -> None:
        for worker in tuple(self._workers):
            worker.send(event)
            if worker.dropped:
                worker.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker: ProcessChannel[Any] = ProcessChannel(reader, writer, Relayed)
        if self._up is not None:
            worker.send(self._up)
            for kept in self._kept.values():
                worker.send(kept)
        self._workers[worker] = asyncio.current_task()
        try:
            async for _ in worker.messages():  # none comes: this waits for its end
                pass
        finally:
            del self._workers[worker]
            worker.cut()

    def __repr__(self) -> str:
        return f"<BrokerRelay {len(self._kept)} kept, for {len(self._workers)} workers>"


class RelayedBroker(MqttLink):
    """A worker's side: a link that hears what the keeper hears, and takes nothing to publish.

    Args:
        path: the keeper's socket.
        url: of the broker, for logs.
    """

    def __init__(
        self, path: Path, url: str, *, draw: Callable[[], float], on_activity: Callable[[], None], max_inbox: int
    ) -> None:
        super().__init__(
            url, client_id="by way of the keeper", subscriptions=(), draw=draw, on_activity=on_activity,
            max_inbox=max_inbox,
        )  # fmt: skip
        self._path = path
        self._backoff = Backoff(draw, BACKOFF_BASE_S, BACKOFF_CAP_S)
        self._is_up = False

    @property
    def connected(self) -> bool:
        return self._is_up

    async def _run(self) -> None:
        while True:
            try:
                with suppress(OSError):  # there is no keeper now
                    await self._listen(*await asyncio.open_unix_connection(self._path))
            except Exception:  # a defect must not end it for good
                log.exception("what the keeper hears from the broker does not come")
            self._down("the keeper is gone")
            await clock.sleep(self._backoff.next_delay_s())

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel: ProcessChannel[Relayed] = ProcessChannel(reader, writer, Relayed)
        try:
            async for event in channel.messages():
                self._backoff.reset()
                self._take_over(event)
        finally:
            channel.cut()

    def _take_over(self, event: Relayed) -> None:
        match event:
            case RelayedUp(protocol):
                self._down("the keeper's session is another one")
                self._is_up = True
                self._sessions += 1
                self._deliver(MqttConnected(self._sessions, protocol))
            case RelayedDown(reason):
                self._down(reason)
            case RelayedMessage(topic, payload, qos, retained):
                self._deliver(MqttMessage(topic, payload, qos, retained))

    def _down(self, reason: str) -> None:
        if self._is_up:
            self._is_up = False
            self._deliver(MqttDisconnected(self._sessions, reason))

    def __repr__(self) -> str:
        return f"<RelayedBroker by {self._path}, {'up' if self._is_up else 'down'}>"
