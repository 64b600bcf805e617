"""The configuration with which an agent starts: its own, and over it the settings that were accepted or are on trial.

    record → one more start of a trial, on the disk → the device's own file as it is now → the effective configuration

A start must not fail because of what came from outside. So settings that this agent's own configuration does not take
any more are left out whole and named, and a record that cannot be written starts no trial: its starts could not be
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from edge_agent.config import EdgeConfig
from edge_agent.configuration.device_file import DeviceFile, read_device_file
from edge_agent.configuration.effective import with_settings
from edge_agent.configuration.record_file import ConfigurationFile
from edge_agent.core.configuration_trial import ConfigurationRecord, DeviceStanding, after_start, begun, taken_back
from tidegate.rollout.device_settings import SettingRefused, Settings

FIRST_WATCH_S = 60.0  # of a changed file that is found at a start
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BootConfiguration:
    """What a start found.

    Attributes:
        base: the agent's own configuration.
        config: the one in force at the start.
        problem: why the settings in the record are not in force; "" where they are.
    """

    base: EdgeConfig
    config: EdgeConfig
    file: ConfigurationFile
    record: ConfigurationRecord
    own: DeviceFile
    problem: str = ""


def boot_configuration(base: EdgeConfig) -> BootConfiguration | None:
    """Blocks on the disk; None for an agent whose configuration lets nothing be changed from outside."""
    if base.device_file is None and base.rollout is None:
        return None
    file = ConfigurationFile(base.state_dir)
    found = file.read()
    record = after_start(found)
    own = DeviceFile(found.local)
    if base.device_file is not None:
        own = read_device_file(base.device_file, base)
        if own.problem:
            log.error("the device's own file of settings is refused; what it said before stays", reason=own.problem)
        else:
            record = _with_changed_file(record, own.settings)
    if record is not found and record != found:
        try:
            file.write(record)
        except OSError as error:
            log.warning("the record of changed settings cannot be written: nothing is tried", reason=str(error))
            record = found if found.trying is None else taken_back(found, "disk: its starts cannot be counted")
    return _effective(base, file, record, own)


def _with_changed_file(record: ConfigurationRecord, settings: Settings) -> ConfigurationRecord:
    """The record where the file was changed while the agent was away: what it says now is tried from the start on."""
    if dict(settings) == record.local:
        return record
    others = {key: value for key, value in record.settings_now.items() if record.local.get(key, ...) != value}
    remembered = replace(record, local=dict(settings))
    return begun(remembered, {**others, **settings}, FIRST_WATCH_S, DeviceStanding())


def _effective(
    base: EdgeConfig, file: ConfigurationFile, record: ConfigurationRecord, own: DeviceFile
) -> BootConfiguration:
    problem = ""
    for settings in (record.settings_now, record.in_force):
        try:
            return BootConfiguration(base, with_settings(base, settings), file, record, own, problem)
        except SettingRefused as error:
            problem = str(error)
            log.error("changed settings do not fit the agent's own configuration", reason=problem)
            record = taken_back(record, problem)
    return BootConfiguration(
        base, base, file, ConfigurationRecord(local=record.local, asked=record.asked), own, problem
    )
