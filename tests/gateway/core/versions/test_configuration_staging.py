"""A configuration on its way through a fleet: the gateway's waves and the devices' trials, whatever happens."""

from __future__ import annotations

from math import floor
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.core.configuration_trial import (
    MAX_STARTS,
    ConfigurationRecord,
    DeviceStanding,
    after_start,
    asked_by,
    begun,
    judged,
)
from gateway.core.versions.canary import (
    CanaryRollout,
    CanaryState,
    DeviceStep,
    DocumentRevisions,
    RolloutPhase,
    RolloutSpec,
)
from tidegate.fleet.reported import ConfigurationReport, Reported, RolloutState
from tidegate.rollout.device_settings import Setting, settings_digest

DEVICES = tuple(f"kiosk-{number}" for number in range(8))
OLD: dict[str, Setting] = {"nice": 1}
NEW: dict[str, Setting] = {"nice": 9}
FORWARD, BACK = 7, 8
WATCH_S = 10.0


class SimulatedDevice:
    """A device with the real core of the trial; its reports reach the gateway while it is online."""

    def __init__(self, name: str, *, unwell: bool, crashes: bool) -> None:
        self.name = name
        self.unwell = unwell  # with the new settings
        self.crashes = crashes  # likewise
        self.online = True
        self.record = ConfigurationRecord(in_force=OLD)
        self.revision = 0
        self._watched_s = self._unwell_s = 0.0

    def hear(self, revision: int) -> None:
        if not self.online or revision <= self.revision:
            return
        self.revision = revision
        wanted = NEW if revision == FORWARD else OLD
        self.record = begun(asked_by(self.record, f"{revision}"), wanted, WATCH_S, DeviceStanding())
        self._watched_s = self._unwell_s = 0.0

    def live(self, seconds: float) -> None:
        if self.record.trying is None:
            return
        if self.crashes and self.record.trying == NEW:
            self.start()
            return
        bad = self.unwell and self.record.trying == NEW
        self._watched_s += seconds
        self._unwell_s = self._unwell_s + seconds if bad else 0.0
        self.record = judged(
            self.record,
            watched_s=self._watched_s,
            unwell="closed: hot" if bad else "",
            unwell_s=self._unwell_s,
            well_s=0.0 if bad else self._watched_s,
        )

    def start(self) -> None:
        """After a power cut, wherever it was: what is in its record is on its disk."""
        self.record = after_start(msgspec.json.decode(msgspec.json.encode(self.record), type=ConfigurationRecord))
        self._watched_s = self._unwell_s = 0.0

    @property
    def report(self) -> Reported:
        wanted = NEW if self.revision == FORWARD else OLD
        refused = self.record.why_refused(wanted)
        state = RolloutState.COMMITTED
        if self.record.trying is not None:
            state = RolloutState.ACTIVE
        elif refused:
            state = RolloutState.ROLLED_BACK
        scope = f"device/{self.name}"
        said = ConfigurationReport(state, settings_digest(self.record.settings_now), refused, scope, self.revision)
        return Reported(self.name, 1, 1, 0, accepted={scope: self.revision}, configuration=said)


happening = st.one_of(
    st.tuples(st.sampled_from(["off", "on", "cut"]), st.sampled_from(DEVICES)),
    st.tuples(st.just("pass"), st.floats(0.5, 60.0)),
    st.tuples(st.sampled_from(["pause", "resume", "gateway restarts"])),
)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.lists(happening, max_size=30),
    st.sets(st.sampled_from(DEVICES)),
    st.sets(st.sampled_from(DEVICES), max_size=2),
    st.sampled_from([(0.25, 1.0), (0.1, 0.5, 1.0), (1.0,)]),
    st.sampled_from([(1.0, 0), (0.75, 2)]),
)
def test_never_more_than_the_allowed_share_is_unproven_and_each_device_ends_with_old_or_new(
    events: list[tuple[Any, ...]],
    unwell: set[str],
    crashing: set[str],
    shares: tuple[float, ...],
    tolerance: tuple[float, int],
) -> None:
    success, max_errors = tolerance
    revisions = {name: DocumentRevisions(FORWARD, BACK) for name in DEVICES}
    waves = CanaryRollout(
        RolloutSpec(
            "c-1", "configuration", settings_digest(NEW), DEVICES, revisions,
            waves=shares, success_ratio=success, max_errors=max_errors, deadline_s=300.0, kind="configuration",
        )
    )  # fmt: skip
    fleet = {name: SimulatedDevice(name, unwell=name in unwell, crashes=name in crashing) for name in DEVICES}

    def turn(seconds: float) -> None:
        nonlocal waves
        for device in fleet.values():
            device.live(seconds)
        waves.hear({name: device.report for name, device in fleet.items() if device.online})
        waves.advance(seconds)
        for name, back in waves.asks.items():
            fleet[name].hear(BACK if back else FORWARD)
        check()

    def check() -> None:
        sizes = (0, *waves.spec.sizes)
        here = waves.state.wave + 1
        unproven = waves.count(DeviceStep.ASKED, DeviceStep.WORKING, DeviceStep.FAILED, DeviceStep.OVERDUE)
        allowed = sizes[here] - sizes[max(0, here - 1)] + floor((1 - success) * sizes[max(0, here - 1)] + 1e-9)
        if not resumed:  # an operator who resumes takes what has stalled as it is
            assert unproven <= allowed, f"{waves!r}"
        on_trial = [device for device in fleet.values() if device.record.trying == NEW]
        assert len(on_trial) <= sizes[here]
        assert all(device.record.settings_now in (OLD, NEW) for device in fleet.values())

    resumed = False
    for event in events:
        match event:
            case ("off", name):
                fleet[name].online = False
            case ("on", name):
                fleet[name].online = True
            case ("cut", name):
                fleet[name].start()
            case ("pass", seconds):
                for _ in range(4):
                    turn(seconds / 4)
            case ("pause",):
                waves.pause("operator")
            case ("resume",):
                resumed = resumed or waves.state.phase is RolloutPhase.PAUSED
                waves.resume()
            case ("gateway restarts",):
                state = msgspec.json.decode(msgspec.json.encode(waves.state), type=CanaryState)
                waves = CanaryRollout(waves.spec, state)
        turn(0.0)

    for device in fleet.values():
        device.online = True
    for _ in range(200):
        turn(20.0)
        if waves.state.phase is RolloutPhase.PAUSED:
            waves.abort("operator: it stalled")
    assert waves.state.phase.is_over, f"{waves!r}"
    for name, device in fleet.items():
        part = waves.state.parts[name]
        assert device.record.trying is None and device.record.starts < MAX_STARTS
        match part.step:
            case DeviceStep.SUCCEEDED:
                assert device.record.in_force == NEW
            case DeviceStep.BACK | DeviceStep.WAITING:
                assert device.record.in_force == OLD
            case _:
                assert device.record.in_force == OLD and part.reason, f"{name}: {part}"
