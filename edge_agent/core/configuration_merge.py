"""The settings of a device are merged from three sources, and compared with what its fleet desires.

    the agent's own configuration   the base: file, environment and defaults of the start
    the documents of its fleet      over it, key by key (`tidegate/rollout/desired.py`)
    its own file (`device_file`)    over both: whoever stands before a device must be able to change it

With `local: undo` in the document the last two change places, but only after the fleet has been shown the change made
by hand for `SHOWN_S`. What was shown once is remembered, so a start shows nothing anew.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidegate.fleet.reported import SettingDifference
from tidegate.rollout.desired import DesiredSettings
from tidegate.rollout.device_settings import Setting, Settings, settings_digest

SHOWN_S: Final = 60.0  # several looks of an operator's screen
MAX_DIFFERENCES: Final = 64


def overridden(desired: DesiredSettings | None, local: Settings) -> dict[str, Setting]:
    """The local settings that contradict what is desired."""
    if desired is None:
        return {}
    return {key: value for key, value in local.items() if key in desired.settings and desired.settings[key] != value}


def may_undo(desired: DesiredSettings | None, local: Settings, *, shown_s: float, undone: str) -> bool:
    """Whether changes by hand give way: undoing is asked for, and they were shown for long enough, now or before."""
    if desired is None or desired.local != "undo":
        return False
    against = overridden(desired, local)
    return not against or shown_s >= SHOWN_S or settings_digest(against) == undone


def merged(desired: DesiredSettings | None, local: Settings, *, undo: bool) -> dict[str, Setting]:
    """The settings over the agent's own configuration."""
    theirs = desired.settings if desired is not None else {}
    return {**local, **theirs} if undo else {**theirs, **local}


def kept_digest(desired: DesiredSettings | None, in_force: Settings) -> str:
    """Digest of the settings in force under the desired keys; "" where nothing is desired."""
    return "" if desired is None else settings_digest({key: in_force.get(key) for key in desired.settings})


def differences(
    desired: DesiredSettings | None,
    in_force: Settings,
    *,
    by_hand: Mapping[str, Setting],
    at_start: Settings,
    returned: bool,
) -> tuple[SettingDifference, ...]:
    """What is not as it should be, in the order of keys.

    Args:
        in_force: what the agent runs with, by key.
        by_hand: settings that were changed on the device, and how.
        at_start: settings that a start will bring.
        returned: whether the desired settings were taken back.
    """
    wanted = {**at_start, **(desired.settings if desired is not None else {})}
    found = []
    for key in sorted(wanted):
        value = in_force.get(key)
        if value == wanted[key] and type(value) is type(wanted[key]):
            continue
        if desired is not None and key in desired.settings and key in by_hand:
            found.append(SettingDifference(key, value, "hand"))
        elif key in at_start:
            found.append(SettingDifference(key, value, "start"))
        else:
            found.append(SettingDifference(key, value, "returned" if returned else ""))
    return tuple(found[:MAX_DIFFERENCES])
