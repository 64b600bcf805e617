"""Configuration drift: whether devices have the settings that this gateway desires of them, and what to do where not.

    in_sync    every desired setting is in force
    pending    the document is on its way, on trial, or waits for the agent's next start
    drifted    it was accepted and something else is in force: changed on the device by hand
    returned   the device did not do well with it and went back
    refused    the device does not accept the document
    unknown    the device has not reported its configuration, or follows a newer document than this gateway has

A device reports digests of what is in force, so the comparison needs neither its base configuration nor its clock. Only
devices are compared for which this gateway has a document with a configuration.

Repair is sending again, never a restart: a document that was lost on its way is accepted then, and an agent that has
it puts its settings in force once more. Changes by hand that the document lets stand are left alone. Sent again is
after `REPAIR_S`, and then ever more rarely, since what did not help once seldom helps at once.

Pure, but for its own memory; `look` costs a comparison for each device whose report or document is another than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tidegate.fleet.reported import ConfigurationReport, Reported, RolloutState
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.rollout.device_settings import settings_digest

HOLD_S: Final = 10.0  # a difference that lasts less is no condition: reports and documents cross each other
REPAIR_S: Final = 30.0
LONGEST_REPAIR_S: Final = 600.0
_NAMED: Final = 4


class ConfigurationState(StrEnum):
    IN_SYNC = "in_sync"
    PENDING = "pending"
    DRIFTED = "drifted"
    RETURNED = "returned"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    @property
    def is_drift(self) -> bool:
        """Whether the device has settled on something else than is desired."""
        return self in (ConfigurationState.DRIFTED, ConfigurationState.RETURNED, ConfigurationState.REFUSED)


S = ConfigurationState


@dataclass(frozen=True, slots=True)
class DesiredHere:
    """What this gateway desires of a device's configuration, by its newest document."""

    revision: int
    configuration: DesiredConfiguration
    digest: str

    @classmethod
    def of(cls, revision: int, configuration: DesiredConfiguration) -> DesiredHere:
        return cls(revision, configuration, settings_digest(configuration.settings))


@dataclass(frozen=True, slots=True)
class ConfiguredDevice:
    """What is known of a device: its last report, and whether a document would reach it now."""

    name: str
    reported: Reported | None
    reachable: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for one device, with its evidence in words."""

    state: ConfigurationState
    evidence: str = ""
    accepted: bool = True  # whether the device follows this gateway's document
    by_hand: bool = False  # whether all that differs was changed on the device


def compared(device: str, desired: DesiredHere, reported: Reported | None) -> Comparison:
    """How a device's configuration is to what is desired."""
    if reported is None or (report := reported.configuration) is None:
        return Comparison(
            S.UNKNOWN, "it has reported no configuration: its agent is an older one, or takes no documents"
        )
    scope = f"device/{device}"
    accepted = reported.accepted.get(scope, 0)
    for refusal in reported.refused:
        # One of the revision that it follows is another's, sent under this one's number.
        if (refusal.scope, refusal.revision) == (scope, desired.revision) and accepted < desired.revision:
            return Comparison(S.REFUSED, refusal.reason)
    if accepted > desired.revision:
        return Comparison(S.UNKNOWN, f"it follows revision {accepted}; the newest here is {desired.revision}")
    if accepted < desired.revision or (report.scope, report.revision) != (scope, desired.revision):
        return Comparison(S.PENDING, f"it has not accepted revision {desired.revision} yet", accepted=False)
    return _of_report(desired, report)


def _of_report(desired: DesiredHere, report: ConfigurationReport) -> Comparison:
    match report.state:
        case RolloutState.ROLLED_BACK | RolloutState.FAILED:
            return Comparison(S.RETURNED, report.reason or str(report.state))
        case RolloutState.COMMITTED:
            pass
        case _:
            return Comparison(S.PENDING, report.reason or "it is on trial")
    if report.kept == desired.digest:
        return Comparison(S.IN_SYNC)
    waits = [one.key for one in report.differs if one.why == "start"]
    others = [one for one in report.differs if one.why != "start" and one.key in desired.configuration.settings]
    if waits and not others:
        return Comparison(S.PENDING, f"for the agent's next start: {', '.join(waits[:_NAMED])}")
    settings = desired.configuration.settings
    words = [f"{one.key} is {one.value!r} instead of {settings[one.key]!r}" for one in others[:_NAMED]]
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    by_hand = bool(others) and all(one.why == "hand" for one in others)
    said = f"{', '.join(words)}{more}" if words else "other settings are in force"
    return Comparison(S.DRIFTED, f"by hand: {said}" if by_hand else said, by_hand=by_hand)


@dataclass(slots=True)
class _WatchedDevice:
    reported: Reported | None
    desired: DesiredHere
    found: Comparison
    since: float  # in this state
    send_at: float
    gap_s: float = REPAIR_S

    def settle(self, found: Comparison, now: float) -> None:
        if (found.state, found.accepted) != (self.found.state, self.found.accepted):
            self.since, self.send_at, self.gap_s = now, now + REPAIR_S, REPAIR_S
        self.found = found

    def is_due(self, now: float) -> bool:
        stays = self.found.by_hand and self.desired.configuration.local == "show"
        mends = (self.found.state is S.DRIFTED and not stays) or not self.found.accepted
        return mends and now >= self.send_at

    def sent(self, now: float) -> None:
        self.gap_s = min(LONGEST_REPAIR_S, 2.0 * self.gap_s)
        self.send_at = now + self.gap_s


class DriftWatch:
    """Mutable: how every device was when last looked at, and since when."""

    def __init__(self) -> None:
        self._watched: dict[str, _WatchedDevice] = {}

    def look(self, desired: Mapping[str, DesiredHere], devices: Sequence[ConfiguredDevice], now: float) -> list[str]:
        """Compare all devices; those to which their document is to be sent again now."""
        send = []
        known = {one.name: one for one in devices if one.name in desired}
        self._watched = {name: one for name, one in self._watched.items() if name in known}
        for name, device in known.items():
            one = self._watched.get(name)
            if one is None:
                found = compared(name, desired[name], device.reported)
                one = self._watched[name] = _WatchedDevice(device.reported, desired[name], found, now, now + REPAIR_S)
            elif one.reported is not device.reported or one.desired is not desired[name]:
                one.reported, one.desired = device.reported, desired[name]
                one.settle(compared(name, one.desired, one.reported), now)
            if device.reachable and one.is_due(now):
                one.sent(now)
                send.append(name)
        return send

    def of(self, device: str) -> Comparison | None:
        """How a device was when last looked at; None where nothing is desired of it."""
        one = self._watched.get(device)
        return None if one is None else one.found

    def standing(self, now: float) -> list[tuple[str, float, str]]:
        """(device, since, evidence) of each that has drifted for a while, the longest first."""
        found = [
            (name, one.since, f"{one.found.state}: {one.found.evidence}")
            for name, one in self._watched.items()
            if one.found.state.is_drift and now - one.since >= HOLD_S
        ]
        return sorted(found, key=lambda one: one[1])

    def counts(self) -> dict[str, int]:
        """How many devices are in each state."""
        counts = Counter(one.found.state for one in self._watched.values())
        return {str(state): counts[state] for state in ConfigurationState}

    def __repr__(self) -> str:
        said = ", ".join(f"{count} {state}" for state, count in self.counts().items() if count)
        return f"<DriftWatch {said or 'nothing desired'}>"
