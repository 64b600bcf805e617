"""The configuration service tries what documents and the device's own file desire, keeps it, or takes it back.

    documents ──┐                              record on disk → parts of the agent
    own file ───┴─ merged → differs? → trial ──────────┬─ well: in force
    changes by hand in the running agent (shown)       └─ unwell: what was before, reported with the reason

One task. What it decides is `edge_agent/core/configuration_trial.py` and `configuration_merge.py`; here are the disk,
the clock and the parts. Each turn runs in this order: decide, write, apply; so a kill anywhere is found by the next
start (`boot.py`). A disk that takes nothing changes nothing, and is reported.

Drift is repaired without a restart: the same document again puts its settings in force again, as far as nobody on the
device has overridden them (`local` in the document says what becomes of those).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace as changed
from typing import Final, Self

import structlog
from msgspec.structs import replace

from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import BootConfiguration
from edge_agent.configuration.device_file import DeviceFile, read_device_file
from edge_agent.configuration.effective import settings_of, with_settings
from edge_agent.core.configuration_merge import differences, kept_digest, may_undo, merged, overridden
from edge_agent.core.configuration_trial import (
    ConfigurationRecord,
    DeviceStanding,
    accepted,
    asked_by,
    begun,
    complaint,
    judged,
    put_off,
    taken_back,
    waiting_for_start,
)
from tidegate import clock
from tidegate.fleet.reported import ConfigurationReport, RolloutState
from tidegate.rollout.desired import DesiredSettings
from tidegate.rollout.device_settings import (
    Setting,
    SettingRefused,
    Settings,
    checked,
    keys_that_apply,
    settings_digest,
)
from tidegate.runtime.followed_file import FollowedFile
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process import StartError

TICK_S: Final = 0.5  # while something is on trial
IDLE_S: Final = 5.0  # for changes by hand, which nobody announces
REST_S: Final = 5.0
FILE_WATCH_S: Final = 60.0  # of a change by the device's own file alone
_MAX_WORDS: Final = 300
log = structlog.get_logger(__name__)


class NotNow(Exception):
    """The settings cannot be applied just now, and can be later; the text says why."""


class ConfigurationService:
    """Works inside `async with`.

    Args:
        apply: puts a configuration into the running parts. Raises StartError: it cannot be, and NotNow.
        standing: how the device does.
        actual: settings of the running agent that something else than this service may have changed.
        busy: why models cannot get other workers now; "" while they can.
        on_change: called when `report` has something new.
    """

    def __init__(
        self,
        boot: BootConfiguration,
        *,
        apply: Callable[[EdgeConfig], Awaitable[None]],
        standing: Callable[[], DeviceStanding],
        actual: Callable[[], Settings],
        busy: Callable[[], str] = lambda: "",
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._base = boot.base
        self._config = boot.config
        self._started_with = settings_of(boot.config)
        self._file = boot.file
        self._record = boot.record
        self._own = boot.own
        self._trouble = boot.problem
        self._apply = apply
        self._standing = standing
        self._actual = actual
        self._busy = busy
        self._on_change = on_change
        self._desired: DesiredSettings | None = None
        self._against: dict[str, tuple[str, float]] = {}  # where by hand → digest of what was changed, and since when
        self._again = False  # a document came, maybe the same once more
        self._looked_at: float | None = None  # at the trial
        self._unwell_since: float | None = None
        self._well_since: float | None = None
        self._news = asyncio.Event()
        self._told: ConfigurationReport | None = None
        self._task = OwnedTask(self._run, name="configuration", crash_means="settings stay as they are")
        self._following: FollowedFile[DeviceFile] | None = None

    async def __aenter__(self) -> Self:
        path = self._base.device_file
        if path is not None:
            self._following = FollowedFile(
                path, lambda file: read_device_file(file, self._base), self._own_changed, what="settings", aside=True
            )
            self._own_changed(await self._following.__aenter__())
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        if self._following is not None:
            await self._following.__aexit__(None, None, None)

    # -- called by others -------------------------------------------------------------------------------------------

    def desire(self, desired: DesiredSettings | None) -> None:
        """Take in what the documents desire now; the same again repairs what has drifted."""
        # One that was accepted by an agent of another version may not be fit for this one: the next turn says so.
        if desired is not None and not self.why_not(desired.settings):
            desired = changed(desired, settings=checked(desired.settings))
        self._desired = desired
        self._again = True
        self._tell()
        self._news.set()

    def why_not(self, settings: Settings) -> str:
        """Why this device cannot have these settings; "" where it can."""
        try:
            with_settings(self._base, checked(settings))
        except SettingRefused as error:
            return str(error)
        return ""

    @property
    def report(self) -> ConfigurationReport:
        """The report; the same object until something changed."""
        if self._told is None:
            self._told = self._reported()
        return self._told

    @property
    def own_file(self) -> DeviceFile:
        return self._own

    @property
    def record(self) -> ConfigurationRecord:
        return self._record

    # -- the task ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._turn(clock.now())
            except OSError as error:
                self._trouble = f"disk: {error.strerror or error}"
                log.warning("the record of changed settings cannot be written", reason=self._trouble)
                self._tell()
                await clock.sleep(REST_S)
            except Exception as error:  # a defect: the agent serves on with what is in force, and the report names it
                self._trouble = f"internal: {error!r}"
                log.exception("the configuration service has a defect")
                await clock.sleep(REST_S)
            try:
                async with asyncio.timeout(TICK_S if self._record.trying is not None else IDLE_S):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _turn(self, now: float) -> None:
        undo = self._may_undo("file", self._local, now, undone=self._record.undone)
        wanted = merged(self._wished, self._local, undo=undo)
        self._trouble = self.why_not(wanted) or self._why_later(wanted)
        record = self._noted(undo=undo)
        await self._become(record if self._trouble else begun(record, wanted, self._watch_s, self._standing()))
        if self._record.trying is not None:
            await self._judge(now)
        elif self._strays(now):
            await self._put_in_force()
        self._again = False
        self._tell()

    def _strays(self, now: float) -> bool:
        """Whether the agent works with something that neither record nor device asks for, and that may be mended."""
        by_hand = self._by_hand()
        if by_hand and self._may_undo("agent", by_hand, now):
            return True
        return self._again and any(one.why == "" for one in self._reported().differs)

    def _noted(self, *, undo: bool) -> ConfigurationRecord:
        """The record with what is to be remembered of documents and file."""
        record = self._record
        if self._desired is not None:
            record = asked_by(record, f"{self._desired.scope} {self._desired.revision}")
            if not self.why_not(self._desired.settings):
                record = replace(record, desired=dict(self._desired.settings))
        if undo and (against := overridden(self._wished, self._local)):
            record = replace(record, undone=settings_digest(against))
        return record if self._own.problem else replace(record, local=dict(self._own.settings))

    def _why_later(self, wanted: Settings) -> str:
        """Why the settings must wait; "" where they need not."""
        now, then = settings_of(self._config), settings_of(self._target(wanted))
        anew = any(now.get(key) != then[key] for key in keys_that_apply(then, "worker"))
        return f"later: {why}" if anew and (why := self._busy()) else ""

    async def _judge(self, now: float) -> None:
        """Look at the device once more, and keep what is on trial or take it back where that is due."""
        if settings_of(self._target(self._record.trying or {})) == settings_of(self._target(self._record.in_force)):
            await self._become(accepted(self._record))  # only said otherwise: there is nothing to try
            return
        standing = self._standing()
        unwell = complaint(self._record.before, standing)
        passed_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if unwell:
            self._unwell_since, self._well_since = self._unwell_since or now, None
        else:
            self._unwell_since, self._well_since = None, self._well_since or now
        found = judged(
            self._record,
            watched_s=self._record.watched_s + passed_s,
            unwell=unwell,
            unwell_s=0.0 if self._unwell_since is None else now - self._unwell_since,
            well_s=0.0 if self._well_since is None else now - self._well_since,
        )
        if found.trying is not None:
            self._record = found  # the time alone is not worth a write; a start begins it anew
            return
        await self._become(found)

    async def _become(self, record: ConfigurationRecord) -> None:
        """Write a record, then put into force what it says. Raises OSError: nothing has changed."""
        before = self._record
        if record == before:
            return
        settled = record.trying is None
        if (settled and before.trying is not None) or record.in_force != before.in_force:
            record = waiting_for_start(record, self._waiting(record.in_force), before.in_force)
        await asyncio.to_thread(self._file.write, record)
        self._record = record
        if settings_digest(before.settings_now) == settings_digest(record.settings_now):
            if settled and before.trying is not None:
                log.info("changed settings are kept", settings=dict(record.in_force), waits=list(record.at_start))
            return
        self._looked_at = self._unwell_since = self._well_since = None
        if settled and (why := record.why_refused(before.settings_now)):
            log.error("changed settings were taken back", settings=dict(before.settings_now), reason=why)
        else:
            log.warning("settings are changed", settings=dict(record.settings_now), on_trial=not settled)
        await self._put_in_force()

    async def _put_in_force(self) -> None:
        """Have the agent's parts work with the settings of the record, but for those that a start brings."""
        now_settings = dict(self._record.settings_now)
        for key in keys_that_apply(self._started_with, "start"):
            now_settings[key] = self._started_with[key]
        config = with_settings(self._base, now_settings)
        try:
            await self._apply(config)
            self._config = config
        except NotNow as error:
            log.info("settings wait", reason=str(error))
            if self._record.trying is not None:
                record = put_off(self._record)
                await asyncio.to_thread(self._file.write, record)
                self._record = record
        except StartError as error:
            log.error("settings cannot be applied", reason=str(error))
            if self._record.trying is not None:
                await self._become(taken_back(self._record, f"apply: {error}"))

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def _local(self) -> Settings:
        """What the device's own file says, or said when it could last be used."""
        return self._record.local if self._own.problem else self._own.settings

    @property
    def _wished(self) -> DesiredSettings | None:
        """What the documents desire, or last did: one that says nothing of settings changes none."""
        if self._desired is not None or self._record.desired is None:
            return self._desired
        return DesiredSettings(self._record.desired, FILE_WATCH_S, "show", "", 0)

    @property
    def _watch_s(self) -> float:
        return FILE_WATCH_S if self._desired is None else self._desired.watch_s

    def _target(self, settings: Settings) -> EdgeConfig:
        return with_settings(self._base, settings)

    def _waiting(self, settings: Settings) -> tuple[str, ...]:
        """The keys whose value a start must bring."""
        wanted = settings_of(self._target(settings))
        starting = keys_that_apply(wanted, "start")
        return tuple(key for key in starting if wanted[key] != self._started_with.get(key))

    def _may_undo(self, where: str, local: Settings, now: float, *, undone: str = "") -> bool:
        digest = settings_digest(overridden(self._wished, local))
        if digest != self._against.get(where, ("", 0.0))[0]:
            self._against[where] = digest, now
        return may_undo(self._wished, local, shown_s=now - self._against[where][1], undone=undone)

    def _by_hand(self) -> Mapping[str, Setting]:
        """Settings that were changed in the running agent itself, against what is desired."""
        own = settings_of(self._config)
        found = {key: value for key, value in self._actual().items() if own.get(key) != value}
        return overridden(self._wished, found)

    def _own_changed(self, own: DeviceFile) -> None:
        if own.problem and own.problem != self._own.problem:
            log.error("the device's own file of settings is refused; what it said before stays", reason=own.problem)
        self._own = own
        self._tell()
        self._news.set()

    # -- the report -------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        found = self._reported()
        if found != self._told:
            self._told = found
            self._on_change()

    def _reported(self) -> ConfigurationReport:
        desired, record = self._wished, self._record
        in_force = {**settings_of(self._config), **self._actual()}
        undo = may_undo(desired, self._local, shown_s=0.0, undone=record.undone)
        wanted = merged(desired, self._local, undo=undo)
        is_news = (
            self._desired is not None and desired is not None and record.asked != f"{desired.scope} {desired.revision}"
        )
        returned = "" if is_news else record.why_refused(wanted)  # a new document may ask once more
        state = self._state(wanted, returned)
        target = settings_of(self._target(record.in_force))
        return ConfigurationReport(
            state=state,
            digest=settings_digest(in_force),
            reason=(returned or self._trouble)[:_MAX_WORDS],
            scope="" if desired is None else desired.scope,
            revision=0 if desired is None else desired.revision,
            kept=kept_digest(desired, in_force),
            differs=differences(
                desired,
                in_force,
                by_hand={**overridden(desired, {} if undo else self._local), **self._by_hand()},
                at_start={key: target[key] for key in self._waiting(record.in_force)},
                returned=bool(returned),
            ),
            file=self._own.problem[:_MAX_WORDS],
        )

    def _state(self, wanted: Settings, returned: str) -> RolloutState:
        if self._record.trying is not None:
            return RolloutState.ACTIVE
        if returned:
            return RolloutState.ROLLED_BACK
        if self._trouble and not self._trouble.startswith(("disk: ", "later: ")):
            return RolloutState.FAILED
        is_there = settings_digest(wanted) == settings_digest(self._record.in_force)
        return RolloutState.COMMITTED if is_there else RolloutState.PLANNED

    def __repr__(self) -> str:
        trial = "" if self._record.trying is None else f", trying for {self._record.watched_s:.1f} s"
        return f"<ConfigurationService {len(self._record.in_force)} settings{trial}>"
