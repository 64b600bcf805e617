"""A canary rollout moves a model version or a configuration to a fleet in waves, and returns by itself when they fail.

    waiting → asked → working → succeeded                    running → succeeded
                 │        └───→ failed                          ↕
                 └─(deadline)─→ overdue                       paused ──→ returning → returned
    after an abort:  recalled → back | stuck

A wave asks its devices by publishing their documents, and the next wave begins once enough of all that were asked have
*committed*: what a device has not reported never counts as success, and a device that is silent past its deadline
counts as an error, so a rollout cannot hang on a cellar. More errors than `max_errors` and everything that was asked is
called back; enough successes out of reach with fewer errors pauses, and a person decides.

The way back is written before the first step: every device's document for its return has the next revision, is signed
with the first, and waits. So a gateway that holds no key can abort at any time, and an abort changes only which
of two documents a device is asked for.

Time is counted by `elapsed_s`, which runs only while this gateway hears its broker: an hour in which no device could
report delays none. Reports are folded as they are, in any order and again: a device that is overdue and commits
after all is a success, one that commits and falls back later an error.

Invariants: a device is asked at most one forward and one backward revision, the backward one is greater; nothing
forward is asked once returning; `succeeded` counts devices whose newest report says committed at the asked revision.
A configuration goes the same way: its device commits it after it has done well with it for a while, or goes back. Not
yet proven are then at most the devices of one wave, and those that `success_ratio` and `max_errors` leave of earlier
ones.
It can be wrong where a device lies; the documents it accepts are signed, so it can harm itself only.

Source: hawkBit #693 (deadline), #735 (unknown is no success); Google SRE Workbook, ch. 16, "Canarying Releases".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import ceil
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from tidegate.fleet.reported import ModelReport, Reported, RolloutState
from tidegate.fleet.topics import NAME_PATTERN

MAX_DEVICES: Final = 10_000
MAX_NOTES: Final = 400
Share = Annotated[float, Meta(gt=0, le=1)]
DeviceName = Annotated[str, Meta(pattern=NAME_PATTERN)]
Revision = Annotated[int, Meta(ge=1, le=2**53 - 1)]


class RolloutPhase(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    RETURNING = "returning"
    RETURNED = "returned"

    @property
    def is_over(self) -> bool:
        return self in (RolloutPhase.SUCCEEDED, RolloutPhase.RETURNED)


class DeviceStep(StrEnum):
    WAITING = "waiting"
    ASKED = "asked"
    WORKING = "working"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    OVERDUE = "overdue"
    RECALLED = "recalled"
    BACK = "back"
    STUCK = "stuck"


_ERRORS: Final = (DeviceStep.FAILED, DeviceStep.OVERDUE)
_FORWARD: Final = (DeviceStep.ASKED, DeviceStep.WORKING, DeviceStep.SUCCEEDED, DeviceStep.FAILED, DeviceStep.OVERDUE)


class DocumentRevisions(msgspec.Struct, frozen=True):
    """Of one device's two documents."""

    forward: Revision
    back: Revision

    def __post_init__(self) -> None:
        if self.back <= self.forward:
            raise ValueError("the document for the way back must have a greater revision than the one forward")


class RolloutSpec(msgspec.Struct, frozen=True):
    """What was ordered.

    Args:
        kind: what it brings. Of a configuration, `model` is the word and `version` its digest.
        devices: in the order in which they are asked; the first are the canaries.
        waves: shares of the devices that have been asked by the end of each wave; the last is 1.
        success_ratio: share of the devices asked so far that must have committed before the next wave.
        max_errors: devices that may fail or be overdue; one more and all are called back.
        deadline_s: from being asked to having committed, and the same for the way back.
        bake_s: to wait after a wave has passed before the next begins.
    """

    id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\Z")]
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    version: Annotated[str, Meta(min_length=1, max_length=64)]
    devices: Annotated[tuple[DeviceName, ...], Meta(min_length=1, max_length=MAX_DEVICES)]
    revisions: dict[DeviceName, DocumentRevisions]
    waves: Annotated[tuple[Share, ...], Meta(min_length=1, max_length=100)] = (1.0,)
    success_ratio: Share = 0.95
    max_errors: Annotated[int, Meta(ge=0)] = 0
    deadline_s: Annotated[float, Meta(ge=1, le=31_536_000)] = 86_400.0
    bake_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 0.0
    kind: Literal["model", "configuration"] = "model"

    def __post_init__(self) -> None:
        if len(set(self.devices)) != len(self.devices) or set(self.devices) != set(self.revisions):
            raise ValueError("each device is there once, with its revisions")
        if list(self.waves) != sorted(set(self.waves)) or self.waves[-1] != 1.0:
            raise ValueError("waves are growing shares, and the last is 1 (100 %)")

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many devices have been asked by the end of each wave; at least one more than in the wave before."""
        sizes: list[int] = []
        for share in self.waves:
            size = max(1, ceil(share * len(self.devices) - 1e-9))
            if not sizes or size > sizes[-1]:
                sizes.append(size)
        return tuple(sizes)


class DeviceProgress(msgspec.Struct):
    """One device's way. `state` and what follows are the device's own words."""

    step: DeviceStep = DeviceStep.WAITING
    wave: int = 0
    asked_at_s: float = 0.0
    reason: str = ""
    state: str = ""
    running: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


class RolloutNote(msgspec.Struct, frozen=True):
    """What happened, in words."""

    at_s: float
    words: str


class CanaryState(msgspec.Struct):
    """Everything that must outlive the gateway."""

    parts: dict[str, DeviceProgress]
    phase: RolloutPhase = RolloutPhase.RUNNING
    wave: int = -1  # the newest that was asked
    elapsed_s: float = 0.0
    passed_at_s: float | None = None
    reason: str = ""
    back_since_s: float = 0.0
    notes: list[RolloutNote] = []


class CanaryRollout:
    """One rollout. Mutable: `hear` reports, `advance` time, then read `asks`."""

    def __init__(self, spec: RolloutSpec, state: CanaryState | None = None) -> None:
        self.spec = spec
        self.state = state or CanaryState({device: DeviceProgress() for device in spec.devices}, notes=[])

    # what comes in

    def hear(self, reports: Mapping[str, Reported | None]) -> bool:
        """What devices report now; whether that changed anything."""
        changed = False
        for device, part in self.state.parts.items():
            reported = reports.get(device)
            if reported is not None and part.step is not DeviceStep.WAITING:
                changed |= self._hear(device, part, reported)
        return changed

    def advance(self, passed_s: float) -> bool:
        """So much time has passed in which devices could be heard; decide. Whether anything changed but the time."""
        self.state.elapsed_s += passed_s
        match self.state.phase:
            case RolloutPhase.RUNNING | RolloutPhase.PAUSED:
                return self._go_on()
            case RolloutPhase.RETURNING:
                return self._come_back()
        return False

    def pause(self, reason: str) -> None:
        if self.state.phase is RolloutPhase.RUNNING:
            self._turn(RolloutPhase.PAUSED, reason)

    def resume(self) -> None:
        """Go on. One that has stalled goes on with the next wave, or after the last is taken as it is."""
        if self.state.phase is not RolloutPhase.PAUSED:
            return
        self._turn(RolloutPhase.RUNNING, "resumed")
        if self.state.wave < 0 or self.count(DeviceStep.ASKED, DeviceStep.WORKING) or self._is_enough:
            return
        if self._is_last:
            self._turn(RolloutPhase.SUCCEEDED, f"taken as it is: {self._score}")
        else:
            self._ask_next()

    def abort(self, reason: str) -> None:
        """Call back every device that was asked, also after all have succeeded."""
        if self.state.phase not in (RolloutPhase.RETURNING, RolloutPhase.RETURNED):
            for part in self._of(*_FORWARD):
                part.step, part.state = DeviceStep.RECALLED, ""
            self.state.back_since_s = self.state.elapsed_s
            self._turn(RolloutPhase.RETURNING, reason)

    # what goes out

    @property
    def asks(self) -> dict[str, bool]:
        """By device that was asked for anything: whether for the way back."""
        parts = self.state.parts.items()
        return {device: part.step not in _FORWARD for device, part in parts if part.step is not DeviceStep.WAITING}

    def count(self, *steps: DeviceStep) -> int:
        return sum(1 for _ in self._of(*steps))

    # one device

    def _hear(self, device: str, part: DeviceProgress, reported: Reported) -> bool:
        before = msgspec.structs.astuple(part)
        forward = part.step in _FORWARD
        revisions = self.spec.revisions[device]
        wanted, scope = revisions.forward if forward else revisions.back, f"device/{device}"
        refusal = next((one for one in reported.refused if (one.scope, one.revision) == (scope, wanted)), None)
        if reported.accepted.get(scope, 0) >= wanted:
            refusal = None  # it has this one: the refused one was another's, sent under its number
        report = _report_of(self.spec, reported)
        if refusal is not None:
            part.step, part.reason = (
                DeviceStep.FAILED if forward else DeviceStep.STUCK,
                f"refused_{refusal.reason}"[:300],
            )
        elif report is not None and (report.scope, report.revision) == (scope, wanted):
            part.state, part.running = str(report.state), report.running
            part.done_bytes, part.total_bytes = report.done_bytes, report.total_bytes
            part.step, part.reason = _forward(part, report) if forward else _back(report)
        elif forward and not self.state.phase.is_over and reported.accepted.get(scope, 0) > revisions.back:
            # Once all is over the next document is the next rollout's, and what was committed stays so.
            part.step, part.reason = DeviceStep.FAILED, "superseded: another document has been accepted since"
        elif not forward and (report is None or not report.running) and reported.accepted.get(scope, 0) >= wanted:
            part.step = DeviceStep.BACK  # the way back was to have no such model
        if part.step in (DeviceStep.FAILED, DeviceStep.STUCK) and before[0] is not part.step:
            self._note(f"{device} {part.step}: {part.reason}")
        return msgspec.structs.astuple(part) != before

    # decisions

    def _go_on(self) -> bool:
        state, spec = self.state, self.spec
        changed = self._mark_overdue()
        if self.count(*_ERRORS) > spec.max_errors:
            self.abort(self._too_many())
            return True
        if state.phase is RolloutPhase.PAUSED:
            return changed
        if state.wave < 0:
            return self._ask_next()
        settled = not self.count(DeviceStep.ASKED, DeviceStep.WORKING)
        if self._is_enough and not self._is_last:
            return self._pass(changed)
        state.passed_at_s = None
        if not settled:
            return changed
        if self._is_enough:
            self._turn(RolloutPhase.SUCCEEDED, self._score)
        else:
            self.pause(f"stalled: {self._score}, {spec.success_ratio:.0%} are wanted; resume or abort")
        return True

    @property
    def _is_last(self) -> bool:
        return self.state.wave == len(self.spec.sizes) - 1

    @property
    def _is_enough(self) -> bool:
        """Whether so many of those asked have committed that it may go on."""
        return self.count(DeviceStep.SUCCEEDED) >= ceil(self.spec.success_ratio * self.count(*_FORWARD) - 1e-9)

    @property
    def _score(self) -> str:
        return f"{self.count(DeviceStep.SUCCEEDED)} of {self.count(*_FORWARD)} devices have committed"

    def _pass(self, changed: bool) -> bool:
        state = self.state
        if state.passed_at_s is None:
            state.passed_at_s, changed = state.elapsed_s, True
            self._note(f"wave {state.wave + 1} has passed")
        if state.elapsed_s - state.passed_at_s >= self.spec.bake_s:
            return self._ask_next()
        return changed

    def _ask_next(self) -> bool:
        state, sizes = self.state, self.spec.sizes
        state.wave, state.passed_at_s = state.wave + 1, None
        begin, end = (0, *sizes)[state.wave], sizes[state.wave]
        chosen = self.spec.devices[begin:end]
        for device in chosen:
            state.parts[device] = DeviceProgress(DeviceStep.ASKED, state.wave, state.elapsed_s)
        self._note(f"wave {state.wave + 1} of {len(sizes)} begins: {_some(chosen)}")
        return True

    def _mark_overdue(self) -> bool:
        late = [
            (device, part)
            for device, part in self.state.parts.items()
            if part.step in (DeviceStep.ASKED, DeviceStep.WORKING)
            and self.state.elapsed_s - part.asked_at_s > self.spec.deadline_s
        ]
        for device, part in late:
            why = f" ({part.reason})" if part.reason else ""
            last = f"its last word: {part.state}{why}" if part.state else "it has not said a word about it"
            part.step, part.reason = DeviceStep.OVERDUE, f"deadline: {self.spec.deadline_s:g} s; {last}"
            self._note(f"{device} overdue: {part.reason}")
        return bool(late)

    def _come_back(self) -> bool:
        missing = self.count(DeviceStep.RECALLED)
        over = self.state.elapsed_s - self.state.back_since_s > self.spec.deadline_s
        if missing and not over:
            return False
        stuck = self.count(DeviceStep.STUCK)
        words = f"{self.count(DeviceStep.BACK)} devices are back"
        words += f", {stuck} could not go back" if stuck else ""
        words += f", {missing} have not said so" if missing else ""
        self._note(words)
        self.state.phase = RolloutPhase.RETURNED  # and keeps the reason of its return
        return True

    def _too_many(self) -> str:
        failed = [(device, part) for device, part in self.state.parts.items() if part.step in _ERRORS]
        device, part = failed[0]
        return f"errors: {len(failed)} of at most {self.spec.max_errors}; {device}: {part.reason}"[:600]

    def _turn(self, phase: RolloutPhase, reason: str) -> None:
        self.state.phase, self.state.reason = phase, reason
        self._note(f"{phase}: {reason}")

    def _note(self, words: str) -> None:
        self.state.notes.append(RolloutNote(round(self.state.elapsed_s, 3), words))
        del self.state.notes[:-MAX_NOTES]

    def _of(self, *steps: DeviceStep) -> list[DeviceProgress]:
        return [part for part in self.state.parts.values() if part.step in steps]

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.count(step)} {step}" for step in DeviceStep if self.count(step))
        wave = f"wave {self.state.wave + 1}/{len(self.spec.sizes)}"
        return f"<CanaryRollout {self.spec.id} {self.state.phase} {wave}: {counts}>"


def _forward(part: DeviceProgress, report: ModelReport) -> tuple[DeviceStep, str]:
    """Where a device is that was asked forward, by its newest report."""
    match report.state:
        case RolloutState.COMMITTED:
            return DeviceStep.SUCCEEDED, ""
        case RolloutState.ROLLED_BACK | RolloutState.FAILED:
            return DeviceStep.FAILED, report.reason or str(report.state)
    # A deadline that has passed stays so until the device has ended one way or the other.
    return (DeviceStep.OVERDUE, part.reason) if part.step is DeviceStep.OVERDUE else (DeviceStep.WORKING, report.reason)


def _back(report: ModelReport) -> tuple[DeviceStep, str]:
    match report.state:
        case RolloutState.COMMITTED:
            return DeviceStep.BACK, ""
        case RolloutState.ROLLED_BACK | RolloutState.FAILED:
            return DeviceStep.STUCK, report.reason or str(report.state)
    return DeviceStep.RECALLED, report.reason


def _report_of(spec: RolloutSpec, reported: Reported) -> ModelReport | None:
    """What the device says of what this rollout brings."""
    if spec.kind == "model":
        return next((one for one in reported.models if one.name == spec.model), None)
    said = reported.configuration
    if said is None:
        return None
    return ModelReport(
        spec.model, said.state, reason=said.reason, scope=said.scope, revision=said.revision, running=said.digest
    )


def _some(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 5 else f"{', '.join(devices[:4])} and {len(devices) - 4} more"
