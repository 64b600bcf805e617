"""Reconciliation, the soak trial, the fetch retry rules and the preconditions of a rollout."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from edge_agent.core.fetch_retry import DownloadBudget, is_transient
from edge_agent.core.reconcile import (
    AcceptedRevision,
    BeginRollout,
    RemoveModel,
    SettleFulfilled,
    is_still_wanted,
    next_action,
    refusal_reason,
    with_newest_rules,
)
from edge_agent.core.rollout_machine import S
from edge_agent.core.soak import FEW, ComputeTimes, SoakTrial
from edge_agent.delivery.preconditions import DeviceResources, fetch_hindrance, load_hindrance
from tests.edge_agent.core.test_rollout_machine import ROLLOUT
from tests.tidegate.rollout.test_documents import document, plan
from tidegate.fleet.conditions import DeviceConditions
from tidegate.rollout.desired import DesiredModel
from tidegate.rollout.plan import Net, Soak

SCOPE = "device/kiosk-1"
NEW = plan("2")


def wish(version: str | None = "2", revision: int = 7, **changes: Any) -> DesiredModel:
    return DesiredModel(plan(version, **changes) if version else None, SCOPE, revision)


@pytest.mark.parametrize(
    ("revision", "digest", "scope", "words"),
    [
        (8, "new", SCOPE, ""),
        (7, "same", SCOPE, ""),
        (7, "new", SCOPE, "revision: 7 is in force with other content"),
        (6, "same", SCOPE, "revision: 6 is older than 7, which is in force"),
        (8, "new", "group/a", "scope: it is for device/kiosk-1, but came to group/a"),
    ],
)
def test_revisions_only_grow(revision: int, digest: str, scope: str, words: str) -> None:
    assert refusal_reason(document(revision), digest, AcceptedRevision(7, "same"), scope=scope) == words
    assert refusal_reason(document(1), "any", None, scope=SCOPE) == ""


def test_what_differs_from_what_is_committed_is_begun_and_what_does_not_is_noted_once() -> None:
    done = replace(ROLLOUT, plan=NEW, state=S.COMMITTED, revision=7)
    assert next_action({"digits": wish()}, {}, {}, {}) == BeginRollout("digits", wish())
    assert next_action({"digits": wish()}, {"digits": NEW.content}, {}, {}) == SettleFulfilled("digits", wish())
    assert next_action({"digits": wish()}, {"digits": NEW.content}, {"digits": done}, {}) is None
    assert isinstance(
        next_action({"digits": wish(revision=8)}, {"digits": NEW.content}, {"digits": done}, {}), SettleFulfilled
    )
    assert next_action({}, {"digits": NEW.content}, {"digits": done}, {}) is None


def test_what_is_committed_and_was_damaged_since_is_rolled_out_again_once_and_can_be_removed() -> None:
    done, committed = replace(ROLLOUT, plan=NEW, state=S.COMMITTED, revision=7), {"digits": NEW.content}
    damaged = {NEW.content}
    assert next_action({"digits": wish()}, committed, {"digits": done}, {}, damaged) == BeginRollout("digits", wish())
    assert next_action({"digits": wish()}, committed, {"digits": done}, {NEW.content: {SCOPE: 7}}, damaged) is None
    assert isinstance(next_action({"digits": wish(None)}, committed, {}, {}, damaged), RemoveModel)


def test_what_failed_is_not_tried_again_until_the_revision_of_its_scope_changes() -> None:
    blocked = {NEW.content: {SCOPE: 7}}
    assert next_action({"digits": wish(revision=7)}, {}, {}, blocked) is None
    assert isinstance(next_action({"digits": wish(revision=8)}, {}, {}, blocked), BeginRollout)
    assert isinstance(next_action({"digits": wish("3", revision=7)}, {}, {}, blocked), BeginRollout)


def test_a_model_is_removed_when_a_document_says_so_and_never_for_being_left_out() -> None:
    assert next_action({"digits": wish(None)}, {"digits": NEW.content}, {}, {}) == RemoveModel("digits", wish(None))
    assert next_action({"digits": wish(None)}, {}, {"digits": ROLLOUT}, {}) == RemoveModel("digits", wish(None))
    assert next_action({"digits": wish(None)}, {}, {}, {}) is None


def test_a_rollout_goes_on_under_new_rules_and_ends_for_other_content() -> None:
    under_way = replace(ROLLOUT, plan=NEW)
    gentle = {"digits": wish(revision=9, soak=Soak(99.0))}
    assert is_still_wanted(under_way, gentle)
    assert with_newest_rules(under_way, gentle).plan.soak.duration_s == 99.0
    assert with_newest_rules(under_way, gentle).revision == 9
    assert not is_still_wanted(under_way, {"digits": wish("3")})
    assert not is_still_wanted(under_way, {"digits": wish(None)})
    assert is_still_wanted(under_way, {})
    for others in ({}, {"digits": wish(None)}, {"digits": wish("3")}):
        assert with_newest_rules(under_way, others) is under_way


# --- soak ------------------------------------------------------------------------------------------------------------


def trial(before_p95_s: float | None = None, **rules: Any) -> SoakTrial:
    return SoakTrial(Soak(**rules), before_p95_s)


def test_time_without_a_link_does_not_count() -> None:
    soak = trial(duration_s=10.0)
    for now, linked in ((0.0, True), (6.0, True), (50.0, False), (60.0, False), (63.0, True)):
        soak.tick(now, linked=linked)
        assert not soak.passed
    soak.tick(64.5, linked=True)
    assert soak.passed
    assert soak.soaked_s == 10.5


def test_a_device_that_slept_did_not_soak() -> None:
    soak = trial(duration_s=3600.0)
    soak.tick(0.0, linked=True)
    soak.tick(7200.0, linked=True)
    assert not soak.passed


def test_requests_are_waited_for_as_long_as_the_plan_says() -> None:
    soak = trial(duration_s=1.0, min_requests=2, timeout_s=30.0)
    soak.tick(0.0, linked=True)
    soak.tick(29.0, linked=True)
    assert not soak.passed
    assert soak.failure() == ""
    soak.record(0.01)
    soak.tick(30.0, linked=True)
    assert soak.failure() == "soak_starved: 1 of 2 requests came in 30 s"
    soak.record(0.01)
    assert soak.failure() == ""
    assert soak.passed


def test_errors_beyond_the_share_fail_it_once_there_are_a_few() -> None:
    soak = trial(duration_s=0.0, err_max=0.1)
    for _ in range(FEW - 3):
        soak.record(0.01)
    for _ in range(3):
        assert soak.failure() == ""
        soak.record(None)
    assert soak.failure() == f"soak_errors: 3 of {FEW} requests failed, at most 0.1 may"


def test_one_that_fails_most_of_its_few_requests_is_not_committed() -> None:
    soak = trial(duration_s=0.0)
    soak.record(None)
    assert soak.failure() == ""
    assert not soak.passed


def test_slower_than_before_is_told_by_the_ratio_and_only_where_before_is_known() -> None:
    slow, unknown = trial(0.010, p95_ratio_max=1.5), trial(None, p95_ratio_max=1.5)
    for soak in (slow, unknown):
        for _ in range(FEW):
            soak.record(0.020)
    assert slow.failure() == "soak_slow: p95 is 2.00 times that of before, at most 1.5 is allowed"
    assert unknown.failure() == ""
    assert ComputeTimes().p95_s is None


# --- fetching --------------------------------------------------------------------------------------------------------


def test_statuses_are_waited_out_or_final() -> None:
    statuses = (400, 401, 403, 404, 408, 410, 416, 425, 429, 500, 503, 599)
    assert [one for one in statuses if is_transient(one)] == [408, 416, 425, 429, 500, 503, 599]


def test_a_cut_link_is_nobodys_failure_and_a_busy_server_is_one() -> None:
    patience = DownloadBudget(Net(max_attempts=3), 100, servers=1)
    for _ in range(1000):
        patience.record_cut()
    assert [patience.record_status(503), patience.record_status(503)] == ["", ""]
    patience.record_chunk()
    assert [patience.record_status(503) for _ in range(3)][-1] == "http_503: no progress in 3 attempts"


def test_every_server_must_refuse_before_it_is_over() -> None:
    patience = DownloadBudget(Net(), 100, servers=2)
    assert patience.record_status(404, server=0) == ""
    patience.record_cut()  # by the other one, which may have it
    assert patience.record_status(404, server=0) == ""
    patience.record_chunk()
    assert patience.record_status(403, server=1) == ""
    assert patience.record_status(403, server=0) == "http_403: every server refused"


def test_bytes_are_counted_over_restarts_and_bad_chunks_in_a_row() -> None:
    patience = DownloadBudget(Net(), 100, servers=1, fetched_bytes=60)
    assert patience.record_bytes(40) == ""
    assert patience.record_bytes(1) == "byte_budget: 101 bytes were fetched, at most 100 may be"
    assert [patience.record_bad_chunk(4), patience.record_bad_chunk(4)] == ["", ""]
    patience.record_chunk()
    assert [bool(patience.record_bad_chunk(5)) for _ in range(3)] == [False, False, True]


# --- hindrance -------------------------------------------------------------------------------------------------------

NOON = 86_400.0 * 20_000 + 43_200
FREE = DeviceResources(DeviceConditions(), NOON, free_disk_bytes=10_000, free_memory_bytes=10_000)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, {}, ""),
        ({}, {"conditions": DeviceConditions(metered=True)}, "metered"),
        ({"net": Net("allow")}, {"conditions": DeviceConditions(metered=True)}, ""),
        ({}, {"free_disk_bytes": 4999}, "disk: 5000 bytes are needed, 4999 are free"),
        (
            {},
            {"free_disk_bytes": -3000},
            "disk: 5000 bytes are needed, 0 are free beside the spare ones; 8000 too few",
        ),
        ({"window": "02:00-05:00"}, {}, "window: it is 02:00-05:00 UTC"),
        ({"window": "11:00-13:00"}, {}, ""),
        ({"window": "11:00-13:00"}, {"utc_s": None}, "does not know the time"),
    ],
)
def test_what_stands_against_fetching(changes: dict[str, Any], device: dict[str, Any], words: str) -> None:
    found = fetch_hindrance(plan(**changes), 5000, _device(**device))
    assert words in found
    assert bool(words) == bool(found)
    assert fetch_hindrance(plan(**changes), 0, _device(**device)) == ""


@pytest.mark.parametrize(
    ("changes", "device", "beside", "words"),
    [
        ({}, {}, True, ""),
        ({"ram_bytes": 8000}, {}, True, "ram: 10400 bytes are needed beside the running generation, 10000 are free"),
        ({"ram_bytes": 8000}, {}, False, ""),
        ({"ram_bytes": 8000, "activate": "stop_start"}, {}, True, ""),
        ({"ram_bytes": 7000}, {}, True, ""),
        ({}, {"conditions": DeviceConditions(throttled=True)}, True, "thermal"),
        ({"window": "02:00-05:00"}, {}, True, "window"),
    ],
)
def test_what_stands_against_loading(changes: dict[str, Any], device: dict[str, Any], beside: bool, words: str) -> None:
    found = load_hindrance(plan(**changes), _device(**device), beside=beside)
    assert words in found
    assert bool(words) == bool(found)


def _device(**changes: Any) -> DeviceResources:
    fields = {name: getattr(FREE, name) for name in DeviceResources.__slots__}
    return DeviceResources(**(fields | changes))
