"""The ACL check tests the broker, and reports each finding once."""

from __future__ import annotations

from edge_agent.core.acl_check import AclCheck, AclFinding
from tidegate.fleet.topics import Topics

TOPICS = Topics("f1")


def found(finding: AclFinding | None) -> str:
    return finding.severity if finding else ""


def test_a_broker_that_keeps_devices_apart_is_no_complaint() -> None:
    check = AclCheck(TOPICS, "edge-1")
    own, strangers = check.topics("5")
    assert own == "tidegate/v1/f1/up/edge-1/probe"
    assert (found(check.answered(own, "")), found(check.answered(strangers, "Not authorized"))) == ("info", "info")
    assert "no complaint" in repr(check)


def test_a_denied_own_name_is_an_error_and_an_allowed_foreign_one_a_warning() -> None:
    check = AclCheck(TOPICS, "edge-1")
    own, strangers = check.topics("5")
    assert (found(check.answered(own, "Not authorized")), found(check.answered(strangers, ""))) == ("error", "warning")
    assert "does not let" in repr(check)


def test_each_finding_is_told_once_until_it_changes() -> None:
    check = AclCheck(TOPICS, "edge-1")
    own, _ = check.topics("5")
    assert [found(check.answered(own, refusal)) for refusal in ("", "", "no", "no", "")] == [
        "info", "", "error", "", "info"
    ]  # fmt: skip


def test_mqtt_3_1_1_cannot_tell_and_that_is_said_once() -> None:
    check = AclCheck(TOPICS, "edge-1")
    assert check.topics("3.1.1") == ()
    assert [found(check.cannot_tell()), found(check.cannot_tell())] == ["info", ""]


def test_no_device_can_have_the_name_that_is_tried() -> None:
    _, strangers = AclCheck(TOPICS, "edge-1").topics("5")
    assert TOPICS.parse_up(strangers) is None


def test_other_answers_mean_nothing() -> None:
    assert AclCheck(TOPICS, "edge-1").answered("tidegate/v1/f1/up/edge-1/birth", "no") is None
