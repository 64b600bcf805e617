"""Performs rollouts: hears what devices report, lets `core/versions/canary.py` decide, remembers, and then publishes.

One task. While a rollout is under way it wakes when the fleet's register has news, and once a second; always when an
operator said something or a session with the broker begins; and else every ten seconds, for reports that come late. It
rests longer the more devices there are, and looks only at rollouts that are under way or had the last word on a device.
Each turn goes in this order, and the order is what survives a kill:

    hear and decide (core) → journal what changed → publish the newest document of each device

Documents are retained and published again in each session with the broker, since a broker may come back having lost
them all; that is paced by the session's outbox. A device's newest document is the one of the greatest revision that any
rollout has asked of it, so also the last step of a rollout that ended a year ago stays asked.

Time passes for a rollout only while the broker is there, and not in the first seconds of a session, in which retained
reports still come in (`gateway/core/versions/canary.py` says why).
A disk that cannot be written stops publishing and is complained of: a device must not be asked what would be forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

import msgspec
import structlog

from gateway.core.versions.canary import CanaryRollout
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.rollouts.journal import KEPT, RolloutJournal
from gateway.delivery.rollouts.order import InvalidOrder, RolloutOrder, manifest_of, missing_artefacts, plans_of
from gateway.fleet_sync.freshness import DeviceView
from tidegate import clock
from tidegate.fleet.reported import Reported
from tidegate.models.manifest import Manifest
from tidegate.models.repository import RepositoryError
from tidegate.runtime.owned_task import OwnedTask

TICK_S: Final = 1.0
IDLE_S: Final = 10.0
BREATH_S: Final = 0.1  # between turns, however much is reported
BREATH_PER_DEVICE_S: Final = 0.0005  # to look at a device costs some 20 µs
SETTLE_S: Final = 5.0
SAVE_TIME_S: Final = 15.0  # a kill costs a deadline at most so much
log = structlog.get_logger(__name__)


class RolloutConflict(InvalidOrder):
    """It cannot begin, or not be done, as things are now; the message says what is in the way."""


class DeviceChannel(Protocol):
    """The way to devices: the gateway's session with the broker."""

    @property
    def session(self) -> int:
        """Another number in each session; 0 while there is none."""
        ...

    def publish_desired(self, device: str, message: bytes) -> bool: ...

    def devices(self, now: float) -> tuple[DeviceView, ...]: ...


@dataclass(slots=True)
class _ActiveRollout:
    order: RolloutOrder
    waves: CanaryRollout
    dirty: bool = True
    saved_at_s: float = 0.0
    begun_at: float = -inf  # the turn before may have been long before


class RolloutController:
    """`async with` goes on with what was under way, until its end.

    Args:
        on_versions: told of the manifests of versions that devices may come to have; must not block.
    """

    def __init__(
        self, store: ArtifactStore, channel: DeviceChannel, on_versions: Callable[[Iterable[Manifest]], None]
    ) -> None:
        self.store = store
        self._journal = RolloutJournal(store.root / "rollouts")
        self._channel = channel
        self._on_versions = on_versions
        self._held: dict[str, _ActiveRollout] = {}
        self._asked: dict[str, tuple[int, bytes]] = {}  # by device: its newest document
        self._source: dict[str, str] = {}  # by device: the rollout that it is of
        self._unsaid: dict[str, None] = {}  # devices whose newest document was not published in this session
        self._active = True
        self._session = 0
        self._heard_from = 0.0
        self._turned_at: float | None = None
        self._news = asyncio.Event()
        self._beginning = asyncio.Lock()
        self._task = OwnedTask(self._run, name="rollouts")

    async def __aenter__(self) -> RolloutController:
        for order, waves in await asyncio.to_thread(self._journal.load):
            held = self._held[order.spec.id] = _ActiveRollout(
                order, waves, dirty=False, saved_at_s=waves.state.elapsed_s
            )
            self._ask(held)
            try:
                await self._tell_versions(order)
            except InvalidOrder as error:  # files were taken away; devices that have them still answer by full name
                log.error("a rollout's version is unknown here", rollout=order.spec.id, reason=str(error))
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        for held in self._held.values():
            if not held.waves.state.phase.is_over:
                await self._save(held)

    def fleet_changed(self) -> None:
        """Devices have said something, or the session with the broker is another."""
        if self._active or self._channel.session != self._session:
            self._news.set()

    # what operators want

    @property
    def all(self) -> Mapping[str, CanaryRollout]:
        """By id, oldest first."""
        return {id: held.waves for id, held in self._held.items()}

    def document(self, device: str) -> tuple[int, bytes] | None:
        """(revision, message) of a device's newest document from here."""
        return self._asked.get(device)

    async def begin(self, order: RolloutOrder) -> None:
        """Start a rollout; it is remembered when this returns.

        Raises:
            Conflict: a device is in another rollout, has had a newer document, or files are missing.
            InvalidOrder: the order contradicts itself.
        """
        async with self._beginning:
            plans = await asyncio.to_thread(plans_of, order)
            lacking = await asyncio.to_thread(missing_artefacts, plans, self.store)
            if lacking:
                named = ", ".join(f"{path} ({digest[:12]}…)" for digest, path in list(lacking.items())[:5])
                raise RolloutConflict(f"{len(lacking)} files are not here: {named}; `tidegate model push` brings them")
            self._check_free(order)
            await self._tell_versions(order)
            await asyncio.to_thread(self._journal.begin, order)
            self._held[order.spec.id] = _ActiveRollout(order, CanaryRollout(order.spec), begun_at=clock.now())
            await self._forget_old()
        self._news.set()

    def command(self, id: str, verb: str, why: str) -> CanaryRollout:
        """Raises Conflict: there is no such rollout, or it is past that."""
        held = self._held.get(id)
        if held is None:
            raise RolloutConflict(f"there is no rollout {id!r}; `tidegate model status` lists them")
        phase = held.waves.state.phase
        match verb:
            case "pause":
                held.waves.pause(why)
            case "resume":
                held.waves.resume()
            case "abort":
                self._check_newest(held)
                held.waves.abort(why)
        if held.waves.state.phase is phase:
            raise RolloutConflict(f"rollout {id} is {phase}, so there is nothing to {verb}")
        held.dirty = True
        self._news.set()
        return held.waves

    def _check_free(self, order: RolloutOrder) -> None:
        if order.spec.id in self._held:
            raise RolloutConflict(f"there is a rollout {order.spec.id!r} already")
        for id, held in self._held.items():
            shared = set(held.order.spec.devices) & set(order.spec.devices)
            if shared and not held.waves.state.phase.is_over:
                raise RolloutConflict(
                    f"{min(shared)} is in rollout {id}, which is {held.waves.state.phase}: wait or abort it"
                )
        known = {view.name: self.newest_revision(view) for view in self._channel.devices(clock.now())}
        for device, revisions in order.spec.revisions.items():
            if device not in known:
                raise RolloutConflict(f"no device {device!r} was ever heard of here")
            if revisions.forward <= known[device]:
                raise RolloutConflict(f"{device} has had revision {known[device]} meanwhile: order again")

    def _check_newest(self, held: _ActiveRollout) -> None:
        for device in held.waves.asks:
            revisions, newest = held.order.spec.revisions[device], self._asked.get(device, (0, b""))[0]
            if newest > revisions.back:
                raise RolloutConflict(
                    f"{device} has been given a newer document since (revision {newest}): roll the older version out "
                    f"instead, `tidegate model rollout {held.order.spec.model} --version OLDER`"
                )

    def newest_revision(self, view: DeviceView) -> int:
        """The greatest that a device has accepted, or was asked or promised from here."""
        accepted = view.reported.accepted.get(f"device/{view.name}", 0) if view.reported else 0
        promised = (
            held.order.spec.revisions[view.name].back
            for held in self._held.values()
            if view.name in held.order.spec.revisions
        )
        return max(accepted, *promised, 0)

    # turns

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._turn()
            except Exception:
                log.exception("rollouts have a defect; they go on in a moment")
            await clock.sleep(BREATH_S + BREATH_PER_DEVICE_S * len(self._asked))
            try:
                async with asyncio.timeout(TICK_S if self._active else IDLE_S):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _turn(self) -> None:
        now = clock.now()
        passed_s = self._passed_s(now)
        reports = {view.name: view.reported for view in self._channel.devices(now)} if self._session else {}
        newest = set(self._source.values())
        live = [one for id, one in self._held.items() if id in newest or not one.waves.state.phase.is_over]
        for held in live:  # another may begin meanwhile
            await self._decide(held, reports, min(passed_s, now - held.begun_at))
        self._publish()
        self._active = bool(self._unsaid) or any(
            held.dirty or not held.waves.state.phase.is_over for held in self._held.values()
        )

    def _passed_s(self, now: float) -> float:
        """Time since the last turn in which devices could be heard; notices a new session."""
        if self._session != self._channel.session:
            self._session, self._heard_from, self._turned_at = self._channel.session, now + SETTLE_S, None
            self._unsaid = dict.fromkeys(self._asked)
        if not self._session or now < self._heard_from:
            return 0.0
        passed_s = 0.0 if self._turned_at is None else now - self._turned_at
        self._turned_at = now
        return passed_s

    async def _decide(self, held: _ActiveRollout, reports: Mapping[str, Reported | None], passed_s: float) -> None:
        phase = held.waves.state.phase
        held.dirty |= held.waves.hear(reports)
        held.dirty |= bool(self._session) and held.waves.advance(passed_s)
        if held.waves.state.phase is not phase:
            say = log.warning if held.waves.state.phase in ("returning", "paused") else log.info
            say(f"rollout is {held.waves.state.phase}", rollout=held.order.spec.id, reason=held.waves.state.reason)
        if held.dirty or held.waves.state.elapsed_s - held.saved_at_s > SAVE_TIME_S:
            await self._save(held)

    async def _save(self, held: _ActiveRollout) -> None:
        """Remember how far it is, and only then ask for it."""
        id, asks = held.order.spec.id, held.waves.asks
        raw, elapsed_s = msgspec.json.encode(held.waves.state), held.waves.state.elapsed_s
        held.dirty = False  # before the wait: what changes meanwhile is saved in the next turn
        try:
            await asyncio.to_thread(self._journal.save, id, raw)
            held.saved_at_s = elapsed_s
            self._ask(held, asks)
        except OSError as error:
            held.dirty = True
            log.error("a rollout cannot be remembered and stands still", rollout=id, reason=str(error))

    def _ask(self, held: _ActiveRollout, asks: Mapping[str, bool] | None = None) -> None:
        """Args: asks: what was remembered; None: all that it asks now was."""
        for device, back in (held.waves.asks if asks is None else asks).items():
            revisions = held.order.spec.revisions[device]
            revision = revisions.back if back else revisions.forward
            if revision > self._asked.get(device, (0, b""))[0]:
                self._asked[device] = revision, held.order.documents[device].message(back=back)
                self._source[device] = held.order.spec.id
                self._unsaid[device] = None

    def _publish(self) -> None:
        for device in list(self._unsaid) if self._session else ():
            if not self._channel.publish_desired(device, self._asked[device][1]):
                return  # the outbox is full, or the session is over: the next turn goes on here
            del self._unsaid[device]

    # what is known and what is forgotten

    async def _tell_versions(self, order: RolloutOrder) -> None:
        def read() -> list[Manifest]:
            return [manifest_of(plan, order.spec.model, self.store) for plan in plans_of(order)]

        try:
            self._on_versions(await asyncio.to_thread(read))
        except RepositoryError as error:
            raise InvalidOrder(str(error)) from error

    async def _forget_old(self) -> None:
        newest = set(self._source.values())
        over = [id for id, held in self._held.items() if held.waves.state.phase.is_over and id not in newest]
        for id in over[: max(0, len(over) - KEPT)]:
            del self._held[id]
            await asyncio.to_thread(self._journal.forget, id)

    def __repr__(self) -> str:
        return f"<RolloutController {len(self._held)} known, {len(self._asked)} devices asked, session {self._session}>"
