"""What is said of others' workloads: by Serve's own word on an application, and by KubeEdge's Deployments."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.operator.resources import VOLUME, body, objects_of, one_of
from tidegate.tools.operator.conditions import Progress, ResourceCondition, readiness
from tidegate.tools.operator.foreign_objects import NEEDED, edge_progress, ray_progress, with_missing

POOL = body(
    "TidegatePool", "cores", modelsVolume=VOLUME, replicas=3, config={"mqtt": "mqtt://b:1883"},
    ray={"redisAddress": "redis:6379"},
)  # fmt: skip
FLEET = body("TidegateFleet", "shops", groups=[{"name": "tills", "nodeGroup": {"name": "tills", "nodes": 4}}])


def service(**status: Any) -> dict[str, Any]:
    one = one_of(objects_of(POOL), "RayService")
    return {**one, "metadata": {**one["metadata"], "generation": 2}, "status": {"observedGeneration": 2, **status}}


def cluster(state: str, workers: int = 0, message: str = "") -> dict[str, Any]:
    return {
        "rayClusterName": "x",
        "applicationStatuses": {"pool": {"status": state, "message": message}},
        "rayClusterStatus": {"readyWorkerReplicas": workers},
    }


@pytest.mark.parametrize(
    ("status", "ready", "complete", "word"),
    [
        ({}, 0, False, "no application yet"),
        ({"activeServiceStatus": cluster("DEPLOYING", 2)}, 2, False, "DEPLOYING"),
        ({"activeServiceStatus": cluster("RUNNING", 3)}, 3, True, ""),
        ({"activeServiceStatus": cluster("RUNNING", 5)}, 3, True, ""),
        ({"activeServiceStatus": cluster("RUNNING", 3), "observedGeneration": 1}, 3, False, ""),
        ({"activeServiceStatus": cluster("DEPLOY_FAILED", 3, "no such model")}, 0, False, "no such model"),
        ({"activeServiceStatus": cluster("UNHEALTHY", 3)}, 0, False, "UNHEALTHY"),
        (
            {"activeServiceStatus": cluster("RUNNING", 3), "pendingServiceStatus": cluster("DEPLOYING", 1)},
            1, False, "DEPLOYING",
        ),
        (
            {"activeServiceStatus": cluster("RUNNING", 3), "pendingServiceStatus": {"rayClusterStatus": {}}},
            3, True, "",
        ),
    ],
)  # fmt: skip
def test_a_ray_service_is_as_far_as_serve_says(status: dict[str, Any], ready: int, complete: bool, word: str) -> None:
    progress = ray_progress(service(**status), "pool")

    assert (progress.wanted, progress.ready, progress.complete) == (3, ready, complete)
    assert word in progress.words
    assert complete or word in readiness(progress).message


def test_a_group_is_ready_once_kubeedges_deployment_runs_the_newest_agents() -> None:
    application = one_of(objects_of(FLEET), "EdgeApplication")
    (deployment,) = application["spec"]["workloadTemplate"]["manifests"]
    status = {"observedGeneration": 1, "replicas": 4, "updatedReplicas": 4, "availableReplicas": 4}
    made = {**deployment, "metadata": {**deployment["metadata"], "generation": 1}, "status": status}
    template = made["spec"]["template"]
    old = {**template, "metadata": {**template["metadata"], "annotations": {}}}
    before = {**made, "spec": {**made["spec"], "template": old}}

    assert edge_progress(application, [made]) == Progress(4, 4, 4, seen=True)
    assert edge_progress(application, [before]) == Progress(4, 0, 4, seen=False), "KubeEdge has not seen the newest"
    assert not edge_progress(application, []).complete


@pytest.mark.parametrize("kind", sorted(NEEDED))
def test_what_is_not_installed_is_named_and_everything_else_said_stays(kind: str) -> None:
    conditions = [ResourceCondition(one, "True", "Applied") for one in ("Accepted", "Ready", "Autoscaled", "Monitored")]
    said = with_missing(conditions, [kind])

    changed = [one for one, before in zip(said, conditions, strict=True) if one != before]
    assert [(one.type, one.status, one.reason) for one in changed] == [(NEEDED[kind][1], "False", "NotInstalled")]
    assert kind in changed[0].message and NEEDED[kind][0] in changed[0].message
    assert with_missing(conditions, []) == conditions
