"""Drift: what a device reports against what is desired of it, since when, and when it is sent again."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.versions.configuration_drift import (
    HOLD_S,
    REPAIR_S,
    ConfigurationState,
    ConfiguredDevice,
    DesiredHere,
    DriftWatch,
    compared,
)
from tidegate.fleet.reported import (
    ConfigurationReport,
    DocumentRefusal,
    Reported,
    RolloutState,
    SettingDifference,
)
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.rollout.device_settings import Setting, settings_digest

SETTINGS: dict[str, Setting] = {"nice": 3, "slots": 2}
DESIRED = DesiredHere.of(7, DesiredConfiguration(SETTINGS))
SCOPE = "device/kiosk-1"
S = ConfigurationState


def reported(
    state: str = "committed", *, accepted: int = 7, in_force: dict[str, Any] | None = None, **rest: Any
) -> Reported:
    kept = settings_digest(SETTINGS if in_force is None else in_force)
    refused = rest.pop("refused", ())
    said = ConfigurationReport(RolloutState(state), "d" * 16, scope=SCOPE, revision=accepted, kept=kept, **rest)
    return Reported("kiosk-1", 1, 1, 0, accepted={SCOPE: accepted}, refused=refused, configuration=said)


@pytest.mark.parametrize(
    ("report", "state", "words"),
    [
        (None, S.UNKNOWN, "no configuration"),
        (Reported("kiosk-1", 1, 1, 0), S.UNKNOWN, "no configuration"),
        (reported(), S.IN_SYNC, ""),
        (reported(accepted=6), S.PENDING, "not accepted revision 7"),
        (reported(accepted=8), S.UNKNOWN, "it follows revision 8"),
        (reported("planned"), S.PENDING, "on trial"),
        (reported("active"), S.PENDING, "on trial"),
        (reported("rolled_back", reason="closed: hot"), S.RETURNED, "closed: hot"),
        (
            reported(accepted=6, refused=(DocumentRefusal(SCOPE, "configuration: key 'x'", 7),)),
            S.REFUSED,
            "configuration: key 'x'",
        ),
        (reported(refused=(DocumentRefusal(SCOPE, "scope: it is for device/x", 7),)), S.IN_SYNC, ""),
        (
            reported(in_force={"nice": 3}, differs=(SettingDifference("slots", 1, "start"),)),
            S.PENDING,
            "for the agent's next start: slots",
        ),
        (
            reported(
                in_force={"nice": 9},
                differs=(SettingDifference("nice", 9, "hand"), SettingDifference("slots", 1, "start")),
            ),
            S.DRIFTED,
            "by hand: nice is 9 instead of 3",
        ),
        (reported(in_force={"nice": 9}), S.DRIFTED, "other settings"),
    ],
)  # fmt: skip
def test_a_report_is_compared_with_what_is_desired(report: Reported | None, state: S, words: str) -> None:
    found = compared("kiosk-1", DESIRED, report)
    assert found.state is state
    assert words in found.evidence


def look(watch: DriftWatch, report: Reported, now: float, *, reachable: bool = True) -> list[str]:
    return watch.look({"kiosk-1": DESIRED}, [ConfiguredDevice("kiosk-1", report, reachable)], now)


def test_drift_is_a_condition_once_it_has_lasted_and_ends_with_its_cause() -> None:
    watch, drifted = DriftWatch(), reported(in_force={"nice": 9})
    look(watch, reported(), 0.0)
    look(watch, drifted, 5.0)
    assert watch.standing(5.0 + HOLD_S - 1.0) == []
    assert watch.standing(5.0 + HOLD_S) == [("kiosk-1", 5.0, "drifted: other settings are in force")]
    assert watch.counts()["drifted"] == 1
    look(watch, reported(), 50.0)
    assert watch.standing(99.0) == [] and watch.counts()["in_sync"] == 1


def test_it_is_sent_again_ever_more_rarely_and_only_where_that_may_help() -> None:
    watch, drifted = DriftWatch(), reported(in_force={"nice": 9})
    sent = [now for now in range(400) if look(watch, drifted, float(now))]
    assert sent == [REPAIR_S, 3 * REPAIR_S, 7 * REPAIR_S]

    shown = reported(in_force={"nice": 9}, differs=(SettingDifference("nice", 9, "hand"),))
    for report in (reported(), reported("rolled_back"), reported("active"), reported(accepted=8), shown):
        watch = DriftWatch()
        assert not any(look(watch, report, float(now)) for now in range(0, 400, 10))
    watch = DriftWatch()
    assert not any(look(watch, drifted, float(now), reachable=False) for now in range(0, 400, 10))
    assert look(watch, drifted, 401.0) == ["kiosk-1"], "when it can hear again"


def test_a_document_that_was_lost_is_sent_again() -> None:
    watch, behind = DriftWatch(), reported(accepted=6)
    assert look(watch, behind, 0.0) == []
    assert look(watch, behind, REPAIR_S) == ["kiosk-1"]
    assert watch.standing(500.0) == [], "a device that is behind has settled on nothing else"


def test_a_device_of_which_nothing_is_desired_any_more_is_forgotten() -> None:
    watch = DriftWatch()
    look(watch, reported(in_force={"nice": 9}), 0.0)
    watch.look({}, [], 20.0)
    assert watch.standing(99.0) == [] and watch.of("kiosk-1") is None
