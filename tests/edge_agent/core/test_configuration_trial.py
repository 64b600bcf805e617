"""A configuration trial ends with the new settings or with those before, wherever the power goes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.configuration_merge import SHOWN_S, differences, kept_digest, may_undo, merged
from edge_agent.core.configuration_trial import (
    MAX_STARTS,
    ConfigurationRecord,
    DeviceStanding,
    accepted,
    after_start,
    asked_by,
    begun,
    complaint,
    judged,
    taken_back,
    waiting_for_start,
)
from tidegate.fleet.reported import SettingDifference
from tidegate.rollout.desired import DesiredSettings
from tidegate.rollout.device_settings import Setting, settings_digest

OLD: dict[str, Setting] = {"nice": 1}
NEW: dict[str, Setting] = {"nice": 5, "max_queue_size": 7}
WELL = DeviceStanding(ready=("digits",), served=("digits",))


def trying(**changes: Any) -> ConfigurationRecord:
    return msgspec.structs.replace(begun(ConfigurationRecord(in_force=OLD), NEW, 20.0, WELL), **changes)


def look(record: ConfigurationRecord, watched_s: float, unwell_s: float = 0.0, unwell: str = "") -> ConfigurationRecord:
    well_s = 0.0 if unwell else watched_s
    return judged(record, watched_s=watched_s, unwell=unwell, unwell_s=unwell_s, well_s=well_s)


def test_settings_are_kept_after_their_watch_and_not_before() -> None:
    assert look(trying(), 19.9).trying == NEW
    kept = look(trying(), 20.0)
    assert (kept.in_force, kept.trying) == (NEW, None)


def test_a_device_that_is_unwell_for_the_grace_goes_back_and_does_not_try_again() -> None:
    record = trying()
    assert look(record, 9.0, 9.0, "closed: hot").trying == NEW

    back = look(record, 10.0, 10.0, "closed: hot")

    assert (back.in_force, back.trying) == (OLD, None)
    assert back.why_refused(NEW) == "closed: hot"
    assert begun(back, NEW, 20.0, WELL) is back
    assert begun(asked_by(back, "device/k 2"), NEW, 20.0, WELL).trying == NEW, "until another document asks"


def test_a_device_that_is_never_well_for_long_ends_too() -> None:
    assert judged(trying(), watched_s=80.0, unwell="", unwell_s=0.0, well_s=0.1).why_refused(NEW).startswith("unsteady")


def test_the_third_start_during_a_trial_goes_back() -> None:
    record = trying()
    for _ in range(MAX_STARTS - 1):
        record = after_start(record)
        assert record.settings_now == NEW
    record = after_start(record)
    assert (record.settings_now, record.trying) == (OLD, None)
    assert record.why_refused(NEW).startswith("crash_loop")


def test_settings_that_a_start_brings_are_on_trial_from_that_start() -> None:
    record = waiting_for_start(accepted(trying()), ("slots",), OLD)

    started = after_start(record)
    assert (started.trying, started.in_force, started.at_start) == (NEW, OLD, ())
    assert taken_back(started, "closed: hot").settings_now == OLD
    assert after_start(accepted(started)) == accepted(started), "proven: no further start tries it"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (WELL, WELL, ""),
        (WELL, DeviceStanding(closed="it is hot", ready=("digits",), served=("digits",)), "closed: it is hot"),
        (DeviceStanding(closed="it is hot"), DeviceStanding(closed="it is hotter"), ""),
        (WELL, DeviceStanding(served=("digits",)), "models: digits does not answer any more"),
        (WELL, DeviceStanding(), ""),
        (
            WELL,
            DeviceStanding(ready=("digits",), served=("digits",), answered=4, failed=5),
            "failures: 5 of 9 requests",
        ),
        (WELL, DeviceStanding(ready=("digits",), served=("digits",), answered=5, failed=5), ""),
        (DeviceStanding(answered=100, failed=90), DeviceStanding(answered=109, failed=91), ""),
        (DeviceStanding(answered=100, failed=90), DeviceStanding(answered=0, failed=6), "failures: 6 of 6 requests"),
    ],
)
def test_unwell_is_what_was_not_so_before(before: DeviceStanding, now: DeviceStanding, words: str) -> None:
    assert complaint(before, now) == words


EVENTS = st.lists(st.sampled_from(["well", "unwell", "start", "new", "other", "document"]), max_size=40)


@given(EVENTS)
def test_whatever_happens_the_settings_are_those_before_or_the_wanted_ones(events: list[str]) -> None:
    record = ConfigurationRecord(in_force=OLD)
    known = {settings_digest(one) for one in (OLD, NEW, {})}
    watched_s = 0.0
    for number, event in enumerate(events):
        match event:
            case "well" | "unwell":
                watched_s += 5.0
                unwell = "" if event == "well" else "closed: hot"
                if record.trying is not None:
                    record = judged(
                        record, watched_s=watched_s, unwell=unwell, unwell_s=6.0 if unwell else 0.0, well_s=9.0
                    )
            case "start":
                record = after_start(record)
            case "document":
                record = asked_by(record, f"device/k {number}")
            case _:
                before, record = record, begun(record, NEW if event == "new" else {}, 10.0, WELL)
                watched_s = watched_s if before.trying == record.trying else 0.0
        assert settings_digest(record.settings_now) in known
        assert record.starts < MAX_STARTS
        assert msgspec.json.decode(msgspec.json.encode(record), type=ConfigurationRecord) == record
    for _ in range(MAX_STARTS + 1):
        record = after_start(record)
    assert record.trying is None, "a device that only starts and ends does not try for ever"


DESIRED = DesiredSettings({"nice": 5, "max_queue_size": 7, "slots": 2}, 60.0, "show", "device/k", 3)


def test_the_devices_own_file_wins_unless_the_document_undoes_it() -> None:
    local = {"nice": 9, "threads": 2}
    assert merged(DESIRED, local, undo=False) == {"nice": 9, "threads": 2, "max_queue_size": 7, "slots": 2}
    assert merged(DESIRED, local, undo=True) == {"nice": 5, "threads": 2, "max_queue_size": 7, "slots": 2}
    assert merged(None, local, undo=False) == local


def test_a_change_by_hand_is_shown_before_it_is_undone() -> None:
    undoing = DesiredSettings(DESIRED.settings, 60.0, "undo", "device/k", 3)
    local = {"nice": 9}
    assert not may_undo(DESIRED, local, shown_s=1e9, undone="")
    assert not may_undo(undoing, local, shown_s=SHOWN_S - 1.0, undone="")
    assert may_undo(undoing, local, shown_s=SHOWN_S, undone="")
    assert may_undo(undoing, local, shown_s=0.0, undone=settings_digest(local)), "a start shows nothing anew"


def test_what_differs_is_said_with_its_reason() -> None:
    in_force = {"nice": 9, "max_queue_size": 64, "slots": 1, "threads": 1}
    found = differences(DESIRED, in_force, by_hand={"nice": 9, "threads": 3}, at_start={"slots": 2}, returned=False)
    assert found == (
        SettingDifference("max_queue_size", 64),
        SettingDifference("nice", 9, "hand"),
        SettingDifference("slots", 1, "start"),
    )
    assert kept_digest(DESIRED, {**in_force, **DESIRED.settings}) == settings_digest(DESIRED.settings)
