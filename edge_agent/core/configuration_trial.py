"""A configuration trial: changed settings become a device's own after it has done well with them for a while.

            begin                    well for `watch_s`
    in force ───→ trying ───────────────────────────────────→ in force (with `at_start`: until a start has proven it)
                    └─ unwell for `grace_s`, or ended `MAX_STARTS` times ─→ the settings before; not tried again

The record is on the disk before any setting is applied, so a power cut or kill -9 anywhere ends in one of the two: a
start while a trial is under way goes on with it, and the third such start takes the settings back, since an agent that
ends again and again cannot say so itself. Settings that apply at a start are on trial from that start on.

"Well" is compared with the device as it was when the trial began: what did not work before is no fault of the change.
Being cut off from the fleet is no sign either way, for no setting has anything to do with the network.

Pure. Invariants: `settings_now` is `in_force` or `trying`, never a mixture; each trial ends, well, unwell or after
`LONGEST` times its watch; what was taken back is not begun again while it is among the last `MAX_REFUSED`.
It can be wrong where a change does harm that none of the signs shows, such as answers that are late at the gateway.

Source: RAUC, "boot-attempts"; Greengrass, three exits; docs/configuring-devices.md.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tidegate.rollout.desired import SettingKey, SettingValue
from tidegate.rollout.device_settings import Settings, settings_digest

GRACE_S: Final = 10.0  # a worker that is started again takes some seconds
MAX_STARTS: Final = 3
MAX_REFUSED: Final = 8
LONGEST: Final = 4.0  # times the watch: for a device that is now well and now not
LEAST_FAILED: Final = 5
FAILED_SHARE: Final = 0.5
_MAX_WORDS: Final = 300
Kept = dict[SettingKey, SettingValue]


class DeviceStanding(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a device does.

    Args:
        closed: why it takes no new work; "" while it does.
        ready: models that answer. served: models that should, whatever their state.
        answered, failed: requests since the agent's start that were computed, and that failed by a model's fault.
    """

    closed: str = ""
    ready: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    answered: int = 0
    failed: int = 0


class ConfigurationRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What must outlive the agent.

    Args:
        in_force: the settings over the agent's own configuration, from all sources together.
        former: what a start returns to that does not do well with `in_force`; None: a start has proven it.
        at_start: keys of `in_force` that wait for a start.
        trying: the settings that are on trial.
        watched_s: how long they have been, of `watch_s`; starts: of the agent meanwhile.
        before: how the device did when the trial began.
        refused: why settings were taken back, by their digest, the oldest first.
        desired: what documents last desired; where none says anything of settings any more, that stays.
        local: the device's own file of settings, as it was when it could last be read.
        undone: digest of the settings of that file that were shown, and then overridden.
        asked: scope and revision of the newest document; another one may ask again for what was taken back.
    """

    in_force: Kept = {}
    former: Kept | None = None
    at_start: tuple[str, ...] = ()
    trying: Kept | None = None
    watch_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    watched_s: float = 0.0
    starts: int = 0
    before: DeviceStanding = DeviceStanding()
    refused: dict[str, str] = {}
    desired: Kept | None = None
    local: Kept = {}
    undone: str = ""
    asked: str = ""
    v: Literal[1] = 1

    @property
    def settings_now(self) -> Settings:
        return self.in_force if self.trying is None else self.trying

    @property
    def grace_s(self) -> float:
        """How long the device may be unwell."""
        return min(GRACE_S, self.watch_s / 2.0)

    def why_refused(self, settings: Settings) -> str:
        """Why these settings were taken back; "" where they were not."""
        return self.refused.get(settings_digest(settings), "")


def begun(
    record: ConfigurationRecord, wanted: Settings, watch_s: float, standing: DeviceStanding
) -> ConfigurationRecord:
    """A trial of `wanted`, instead of any other; the record itself where there is nothing to try."""
    if settings_digest(wanted) == settings_digest(record.settings_now) or record.why_refused(wanted):
        return record
    if settings_digest(wanted) == settings_digest(record.in_force):
        return replace(record, trying=None)  # back to what is in force: nobody wants the trial any more
    before = standing if record.trying is None else record.before
    return replace(record, trying=dict(wanted), watch_s=watch_s, watched_s=0.0, starts=0, before=before)


def asked_by(record: ConfigurationRecord, document: str) -> ConfigurationRecord:
    """The record under this document, "SCOPE REVISION"; a new one may ask once more for what was taken back."""
    return record if document == record.asked else replace(record, asked=document, refused={})


def put_off(record: ConfigurationRecord) -> ConfigurationRecord:
    """The record without its trial, which may be begun again."""
    return replace(record, trying=None, watched_s=0.0, starts=0)


def after_start(record: ConfigurationRecord) -> ConfigurationRecord:
    """The record of an agent that starts; to be on the disk before the start goes on."""
    if record.trying is None:
        if record.former is None:
            return record
        # From here on what waited is in force, and on trial.
        waited = replace(record, in_force=record.former, trying=record.in_force)
        return replace(waited, former=None, at_start=(), watched_s=0.0, starts=1)
    if record.starts + 1 < MAX_STARTS:
        return replace(record, starts=record.starts + 1)
    return taken_back(record, f"crash_loop: the agent was started {MAX_STARTS} times while they were on trial")


def judged(
    record: ConfigurationRecord, *, watched_s: float, unwell: str, unwell_s: float, well_s: float
) -> ConfigurationRecord:
    """The record after another look at the device on trial.

    Args:
        unwell: why the device does not do well (`complaint`), for `unwell_s`; "" where it does, for `well_s`.
    """
    if unwell and unwell_s >= record.grace_s:
        return taken_back(record, unwell)
    if not unwell and watched_s >= record.watch_s and well_s >= min(record.grace_s, watched_s):
        return accepted(record)
    if watched_s >= LONGEST * record.watch_s:
        return taken_back(record, unwell or "unsteady: it was not well for long enough")
    return replace(record, watched_s=watched_s)


def accepted(record: ConfigurationRecord) -> ConfigurationRecord:
    """The settings on trial are the device's own."""
    if record.trying is None:
        return record
    return replace(record, in_force=record.trying, trying=None, watched_s=0.0, starts=0)


def taken_back(record: ConfigurationRecord, why: str) -> ConfigurationRecord:
    """The settings on trial are not tried again, and those before are in force."""
    if record.trying is None:
        return record
    refused = {**record.refused, settings_digest(record.trying): why[:_MAX_WORDS]}
    newest = dict(list(refused.items())[-MAX_REFUSED:])
    return replace(record, trying=None, watched_s=0.0, starts=0, refused=newest)


def waiting_for_start(record: ConfigurationRecord, keys: tuple[str, ...], former: Settings) -> ConfigurationRecord:
    """The record of settings that are in force but for `keys`, which a start brings; `former` are proven ones."""
    if not keys:
        return replace(record, at_start=(), former=None)
    return replace(record, at_start=keys, former=dict(former if record.former is None else record.former))


def complaint(before: DeviceStanding, now: DeviceStanding) -> str:
    """Why the device does worse than before; "" where it does not."""
    if now.closed and not before.closed:
        return f"closed: {now.closed}"
    if lost := sorted((set(before.ready) & set(now.served)) - set(now.ready)):
        return f"models: {', '.join(lost[:5])} {'does' if len(lost) == 1 else 'do'} not answer any more"
    same_start = now.answered >= before.answered and now.failed >= before.failed
    failed = now.failed - before.failed if same_start else now.failed
    requests = failed + (now.answered - before.answered if same_start else now.answered)
    if failed >= LEAST_FAILED and failed > FAILED_SHARE * requests:
        return f"failures: {failed} of {requests} requests"
    return ""
