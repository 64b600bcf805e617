"""One lasting connection to an MQTT broker: it comes back by itself and keeps nothing that is out of date.

The user sees three things in one ordered stream (`take`): `Connected` once the subscriptions stand, `Message`, and
`Disconnected` with the reason. A session is one CONNECT (`mqtt_session.py`). Whatever belongs to it dies with it: the
outbox is dropped when the link drops, because a birth or a command of a past session must not be sent in the next one.
Durable queues belong to the application, which knows what may be thrown away.

MQTT 5 where the broker speaks it, else 3.1.1 ("auto"): a broker that refuses the version is tried with the other at
once, and the one that worked is tried first from then on. Nothing here needs 5; with it, a refused publish is noticed
and the broker bounds what it sends.

Failed attempts wait with full jitter from half a second to half a minute; only a session that stood for half a minute
forgives the failures before it, so two agents that were given one name drift apart instead of taking turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from tidegate import clock
from tidegate.backoff import Backoff
from tidegate.fleet.inbox import Inbox
from tidegate.mqtt_session import BrokerUrl, Message, MqttError, Session, Version, VersionRefused, Will

__all__ = ["BrokerUrl", "Connected", "Disconnected", "LinkEvent", "Message", "MqttLink", "Will"]

HEALTHY_AFTER_S: Final = 30.0  # a session this old forgives the failures before it

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Connected:
    """The session stands and its subscriptions are granted."""

    session: int  # counts from 1
    protocol: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    session: int
    reason: str


LinkEvent = Connected | Disconnected | Message


class MqttLink:
    """Owns one task and at most one socket, from `async with` to its end.

    Args:
        url: see `BrokerUrl`.
        client_id: one live session per id; a second one takes over.
        subscriptions: (filter, QoS), granted before `Connected`.
        draw: chance, uniform in [0, 1), for the waits between attempts.
        on_activity: called whenever `take` has something; must not block.
        before_connect: awaited before each CONNECT for its will. An OSError there counts as a failed attempt.
        keepalive_s: a broker drops a silent session after 1.5 of it; smaller costs pings.
        ack_timeout_s: a QoS 1 message that is not acknowledged in this time ends the session.
        max_inbox: messages that wait for `take`; beyond, the oldest is dropped.
        max_outbox: QoS 1 messages that wait for their turn; beyond, `publish` refuses.
    """

    def __init__(
        self,
        url: str,
        *,
        client_id: str,
        subscriptions: tuple[tuple[str, int], ...],
        draw: Callable[[], float],
        on_activity: Callable[[], None],
        before_connect: Callable[[], Awaitable[Will | None]] | None = None,
        keepalive_s: int = 15,
        connect_timeout_s: float = 5.0,
        ack_timeout_s: float = 10.0,
        max_inbox: int = 4096,
        max_outbox: int = 64,
        backoff_base_s: float = 0.5,
        backoff_cap_s: float = 30.0,
    ) -> None:
        self.url = BrokerUrl.parse(url)
        self.client_id = client_id
        self.inbox: Inbox[LinkEvent] = Inbox(max_inbox)
        self._subscriptions = subscriptions
        self._on_activity = on_activity
        self._before_connect = before_connect
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._ack_timeout_s = ack_timeout_s
        self._max_outbox = max_outbox
        self._backoff = Backoff(draw, backoff_base_s, backoff_cap_s)
        self._versions: deque[Version] = deque()
        self._sessions = 0
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    async def __aenter__(self) -> MqttLink:
        self._versions = deque(("5", "3.1.1") if self.url.version == "auto" else (self.url.version,))
        self._task = asyncio.create_task(self._run(), name=f"mqtt-link {self.client_id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def connected(self) -> bool:
        return self._session is not None

    def take(self, limit: int = 256) -> list[LinkEvent]:
        """What has happened since, oldest first, at most `limit` of it."""
        return self.inbox.take(limit)

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> bool:
        """Hand one message over; False when there is no session or no room, and the message is gone."""
        return self._session is not None and self._session.publish(topic, payload, qos=qos, retain=retain)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until every QoS 1 message is acknowledged; False when the session or the time ended first."""
        if self._session is None:
            return False
        return await self._session.flush(timeout_s)

    def restart(self, reason: str) -> None:
        """End the session properly (no will) and begin another."""
        if self._session is not None:
            self._complained = True  # not a fault
            self._session.end(reason)

    async def _run(self) -> None:
        while True:
            began_at = clock.now()
            try:
                reason = await self._one_session()
            except VersionRefused as error:
                reason = str(error)
                if self._try_the_other_version():
                    continue
            except (MqttError, OSError) as error:
                reason = str(error) or type(error).__name__
            self._complain(reason)
            if clock.now() - began_at >= HEALTHY_AFTER_S:
                self._backoff.reset()
            await clock.sleep(self._backoff.next_delay_s())

    async def _one_session(self) -> str:
        """One CONNECT from beginning to end; returns why it ended. Raises MqttError or OSError if it never began."""
        will = await self._before_connect() if self._before_connect else None
        session = Session(self._versions[0], self._deliver, self._ack_timeout_s, self._max_outbox)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await session.open(self.url, self.client_id, self._keepalive_s, will, self._subscriptions)
        except TimeoutError:
            session.end("timeout")
            raise MqttError(f"no session within {self._connect_timeout_s:g} s") from None
        except BaseException:
            session.end("given up")
            raise
        return await self._live(session)

    async def _live(self, session: Session) -> str:
        self._sessions += 1
        self._session = session
        self._deliver(Connected(self._sessions, self._versions[0]))
        log.info("connected to the broker", broker=str(self.url), client=self.client_id, mqtt=self._versions[0])
        self._complained = False
        reason = "closed"
        try:
            # Waiting on the future itself would let a cancellation of this task pass for the session's end, and the
            # DISCONNECT would not be sent.
            await asyncio.wait((session.ended,))
            reason = session.ended.result()
        finally:
            session.end("closed")
            self._session = None
            self._deliver(Disconnected(self._sessions, reason))
        return reason

    def _try_the_other_version(self) -> bool:
        """Rotate the versions; whether the next one is untried since the last success."""
        self._versions.rotate(-1)
        return len(self._versions) > 1 and self._versions[0] != "5"

    def _deliver(self, event: LinkEvent) -> None:
        # Heartbeats replace one another; what was asked to arrive, and the link's own words, never do.
        self.inbox.put(event, event.topic if isinstance(event, Message) and event.qos == 0 else "")
        self._on_activity()

    def _complain(self, reason: str) -> None:
        if not self._complained:
            log.warning("no broker; trying again", broker=str(self.url), client=self.client_id, reason=reason)
        self._complained = True

    def __repr__(self) -> str:
        state = (
            f"session {self._sessions} {self._session!r}"
            if self._session
            else f"down, {self._backoff.failures} failures"
        )
        return f"<MqttLink {self.client_id} at {self.url} {state}>"
