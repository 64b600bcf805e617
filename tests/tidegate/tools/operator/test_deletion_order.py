"""What takes the place of another is there before the other goes; what was switched off goes at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.operator.resources import VOLUME, body, objects_of, one_of
from tidegate.tools.operator.conditions import Progress
from tidegate.tools.operator.deletion_order import DELETED, is_replaced, waits_until_ready

TILLS = "shops-edge-tills"
UNSEEN, NOWHERE, PENDING = Progress(4, 0, 0, seen=False), Progress(0, 0, 0, seen=True), Progress(4, 0, 0, seen=True)


def agents(*, edge: bool, name: str = "tills") -> list[dict[str, Any]]:
    group: dict[str, Any] = {"name": name, **({"nodeGroup": {"name": name, "nodes": 4}} if edge else {})}
    return objects_of(body("TidegateFleet", "shops", groups=[group]))


@pytest.mark.parametrize(
    ("edge", "progress", "goes"),
    [
        (True, None, False),  # the cluster does not know it
        (True, UNSEEN, False),  # KubeEdge has made no Deployment
        (True, PENDING, True),  # whose pods wait for the DaemonSet's to go
        (False, UNSEEN, False),
        (False, NOWHERE, False),  # its labels are on no node yet
        (False, PENDING, True),
    ],
)
def test_agents_stay_until_a_controller_has_taken_up_others(edge: bool, progress: Progress | None, goes: bool) -> None:
    kind, before = ("EdgeApplication", "DaemonSet") if edge else ("DaemonSet", "EdgeApplication")
    unwanted = one_of(agents(edge=not edge), before)
    there = {} if progress is None else {(kind, TILLS): progress}

    assert is_replaced(unwanted, agents(edge=edge), there) is goes
    assert is_replaced(unwanted, agents(edge=edge, name="kiosks"), {}), "a group that was taken out goes at once"


def test_all_of_a_pool_stays_until_ray_serves_and_nothing_of_one_that_moves_nowhere_but_what_its_pods_need() -> None:
    plain = objects_of(body("TidegatePool", "cores", modelsVolume=VOLUME))
    ray = objects_of(
        body("TidegatePool", "cores", modelsVolume=VOLUME, config={"mqtt": "mqtt://b"}, ray={"redisAddress": "r:6379"})
    )
    kinds = [kind for _, kind in DELETED["TidegatePool"]]

    assert all(waits_until_ready("TidegatePool", kind, ray) for kind in kinds)
    waits = {kind for kind in kinds if waits_until_ready("TidegatePool", kind, plain)}
    assert waits == {"StatefulSet", "RayService", "Service", "ServiceAccount", "ConfigMap"}
