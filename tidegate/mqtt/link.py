"""One lasting connection to an MQTT broker: it comes back by itself and keeps nothing that is out of date.

The user sees three things in one ordered stream (`take`): `MqttConnected` once the subscriptions stand, `MqttMessage`,
and `MqttDisconnected` with the reason. A session is one CONNECT (`session.py`). Whatever belongs to it dies with it:
the outbox is dropped when the link drops, because a birth or a command of a past session must not be sent in the next
one. Durable queues belong to the application, which knows what may be discarded.

MQTT 5 where the broker speaks it, else 3.1.1 ("auto"): a broker that refuses the version is tried with the other at
once, and the one that worked last is tried first. Nothing here needs 5; with it, a refused publish is noticed
and the broker bounds what it sends.

`redial.py` decides how long to wait between attempts: seconds for a broker that is away, up to half a minute for one
that refuses us. The broker is reached before anything is prepared for it, so that an agent whose broker
is away for a day does not write a new epoch to its disk every other second.

A broker that was reached is given four times as long as one that may not be there. When a whole fleet comes back at
once it is slow because it has much to do, and to give up and begin anew gives it more: of 10,000 devices with five
seconds of patience each failed twice, and the return took 41 s; with twenty seconds none did, and it took 22 s.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

import structlog

from tidegate import clock
from tidegate.mqtt.broker_url import BrokerUrl, Version
from tidegate.mqtt.errors import BrokerHungUp, BrokerRefused, MqttError, VersionRefused
from tidegate.mqtt.inbox import Inbox
from tidegate.mqtt.redial import RedialPolicy, SessionEnd
from tidegate.mqtt.session import MqttMessage, MqttSession, PublishAck, Will
from tidegate.runtime.owned_task import OwnedTask

__all__ = [
    "BrokerUrl",
    "LinkEvent",
    "MqttConnected",
    "MqttDisconnected",
    "MqttLink",
    "MqttMessage",
    "PublishAck",
    "Will",
]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MqttConnected:
    """The session stands and its subscriptions are granted."""

    session: int  # counts from 1
    protocol: str


@dataclass(frozen=True, slots=True)
class MqttDisconnected:
    session: int
    reason: str


LinkEvent = MqttConnected | MqttDisconnected | MqttMessage | PublishAck


class MqttLink:
    """Owns one task and at most one socket, from `async with` to its end.

    Args:
        url: see `BrokerUrl`.
        client_id: one live session per id; a second one takes over.
        subscriptions: (filter, QoS), granted before `MqttConnected`.
        draw: chance, uniform in [0, 1), for the waits between attempts.
        on_activity: called whenever `take` has something; must not block.
        before_connect: awaited before each CONNECT for its will, once the broker is reached. An OSError there counts as
            a failed attempt.
        keepalive_s: a broker drops a silent session after 1.5 of it; smaller costs pings.
        connect_timeout_s: for each address of the broker's to take the connection.
        session_timeout_s: for all of an attempt, from the name to the granted subscriptions.
        ack_timeout_s: a QoS 1 message that is not acknowledged in this time ends the session.
        max_inbox: messages that wait for `take`; beyond, the oldest is dropped.
        max_outbox: QoS 1 messages that wait for their turn; beyond, `publish` refuses.
        tls: makes the context of each connection to an `mqtts://` address, so that a renewed certificate is used from
            the next one on. None: the machine's trusted CAs, and no certificate of ours.
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
        session_timeout_s: float = 20.0,
        ack_timeout_s: float = 10.0,
        max_inbox: int = 4096,
        max_outbox: int = 64,
        backoff_base_s: float = 0.5,
        backoff_cap_s: float = 30.0,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self.url = BrokerUrl.parse(url)
        self._tls = tls or ssl.create_default_context
        self.client_id = client_id
        self.inbox: Inbox[LinkEvent] = Inbox(max_inbox)
        self._subscriptions = subscriptions
        self._on_activity = on_activity
        self._before_connect = before_connect
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._session_timeout_s = session_timeout_s
        self._ack_timeout_s = ack_timeout_s
        self._max_outbox = max_outbox
        self._redial = RedialPolicy(draw, backoff_base_s, backoff_cap_s)
        self._versions: tuple[Version, ...] = ()  # to be tried in this order
        self._sessions = 0
        self._session: MqttSession | None = None
        self._task = OwnedTask(self._run, name=f"mqtt-link {self.client_id}")
        self._complained = False
        self._stay_away_until = -inf

    async def __aenter__(self) -> MqttLink:
        self._versions = ("5", "3.1.1") if self.url.version == "auto" else (self.url.version,)
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def session(self) -> MqttSession | None:
        """The session that stands; None while there is none."""
        return self._session

    @property
    def failures(self) -> int:
        """Attempts in vain, in a row and of one kind; a session that ended soon counts as one."""
        return self._redial.failures

    def take(self, limit: int = 256) -> list[LinkEvent]:
        """What has happened since, oldest first, at most `limit` of it."""
        return self.inbox.take(limit)

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, answered: bool = False
    ) -> bool:
        """Hand one message over; False when there is no session or no room, and the message is gone.

        Args:
            answered: whether a `PublishAck` shall report the broker's answer; with QoS 1.
        """
        session = self._session
        return session is not None and session.publish(topic, payload, qos=qos, retain=retain, answered=answered)

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

    def stand_down(self, reason: str, for_s: float) -> None:
        """End the session properly (no will), and begin none for so long."""
        self._stay_away_until = clock.now() + for_s
        if self._session is not None:
            self._session.end(reason)

    def cut(self) -> None:
        """End the session as a power cut does: without a goodbye, so that the will is published."""
        if self._session is not None:
            self._session.cut()

    async def _run(self) -> None:
        while True:
            began_at = clock.now()
            try:
                reason = await self._any_session()
                end = SessionEnd.of_session(clock.now() - began_at)
            except (MqttError, OSError) as error:
                reason = str(error) or type(error).__name__
                end = SessionEnd.REFUSED if isinstance(error, BrokerRefused) else SessionEnd.AWAY
            except Exception as error:  # a defect of ours or of paho's must not leave this process deaf for good
                log.exception("an attempt to reach the broker has a defect", broker=str(self.url))
                reason, end = repr(error), SessionEnd.REFUSED
            self._complain(reason)
            await clock.sleep(max(self._redial.wait_s(end), self._stay_away_until - clock.now()))

    async def _any_session(self) -> str:
        """A session in the version that worked last, or else in the other; returns why it ended."""
        *others, last = self._versions
        for version in others:
            try:
                return await self._one_session(version)
            except (VersionRefused, BrokerHungUp):  # as one does that does not know the version
                continue
        return await self._one_session(last)

    async def _one_session(self, version: Version) -> str:
        """One CONNECT from beginning to end; returns why it ended. Raises MqttError or OSError if it never began."""
        session = MqttSession(version, self._deliver, self._ack_timeout_s, self._max_outbox)
        try:
            async with asyncio.timeout(self._session_timeout_s):
                await session.reach(self.url, self._tls() if self.url.secure else None, self._connect_timeout_s)
                will = await self._before_connect() if self._before_connect else None
                await session.open(self.client_id, self._keepalive_s, will, self._subscriptions)
        except TimeoutError:
            session.end("timeout")
            raise MqttError(f"no session within {self._session_timeout_s:g} s") from None
        except BaseException:
            session.end("given up")
            raise
        self._versions = (version, *(one for one in self._versions if one != version))
        return await self._live(session)

    async def _live(self, session: MqttSession) -> str:
        self._sessions += 1
        self._session = session
        self._deliver(MqttConnected(self._sessions, self._versions[0]))
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
            self._deliver(MqttDisconnected(self._sessions, reason))
        return reason

    def _deliver(self, event: LinkEvent) -> None:
        # Messages of QoS 1 and the link's own events are never replaced by later ones.
        if isinstance(event, MqttMessage):
            self.inbox.put(event, event.topic if event.qos == 0 else "", len(event.payload))
        else:
            self.inbox.put(event)
        self._on_activity()

    def _complain(self, reason: str) -> None:
        if not self._complained:
            log.warning("no broker; trying again", broker=str(self.url), client=self.client_id, reason=reason)
        self._complained = True

    def __repr__(self) -> str:
        state = (
            f"session {self._sessions} {self._session!r}"
            if self._session
            else f"down, {self._redial.failures} failures"
        )
        return f"<MqttLink {self.client_id} at {self.url} {state}>"
