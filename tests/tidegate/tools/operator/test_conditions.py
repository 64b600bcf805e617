"""Statuses are what controllers have seen of the newest template, and times stay while a status stays."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.tools.operator.conditions import ResourceCondition, new_status, progress_of, readiness


def workload(kind: str, wanted: int, /, **status: int) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"generation": 2}, "spec": {"replicas": wanted}, "status": status}


@pytest.mark.parametrize(
    ("one", "complete"),
    [
        (workload("Deployment", 2, observedGeneration=2, replicas=2, updatedReplicas=2, availableReplicas=2), True),
        (workload("Deployment", 2, observedGeneration=1, replicas=2, updatedReplicas=2, availableReplicas=2), False),
        (workload("Deployment", 2, observedGeneration=2, replicas=3, updatedReplicas=2, availableReplicas=3), False),
        (workload("Deployment", 0, observedGeneration=2), True),
        (workload("StatefulSet", 2, observedGeneration=2, replicas=2, updatedReplicas=1, readyReplicas=2), False),
        (workload("StatefulSet", 1, observedGeneration=2, replicas=1, updatedReplicas=1, readyReplicas=1), True),
        (workload("Deployment", 1), False),
        (
            workload("DaemonSet", 0, observedGeneration=2, desiredNumberScheduled=9, updatedNumberScheduled=9,
                     numberAvailable=8), False,
        ),
    ],
)  # fmt: skip
def test_a_workload_is_complete_when_all_pods_are_new_and_ready(one: dict[str, Any], complete: bool) -> None:
    assert progress_of(one).complete is complete
    assert readiness(progress_of(one)).status == ("True" if complete else "False")


def test_a_condition_keeps_its_time_while_it_keeps_its_status() -> None:
    first = new_status({}, 1, [ResourceCondition("Ready", "False", "Progressing", "0 of 2")], {}, "10:00")
    second = new_status(first, 1, [ResourceCondition("Ready", "False", "Progressing", "1 of 2")], {}, "10:01")
    third = new_status(second, 1, [ResourceCondition("Ready", "True", "RolledOut")], {"replicas": 2}, "10:02")

    times = [one["conditions"][0]["lastTransitionTime"] for one in (first, second, third)]
    assert times == ["10:00", "10:00", "10:02"]
    assert third["replicas"] == 2


def test_what_a_refused_change_does_not_touch_stays_said() -> None:
    runs = new_status({}, 1, [ResourceCondition("Ready", "True", "RolledOut")], {"replicas": 2}, "10:00")
    refused = new_status(runs, 2, [ResourceCondition("Accepted", "False", "InvalidConfig", "…")], {}, "10:05")

    assert [(one["type"], one["status"]) for one in refused["conditions"]] == [("Accepted", "False"), ("Ready", "True")]
    assert (refused["replicas"], refused["observedGeneration"]) == (2, 2)
