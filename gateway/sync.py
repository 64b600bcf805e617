"""The gateway's side of MQTT: everything that devices say goes into one register, and gaps are asked about.

Devices are discovered here with no configuration: births are retained, so a gateway that starts hears of every device
at once, and of whether each still lives within a heartbeat. What a message means is decided in `tidegate/fleet`; this
file carries messages in and effects out, and tells the core when the view has changed (`on_change`): at most every
20 ms, and less often in a large fleet, however many heartbeats come; and also when somebody fell silent.

The gateway's own presence (`gw/NAME/state`, retained, with a will) and its heartbeat tell devices that somebody
listens, and what time it is.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from math import inf

import structlog

from tidegate import clock
from tidegate.fleet.merge import Effect, EpochHint, FleetRegister
from tidegate.fleet.messages import Command, GatewayState, encode
from tidegate.fleet.topics import Topics, checked_name
from tidegate.mqtt_link import Connected, Disconnected, LinkEvent, Message, MqttLink, Will

HEARTBEAT_S = 5.0
COALESCE_S = 0.02
COALESCE_PER_DEVICE_S = 0.00015  # to look at a device costs some 14 µs, so looking takes at most a tenth of the time
FAREWELL_TIMEOUT_S = 1.0
MAX_EFFECTS = 256

log = structlog.get_logger(__name__)


class FleetSync:
    """Owns the link to the broker and one task, from `async with` to its end.

    Args:
        url: of the broker, "mqtt://host:1883".
        fleet: the namespace that agents and gateways share.
        gateway_name: one live gateway per name.
        on_change: called on the loop after `register` has changed; must not block.
        draw: chance, uniform in [0, 1).
        register: another than the default one, for other limits.
        backoff_cap_s: the longest wait between attempts to reach the broker.
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
    ) -> None:
        self._topics = Topics(fleet)
        self._name = checked_name(gateway_name, "the gateway's name")
        self.register = register or FleetRegister(self._topics, draw=draw)
        self._on_change = on_change
        self._epoch = max(1, int(clock.utc_s() * 1000))
        self._wake = asyncio.Event()
        self._link = MqttLink(
            url,
            client_id=f"gw~{gateway_name}",
            subscriptions=self._topics.for_gateways,
            draw=draw,
            on_activity=self._wake.set,
            before_connect=self._make_will,
            backoff_cap_s=backoff_cap_s,
        )
        self._effects: list[tuple[float, int, Effect]] = []
        self._serial = itertools.count(1)
        self._changed = False
        self._tell_from = -inf  # not before, so that changes are told together
        self._view_changes_at = inf  # by silence alone
        self._heartbeat_at = inf
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FleetSync:
        await self._link.__aenter__()
        self._task = asyncio.create_task(self._run(), name=f"fleet-sync {self._name}")
        self._task.add_done_callback(_complain)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            if self._say_state(online=False):
                await self._link.flush(FAREWELL_TIMEOUT_S)
        finally:
            await self._link.__aexit__()

    @property
    def connected(self) -> bool:
        return self._link.connected

    async def _make_will(self) -> Will:
        return Will(self._topics.gateway_state(self._name), encode(GatewayState(self._name, False, self._epoch)))

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            for event in self._link.take():
                self._take_in(event)
            self._perform_due_effects()
            self._beat()
            self._tell()
            if not self._link.inbox:
                await self._pause()
            await clock.sleep(0)  # a flood of messages must not keep requests from their turn

    async def _pause(self) -> None:
        tell_at = self._tell_from if self._changed else inf
        effect_at = self._effects[0][0] if self._effects else inf
        until = min(tell_at, effect_at, self._heartbeat_at, self._view_changes_at)
        try:
            async with asyncio.timeout_at(until if until < inf else None):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _take_in(self, event: LinkEvent) -> None:
        match event:
            case Message():
                folded_before = self.register.counts["folded"]
                effects = self.register.fold(event.topic, event.payload, clock.now(), retained=event.retained)
                self._changed |= self.register.counts["folded"] != folded_before or not event.payload
                for effect in effects[: MAX_EFFECTS - len(self._effects)]:
                    heapq.heappush(self._effects, (effect.at, next(self._serial), effect))
            case Connected():
                self.register.control_plane(up=True, now=clock.now())
                self._say_state(online=True)
                self._heartbeat_at = clock.now()
                self._changed = True
            case Disconnected():
                self.register.control_plane(up=False, now=clock.now())
                self._heartbeat_at = inf
                self._changed = True

    def _perform_due_effects(self) -> None:
        while self._effects and self._effects[0][0] <= clock.now():
            effect = heapq.heappop(self._effects)[2]
            if self.register.is_wanted(effect):
                self._link.publish(self._topics.command(effect.device), encode(self._command(effect)), qos=1)

    def _command(self, effect: Effect) -> Command:
        id = f"{self._name}-{self._epoch:x}-{next(self._serial)}"[-64:]
        if isinstance(effect, EpochHint):
            return Command(id, "epoch_hint", seen=effect.seen, boot=effect.boot, minimum=effect.minimum)
        return Command(id, "resync")

    def _beat(self) -> None:
        if clock.now() >= self._heartbeat_at:
            self._heartbeat_at = clock.now() + HEARTBEAT_S
            self._link.publish(self._topics.gateway_heartbeat(self._name), self._state(online=True))

    def _say_state(self, *, online: bool) -> bool:
        topic = self._topics.gateway_state(self._name)
        return self._link.publish(topic, self._state(online=online), qos=1, retain=True)

    def _state(self, *, online: bool) -> bytes:
        return encode(GatewayState(self._name, online, self._epoch, utc_ms=round(clock.utc_s() * 1000)))

    def _tell(self) -> None:
        """Report a change at once, and those that follow together."""
        now = clock.now()
        if now < self._tell_from or not (self._changed or now >= self._view_changes_at):
            return
        self._changed = False
        self._tell_from = now + COALESCE_S + COALESCE_PER_DEVICE_S * len(self.register)
        self._view_changes_at = self.register.next_wake(now) or inf
        self._on_change()

    def __repr__(self) -> str:
        return f"<FleetSync {self._name} {self.register!r} {self._link!r}>"


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("fleet state has crashed; devices will look dead", exc_info=task.exception())
