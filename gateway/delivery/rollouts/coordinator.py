"""The rollout controller feeds devices' reports to `core/versions/canary.py`, journals decisions and publishes them.

It is one task. While a rollout is under way it wakes when the fleet registry changes, and once a second; always when an
operator sends a command or a session with the broker begins; and else every ten seconds, for late reports. It pauses
longer the more devices there are, and looks only at rollouts that are under way or own a device's newest document.
Each turn runs in this order, which is what makes it survive a kill:

    reports and decision (core) → journal what changed → publish the newest document of each device

A configuration's rollout differs in what devices report and in nothing else; afterwards the same turns compare what
they have with what is desired, and send a document again (`gateway/core/versions/configuration_drift.py`).

Documents are retained and published again in each session with the broker, since a broker may have lost all of them;
the session's outbox sets the pace. A device's newest document is the one of the greatest revision that any rollout has
requested of it, so the last step of a rollout that ended a year ago remains requested.

Time passes for a rollout only during a session with the broker, and not in its first seconds, in which retained reports
still arrive (`gateway/core/versions/canary.py` says why).
Of several gateways with a store one conducts, and another takes over if it dies (`conductor_lease.py`): states are then
recorded in the store too, under a fencing number, before they are journalled and published. A gateway that does not
conduct decides and publishes nothing, and reads there how its rollouts are (`followed_rollouts.py`).

A disk that cannot be written stops publishing and is logged: a device must not be given what a restart would forget.

What an operator is told holds. An order and a command succeed once they are recorded; both end so even if the caller
leaves meanwhile. An order that cannot be recorded is undone, and what cannot be undone never begins by itself
(`journal.py`); a timeout of the store may have recorded it, so it is removed there as soon as the store answers. A
command that cannot be recorded is an error for its operator, and yet stays and is tried again, since it may be what
stops a bad version: until then the rollout stands still anyway. It outlives a new lease of this gateway, since a state
that only this gateway can have recorded yields to what this gateway holds; it is lost where another gateway has gone on
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from typing import Final, Protocol

import msgspec
import structlog

from gateway.core.versions.canary import CanaryRollout, RolloutPhase, RolloutSpec
from gateway.core.versions.configuration_drift import Comparison, ConfiguredDevice, DesiredHere, DriftWatch, compared
from gateway.delivery.artifacts.store import ArtifactFolderFails, ArtifactStore
from gateway.delivery.rollouts.conductor_lease import ConductorLease, NotConducting
from gateway.delivery.rollouts.followed_rollouts import FOLLOW_S, FollowedRollouts, PreferredVersions
from gateway.delivery.rollouts.journal import KEPT, RolloutJournal, rollout_as_recorded
from gateway.delivery.rollouts.order import (
    InvalidOrder,
    RolloutOrder,
    configuration_of,
    decode_order,
    has_way_back,
    manifest_of,
    manifests_here,
    missing_artefacts,
    plans_of,
)
from gateway.delivery.uninterrupted import uninterrupted
from gateway.fleet_sync.freshness import DeviceView
from gateway.store.shared_store import StoreUnavailable
from tidegate import clock
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.reported import Reported
from tidegate.models.manifest import Manifest
from tidegate.models.repository import RepositoryError
from tidegate.runtime.owned_task import OwnedTask
from tidegate.types import TargetId

TICK_S: Final = 1.0
IDLE_S: Final = 10.0
PAUSE_S: Final = 0.1  # between turns, at any rate of reports
PAUSE_PER_DEVICE_S: Final = 0.0005  # a turn costs some 20 µs for each device
SETTLE_S: Final = 5.0
SAVE_TIME_S: Final = 15.0  # a kill loses at most this much elapsed time
COMMANDED: Final = {"pause": RolloutPhase.PAUSED, "resume": RolloutPhase.RUNNING, "abort": RolloutPhase.RETURNING}
log = structlog.get_logger(__name__)


class RolloutConflict(InvalidOrder):
    """The present state does not allow a rollout or a command; the message says what is in the way."""


class NotRecorded(RolloutConflict):
    """An order or a command cannot be recorded now; the message says why, and what becomes of it."""


class DeviceChannel(Protocol):
    """The gateway's session with the broker, which reaches devices."""

    @property
    def session(self) -> int:
        """The number of the present session, different for each; 0 while there is none."""
        ...

    def publish_desired(self, device: str, message: bytes) -> bool: ...

    def devices(self, now: float) -> tuple[DeviceView, ...]: ...


@dataclass(slots=True)
class _ActiveRollout:
    order: RolloutOrder
    waves: CanaryRollout
    dirty: bool = True
    saved_at_s: float = 0.0
    begun_at: float = -inf  # the last turn may be long past when a rollout begins
    told: RolloutPhase | None = None  # the phase of which the preferred versions know
    trouble: str = ""  # why it cannot be recorded, as the log has said
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)  # an older state must not overtake a newer one
    # Digests of states, of which the store has one unless another gateway has recorded its own: the newest that is
    # known to be there, and those that were sent since.
    in_store: set[bytes] = field(default_factory=set)


class RolloutController:
    """Runs all rollouts of a gateway; `async with` resumes rollouts that were under way.

    Args:
        on_versions: called with the manifests of versions that devices may come to have; must not block.
        preferred: told of each rollout that begins and of each that is called back.
        serving: by version of a model that is served now: the targets.
        lease: decides whether this gateway conducts; None: it does.
    """

    def __init__(
        self,
        store: ArtifactStore,
        channel: DeviceChannel,
        on_versions: Callable[[Iterable[Manifest]], None],
        preferred: PreferredVersions,
        serving: Callable[[str], Mapping[str, Sequence[str]]],
        lease: ConductorLease | None = None,
    ) -> None:
        self.store = store
        self.lease = lease
        self._fence = ""  # of the lease under which this gateway has taken over what there is
        self._journal = RolloutJournal(store.root / "rollouts")
        self._channel = channel
        self._on_versions = on_versions
        self._preferred = preferred
        self._serving = serving
        self._held: dict[str, _ActiveRollout] = {}
        self._followed = FollowedRollouts(self._announce_if_there, preferred)
        self._refused: set[str] = set()  # orders that were not begun here, and may be in the store
        self._asked: dict[str, tuple[int, bytes]] = {}  # by device: its newest document
        self._source: dict[str, str] = {}  # by device: the rollout of that document
        self._configured: dict[str, DesiredHere] = {}  # by device: what its newest document says of its configuration
        self.drift = DriftWatch()
        self._looked_at = -inf  # for drift
        self._unpublished: dict[str, None] = {}  # devices whose newest document was not published in this session
        self._active = True
        self._session = 0
        self._settled_at = 0.0
        self._turned_at: float | None = None
        self._news = asyncio.Event()
        self._beginning = asyncio.Lock()
        self._task = OwnedTask(self._run, name="rollouts")

    async def __aenter__(self) -> RolloutController:
        for order, waves in await asyncio.to_thread(self._journal.load):
            phase = waves.state.phase
            untold = phase is RolloutPhase.RETURNING or waves.state.wave < 0  # a kill may have come in between
            held = self._held[order.spec.id] = _ActiveRollout(
                order, waves, dirty=False, saved_at_s=waves.state.elapsed_s, told=None if untold else phase
            )
            self._ask(held)
            try:
                await self._announce_versions(order)
            except InvalidOrder as error:  # files were deleted; devices that have them still answer under the full name
                log.error("a rollout's version is unknown here", rollout=order.spec.id, reason=str(error))
        if self.lease is not None:
            await self._read_all(self.lease)
            self.lease.watch(self._news.set)
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        for held in list(self._held.values()):  # an order may end meanwhile
            if self.conducts and (held.dirty or not held.waves.state.phase.is_over):
                await self._save(held)

    def fleet_changed(self) -> None:
        """Wake the task: devices have reported, or the session with the broker has changed."""
        if self._active or self._channel.session != self._session:
            self._news.set()

    # operators' commands

    @property
    def all(self) -> Mapping[str, CanaryRollout]:
        """All rollouts by id, oldest first; where another gateway conducts, as it has recorded them."""
        held = {id: held.waves for id, held in self._held.items()}
        return held | self._followed.all if self._follows else held

    def document(self, device: str) -> tuple[int, bytes] | None:
        """Return (revision, message) of the newest document that there is for a device."""
        own, followed = self._asked.get(device), self._followed.document(device) if self._follows else None
        return max((one for one in (own, followed) if one is not None), default=None)

    async def begin(self, order: RolloutOrder) -> None:
        """Start a rollout, which is recorded when this returns. A caller that is cancelled waits for the outcome.

        Raises:
            RolloutConflict: a device is in another rollout, has had a newer document, or files are missing.
            NotRecorded: it does not begin, since it cannot be recorded.
            InvalidOrder: the order contradicts itself.
        """
        self._check_conducts()
        await uninterrupted(self._begin(order))

    async def _begin(self, order: RolloutOrder) -> None:
        async with self._beginning:
            plans = await asyncio.to_thread(plans_of, order)
            try:
                lacking = await asyncio.to_thread(missing_artefacts, plans, self.store)
            except ArtifactFolderFails as error:
                raise NotRecorded(str(error)) from error
            if lacking:
                named = ", ".join(f"{path} ({digest[:12]}…)" for digest, path in list(lacking.items())[:5])
                raise RolloutConflict(f"{len(lacking)} files are not here: {named}; `tidegate model push` brings them")
            self._check_free(order)
            await self._announce_versions(order)
            await self._record_order(order)
            held = _ActiveRollout(order, CanaryRollout(order.spec), begun_at=clock.now(), in_store={_digest(b"")})
            self._held[order.spec.id] = held
            await self._save(held)  # confirms it; where that fails, it stands still, and a turn tries again
            await self._forget_old()
        self._news.set()

    async def command(self, id: str, verb: str, why: str, *, leave_none: bool = False) -> CanaryRollout:
        """Pause, resume or abort a rollout. A caller that is cancelled waits for the outcome.

        Args:
            leave_none: whether an abort may take the last served version of a model away.

        Raises:
            RolloutConflict: it is unknown, its phase does not allow that, or no target would serve the model.
            NotRecorded: the command may yet be lost; until then this gateway tries to record it.
        """
        self._check_conducts()
        return await uninterrupted(self._command(id, verb, why, leave_none))

    async def _command(self, id: str, verb: str, why: str, leave_none: bool) -> CanaryRollout:
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
                if not leave_none:
                    self._check_left(held)
                held.waves.abort(why)
        unrecorded = held.dirty and phase is COMMANDED[verb]  # perhaps by the same command, which is said again
        if held.waves.state.phase is phase and not unrecorded:
            raise RolloutConflict(f"rollout {id} is {phase}, so there is nothing to {verb}")
        held.dirty = True
        try:
            await self._tell(held)  # before a document asks a device to change
            await self._record(held)
        except (NotConducting, OSError) as error:
            raise NotRecorded(
                f"the {verb} of {id} is not recorded: {error}. This gateway tries again as long as no other conducts, "
                f"and the rollout stands still until then; `tidegate model status` says what became of it"
            ) from error
        finally:
            self._news.set()
        return held.waves

    @property
    def conducts(self) -> bool:
        """Whether this gateway decides about rollouts now."""
        return self.lease is None or (self.lease.holds and self._fence == self.lease.fence)

    @property
    def _follows(self) -> bool:
        """Whether what the store has is newer than what this gateway has, which did not conduct last."""
        return self.lease is not None and not self.conducts and not self.lease.was_own

    def _check_conducts(self) -> None:
        if not self.conducts and self.lease is not None:
            raise RolloutConflict(self.lease.refusal)

    async def _record_order(self, order: RolloutOrder) -> None:
        """Record an order in the journal and in the store, or in neither."""
        id = order.spec.id
        try:
            await asyncio.to_thread(self._journal.begin, order)
            if self.lease is not None:
                self._check_conducts()  # still, and it knows all that others have begun
                self._refused.add(id)  # until the store has said that it has it
                manifests = await self._manifests_of(order)
                await self.lease.record(id, order=msgspec.json.encode(order), manifests=manifests)
                self._refused.discard(id)
        except (RolloutConflict, NotConducting, OSError) as error:
            await asyncio.to_thread(self._journal.forget, id)
            await self._forget_refused()
            raise NotRecorded(f"rollout {id} does not begin, since it cannot be recorded: {error}") from error

    async def _forget_refused(self) -> None:
        """Remove from the store what it may have of orders that were not begun; what remains is tried in each turn."""
        for id in list(self._refused):
            try:
                assert self.lease is not None, "without a store no order can be there"
                await self.lease.forget(id)
            except NotConducting as error:
                log.info("an order that was not begun may be in the store yet", rollout=id, reason=str(error))
                return
            self._refused.discard(id)

    def _check_free(self, order: RolloutOrder) -> None:
        if order.spec.id in self._refused:  # to be removed from the store, which must not happen to a new one
            raise NotRecorded(
                f"an order {order.spec.id!r} that did not begin is being removed: order again in a moment"
            )
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
                    f"{device} has been given a newer document since (revision {newest}): " + _instead(held.order.spec)
                )

    def _check_left(self, held: _ActiveRollout) -> None:
        """Raises RolloutConflict: with the devices back where they were, no target would serve the model."""
        if held.order.spec.kind != "model":
            return
        model, version = held.order.spec.model, held.order.spec.version
        serving = sorted({target for targets in self._serving(model).values() for target in targets})
        asked = {str(TargetId("edge", device)): device for device in held.waves.asks}
        # the first that keeps a version ends it: of ten thousand documents hardly ever more than one is read
        lost = all(target in asked and not has_way_back(held.order, asked[target]) for target in serving)
        if serving and lost:
            raise RolloutConflict(
                f"{', '.join(serving[:5])} had no version of {model} before {version}, and no other target "
                f"serves one: every request for {model} would be refused. Bring another version instead: `tidegate "
                f"model rollout {model} --version OTHER --key KEY`; or take the model away: `tidegate model rollback "
                f"{held.order.spec.id} --leave-none`"
            )

    def configured(self, view: DeviceView) -> Comparison | None:
        """Return how a device's settings are to those of its newest document; None where it says nothing of them."""
        desired = self._configured.get(view.name)
        return None if desired is None else compared(view.name, desired, view.reported)

    def newest_revision(self, view: DeviceView) -> int:
        """Return the greatest revision that a device has accepted, or that a rollout here requests or reserves."""
        accepted = view.reported.accepted.get(f"device/{view.name}", 0) if view.reported else 0
        reserved = (
            held.order.spec.revisions[view.name].back
            for held in self._held.values()
            if view.name in held.order.spec.revisions
        )
        return max(accepted, *reserved, 0)

    # turns

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._turn()
            except Exception:
                log.exception("rollouts have a defect; they go on in a moment")
            await clock.sleep(PAUSE_S + PAUSE_PER_DEVICE_S * len(self._asked))
            try:
                async with asyncio.timeout(TICK_S if self._active else IDLE_S if self.conducts else FOLLOW_S):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _turn(self) -> None:
        if not await self._conducts():
            self._active = False
            self.drift.look({}, (), clock.now())  # what it knows is the conductor's to say
            await self._follow()
            return
        if self._refused:
            async with self._beginning:
                await self._forget_refused()
        now = clock.now()
        passed_s = self._passed_s(now)
        views = self._channel.devices(now) if self._session else ()
        reports = {view.name: view.reported for view in views}
        newest = set(self._source.values())
        live = [one for id, one in self._held.items() if id in newest or not one.waves.state.phase.is_over]
        for held in live:  # another may begin meanwhile
            await self._decide(held, reports, min(passed_s, now - held.begun_at))
        if self._configured and self._session and now >= max(self._looked_at + TICK_S, self._settled_at):
            self._look_for_drift(views, now)
        self._publish()
        self._active = bool(self._unpublished or self._refused) or any(
            held.dirty or not held.waves.state.phase.is_over for held in self._held.values()
        )

    async def _read_all(self, lease: ConductorLease) -> None:
        """Know the versions of devices before the first caller asks, whoever conducts."""
        with suppress(StoreUnavailable):  # it has said so
            while await self._followed.look(lease):
                pass

    async def _follow(self) -> None:
        if self._follows and self.lease is not None:
            with suppress(StoreUnavailable):  # it has said so, and what was read holds
                if await self._followed.look(self.lease):
                    self._news.set()

    def _look_for_drift(self, views: Iterable[DeviceView], now: float) -> None:
        self._looked_at = now
        devices = [ConfiguredDevice(view.name, view.reported, view.freshness.is_usable) for view in views]
        for device in self.drift.look(self._configured, devices, now):
            found = self.drift.of(device)
            log.warning("a configuration is sent again", device=device, reason=found.evidence if found else "")
            self._unpublished[device] = None

    async def _conducts(self) -> bool:
        """Whether this gateway conducts; the first time under a lease, it takes over what is recorded."""
        lease = self.lease
        if lease is None:
            return True
        if not lease.holds:
            self._fence = ""
            if lease.is_anothers:  # which may go on with any rollout
                for held in self._held.values():
                    held.in_store.clear()
            return False
        if self._fence != lease.fence:
            fence = lease.fence
            try:
                async with self._beginning:  # no order begins or is forgotten meanwhile
                    await self._take_over(lease)
            except (StoreUnavailable, NotConducting) as error:
                log.warning("rollouts cannot be taken over yet", reason=str(error))
                return False
            except OSError as error:
                log.error("rollouts that are taken over cannot be remembered", reason=str(error))
                return False
            self._fence = fence
        return True

    async def _take_over(self, lease: ConductorLease) -> None:
        """Go on from what the store has, which is what was published; record there what it lacks.

        Where no other gateway has recorded anything meanwhile, what this one holds is as new or newer: it may have got
        a command that could not be recorded.
        """
        recorded, manifests, stamped = await lease.recorded(), await lease.manifests(), await lease.stamped()
        for id, (raw_order, raw_state) in recorded.items():
            if id in self._refused and not raw_state:
                continue  # and is removed when this gateway has taken over
            self._refused.discard(id)  # another gateway has held it, and has perhaps been told to begin it
            known = self._held.get(id)
            if known is not None and _digest(raw_state) in known.in_store:
                known.begun_at = clock.now()  # while nobody conducted no time has passed for it
                continue
            try:
                order = decode_order(raw_order)
                if order.spec.id != id:
                    raise InvalidOrder(f"its order is of {order.spec.id}")
                waves = rollout_as_recorded(order, raw_state or None)
            except InvalidOrder as error:
                log.error("a rollout in the store cannot be read and is left alone", rollout=id, reason=str(error))
                continue
            if known is not None and known.dirty:
                log.warning("another gateway has gone on with a rollout; what was not recorded is lost", rollout=id)
            if known is None:
                await asyncio.to_thread(self._journal.begin, order)
            await self._announce_if_there(order, manifests.get(id, {}))
            if raw_state:
                await asyncio.to_thread(self._journal.save, id, raw_state)
            told = known.told if known is not None else None
            held = _ActiveRollout(order, waves, dirty=not raw_state, begun_at=clock.now(), told=told)
            held.saved_at_s, held.in_store = waves.state.elapsed_s, {_digest(raw_state)}
            self._held[id] = held
            self._ask(held)
            if not waves.state.phase.is_over and known is None:
                log.warning("goes on with a rollout of another gateway", rollout=id, phase=str(waves.state.phase))
        for id, held in self._held.items():
            if id not in recorded:
                await self._record_in(lease, held, msgspec.json.encode(held.waves.state), with_order=True)
            elif id not in stamped:
                await lease.record(id, manifests=await self._manifests_of(held.order))
        self._unpublished = dict.fromkeys(self._asked)  # whatever the last conductor said

    async def _announce_if_there(self, order: RolloutOrder, told: Mapping[str, bytes]) -> None:
        try:
            await self._announce_versions(order, told)
        except InvalidOrder as error:
            log.warning("a rollout's versions are unknown to this gateway", rollout=order.spec.id, reason=str(error))

    def _passed_s(self, now: float) -> float:
        """Return the time since the last turn in which reports could arrive; notices a new session."""
        if self._session != self._channel.session:
            self._session, self._settled_at, self._turned_at = self._channel.session, now + SETTLE_S, None
            self._unpublished = dict.fromkeys(self._asked)
        if not self._session or now < self._settled_at:
            return 0.0
        passed_s = 0.0 if self._turned_at is None else now - self._turned_at
        self._turned_at = now
        return passed_s

    async def _decide(self, held: _ActiveRollout, reports: Mapping[str, Reported | None], passed_s: float) -> None:
        phase = held.waves.state.phase
        await self._tell(held)  # before a document asks a device to change
        held.dirty |= held.waves.hear(reports)
        held.dirty |= bool(self._session) and held.waves.advance(passed_s)
        if held.waves.state.phase is not phase:
            write = log.warning if held.waves.state.phase in ("returning", "paused") else log.info
            write(f"rollout is {held.waves.state.phase}", rollout=held.order.spec.id, reason=held.waves.state.reason)
            await self._tell(held)
        if held.dirty or held.waves.state.elapsed_s - held.saved_at_s > SAVE_TIME_S:
            await self._save(held)

    async def _tell(self, held: _ActiveRollout) -> None:
        """Have the preferred versions know of a rollout that has begun, or is called back."""
        phase, spec = held.waves.state.phase, held.order.spec
        if phase is held.told or spec.kind != "model":
            return
        if phase is RolloutPhase.PAUSED and held.told is None:
            return  # it may begin yet
        try:
            if phase is RolloutPhase.RUNNING and held.told is None:
                await self._preferred.rolled_out(spec.model, spec.version)
            elif phase is RolloutPhase.RETURNING:
                await self._preferred.recalled(spec.model, spec.version)
        except OSError as error:
            log.error("the preferred versions cannot be remembered", rollout=spec.id, reason=str(error))
            return
        held.told = phase

    async def _save(self, held: _ActiveRollout) -> None:
        """Record the state; a failure is logged once, and the next turn tries again."""
        rollout, before = held.order.spec.id, held.trouble
        try:
            await self._record(held)
            held.trouble = ""
        except NotConducting as error:
            held.trouble = str(error)
            if held.trouble != before:
                log.warning("a rollout stands still here", rollout=rollout, reason=held.trouble)
        except OSError as error:
            held.trouble = str(error)
            if held.trouble != before:
                log.error("a rollout cannot be remembered and stands still", rollout=rollout, reason=held.trouble)
        if before and not held.trouble:
            log.info("a rollout is remembered again and goes on", rollout=rollout)

    async def _record(self, held: _ActiveRollout) -> None:
        """Record the state in the store and in the journal, and only then request what it asks of devices.

        The journal comes second: what a restarted gateway finds there must not be newer than what others find.

        Raises:
            NotConducting: it is not known whether the store has it.
            OSError: the journal does not have it.
        """
        async with held.recording:
            asks, elapsed_s, raw = held.waves.asks, held.waves.state.elapsed_s, msgspec.json.encode(held.waves.state)
            done = held.dirty = False  # before the awaits: a change during them is recorded in the next turn
            try:
                if self.lease is not None:
                    if not self.conducts:
                        raise NotConducting(self.lease.refusal)
                    await self._record_in(self.lease, held, raw)
                await asyncio.to_thread(self._journal.save, held.order.spec.id, raw)
                done = True
            finally:
                held.dirty |= not done
            held.saved_at_s = elapsed_s
            self._ask(held, asks)

    async def _record_in(
        self, lease: ConductorLease, held: _ActiveRollout, raw_state: bytes, *, with_order: bool = False
    ) -> None:
        held.in_store.add(_digest(raw_state))  # before: also a call that times out may record it
        raw_order = msgspec.json.encode(held.order) if with_order else b""
        manifests = await self._manifests_of(held.order) if with_order else {}
        # It compares the fencing number.
        await lease.record(held.order.spec.id, order=raw_order, state=raw_state, manifests=manifests)
        held.in_store = {_digest(raw_state)}

    def _ask(self, held: _ActiveRollout, asks: Mapping[str, bool] | None = None) -> None:
        """Make a rollout's documents the newest of their devices.

        Args:
            asks: what the journal holds; None: all that the rollout asks now.
        """
        for device, back in (held.waves.asks if asks is None else asks).items():
            revisions = held.order.spec.revisions[device]
            revision = revisions.back if back else revisions.forward
            if revision > self._asked.get(device, (0, b""))[0]:
                self._asked[device] = revision, held.order.documents[device].message(back=back)
                self._source[device] = held.order.spec.id
                self._note_configuration(device)
                self._unpublished[device] = None

    def _note_configuration(self, device: str) -> None:
        try:
            revision, configuration = configuration_of(self._asked[device][1])
        except BadMessage as error:  # of a damaged disk; the device refuses it too
            log.error("the document of a device cannot be read", device=device, reason=str(error))
            self._configured.pop(device, None)
            return
        if configuration is None:
            self._configured.pop(device, None)
        else:
            self._configured[device] = DesiredHere.of(revision, configuration)

    def _publish(self) -> None:
        for device in list(self._unpublished) if self._session else ():
            if self.lease is not None and not self.lease.holds:
                return
            if not self._channel.publish_desired(device, self._asked[device][1]):
                return  # the outbox is full, or the session is over: the next turn goes on here
            del self._unpublished[device]

    # versions, and old rollouts

    async def _announce_versions(self, order: RolloutOrder, told: Mapping[str, bytes] | None = None) -> None:
        def read() -> list[Manifest]:
            return [manifest_of(plan, order.spec.model, self.store, told or {}) for plan in plans_of(order)]

        try:
            self._on_versions(await asyncio.to_thread(read))
        except RepositoryError as error:
            raise InvalidOrder(str(error)) from error

    async def _manifests_of(self, order: RolloutOrder) -> Mapping[str, bytes]:
        """What other gateways need to know the versions of an order: its manifests, as far as they are here."""

        def read() -> Mapping[str, bytes]:
            try:
                return manifests_here(plans_of(order), self.store)
            except InvalidOrder:  # of a damaged disk
                return {}

        return await asyncio.to_thread(read)

    async def _forget_old(self) -> None:
        newest = set(self._source.values())
        over = [id for id, held in self._held.items() if held.waves.state.phase.is_over and id not in newest]
        for id in over[: max(0, len(over) - KEPT)]:
            del self._held[id]
            await asyncio.to_thread(self._journal.forget, id)
            if self.lease is not None:
                try:
                    await self.lease.forget(id)
                except NotConducting as error:
                    log.warning("an old rollout stays in the store", rollout=id, reason=str(error))

    def __repr__(self) -> str:
        session = f"session {self._session}" + (" settling" if self._session and self._turned_at is None else "")
        return f"<RolloutController {len(self._held)} known, {len(self._asked)} devices asked, {session}>"


def _digest(raw_state: bytes) -> bytes:
    return sha256(raw_state).digest()


def _instead(spec: RolloutSpec) -> str:
    """What brings the devices back where a rollout cannot."""
    if spec.kind == "model":
        return f"roll the older version out instead, `tidegate model rollout {spec.model} --version OLDER`"
    return "configure them with the older settings instead, `tidegate fleet configure`"
