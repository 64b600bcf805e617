"""The announcer says over MQTT that this pool is there, where it is, and that it drains.

    session → state (retained) → state again every 20 s … → state, draining → death by its own word, state removed

The broker publishes the session's last will when the pool dies or is cut off; gateways then go by their links. Each
session has an epoch of its own, from the clock: a will that comes late is older than the state that followed. Where the
clock was set back, the pool finds its own retained state of an earlier life with a greater epoch, and begins a session
above it. It needs no disk for that.

Serving never waits for any of this: without a broker the pool serves every gateway that reaches it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from math import inf
from typing import Final

import structlog

from tidegate import clock
from tidegate.fleet.messages import MAX_EPOCH, BadMessage
from tidegate.fleet.pool_messages import RESAY_S, PoolDeath, PoolState, decode_pool, encode_pool
from tidegate.fleet.topics import PoolTopic, Topics
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttDisconnected, MqttLink, MqttMessage, Will
from tidegate.mqtt.loop import MqttLoop
from tidegate.placement_pin import Zone

JITTER: Final = 0.1  # of the time between two words, so that the pools of a site do not speak in step

log = structlog.get_logger(__name__)


class PoolAnnouncer:
    """Announces the pool from `async with` to its end.

    Args:
        url: of the broker, "mqtt://host:1883".
        fleet: the namespace that pools and gateways share.
        pool: this pool's name; one live pool per name.
        address: HOST:PORT where gateways reach it.
        zone: where it says that it is; None: it does not say.
        draw: chance, uniform in [0, 1).
        tls: for an address with `mqtts://`, see `MqttLink`.
    """

    def __init__(
        self,
        url: str,
        *,
        fleet: str,
        pool: str,
        address: str,
        zone: Zone | None,
        draw: Callable[[], float],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._topics = Topics(fleet)
        self._pool = pool
        self._address = address
        self._zone = zone
        self._draw = draw
        self._boot = f"{int(draw() * 2**48):012x}"
        self._epoch = 0
        self._at_least = 1
        self._sequence = 0
        self._draining = False
        self._say_at = inf
        self._loop = MqttLoop(
            lambda on_activity: MqttLink(
                url,
                client_id=f"pool~{pool}",
                subscriptions=((self._topics.pool(pool, PoolTopic.STATE), 1),),
                draw=draw,
                on_activity=on_activity,
                before_connect=self._begin_epoch,
                tls=tls,
            ),
            name=f"announcer {pool}",
            take_in=self._take_in,
            turn=self._turn,
            farewell=self._say_goodbye,
            crash_means="announcing has crashed; gateways will go by their links alone",
        )
        self._link = self._loop.link

    async def __aenter__(self) -> PoolAnnouncer:
        await self._loop.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._loop.__aexit__()

    def drain(self) -> None:
        """Say from now on that the pool finishes what it has and takes nothing new."""
        self._draining = True
        if self._link.connected:
            self._say()

    async def _begin_epoch(self) -> Will:
        self._epoch = min(MAX_EPOCH, max(self._epoch + 1, self._at_least, int(clock.utc_s() * 1000)))
        self._sequence = 0
        will = PoolDeath(self._pool, self._epoch, self._boot, "lost")
        return Will(self._topics.pool(self._pool, PoolTopic.DEATH), encode_pool(will))

    def _turn(self) -> float | None:
        if self._link.connected and self._epoch < self._at_least:
            self._link.restart("the broker keeps a greater epoch of this pool")
        elif clock.now() >= self._say_at:
            self._say()
        return self._say_at if self._say_at < inf else None

    def _take_in(self, event: LinkEvent) -> None:
        match event:
            case MqttConnected() if self._epoch >= self._at_least:
                self._say()
                # The will of an earlier session would stay at the broker for ever.
                self._link.publish(self._topics.pool(self._pool, PoolTopic.DEATH), b"", qos=1, retain=True)
            case MqttDisconnected():
                self._say_at = inf
            case MqttMessage() if event.payload:
                self._hear(event)

    def _hear(self, message: MqttMessage) -> None:
        """Take in a state of this name: our own words come back, and all others are another process's."""
        try:
            state = decode_pool(self._pool, PoolTopic.STATE, message.payload)
        except BadMessage as error:
            log.info("ignored a message", topic=message.topic, reason=str(error))
            return
        if not isinstance(state, PoolState) or state.boot == self._boot:
            return
        if not message.retained:
            log.error(
                "another pool has this name: gateways use one of the two",
                pool=self._pool,
                address=state.address,
                way_out="give one of them another `name`",
            )
        elif self._epoch <= state.epoch < MAX_EPOCH:
            self._at_least = state.epoch + 1  # what is retained comes before the session stands

    def _say(self) -> bool:
        self._sequence += 1
        state = PoolState(
            self._pool, self._epoch, self._sequence, self._boot, self._address, zone=self._zone, draining=self._draining
        )
        self._say_at = clock.now() + RESAY_S * (1.0 + JITTER * (2.0 * self._draw() - 1.0))
        return self._link.publish(
            self._topics.pool(self._pool, PoolTopic.STATE), encode_pool(state), qos=1, retain=True
        )

    def _say_goodbye(self) -> bool:
        if not self._link.connected:
            return False
        death = PoolDeath(self._pool, self._epoch, self._boot, "shutdown")
        self._link.publish(self._topics.pool(self._pool, PoolTopic.DEATH), encode_pool(death), qos=1)
        # Removed, so that pools with names of a day do not pile up at the broker.
        return self._link.publish(self._topics.pool(self._pool, PoolTopic.STATE), b"", qos=1, retain=True)

    def __repr__(self) -> str:
        return f"<PoolAnnouncer {self._pool} at {self._address}{', draining' if self._draining else ''} {self._link!r}>"
