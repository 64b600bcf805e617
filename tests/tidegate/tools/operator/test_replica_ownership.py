"""A number of replicas is handed over once, and only where it would go otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.operator.resources import VOLUME, body, objects_of, one_of
from tidegate.tools.operator.rendering.objects import MANAGER
from tidegate.tools.operator.replica_ownership import HEIR, leaves_replicas, replicas_to_hand_over

NUMBER: dict[str, Any] = {"f:spec": {"f:replicas": {}, "f:template": {}}}
REST: dict[str, Any] = {"f:metadata": {"f:labels": {}}, "f:spec": {"f:template": {}}}


def live(*owners: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    fields = [{"manager": manager, "operation": "Apply", "fieldsV1": fields} for manager, fields in owners]
    meta = {"name": "cores-pool", "namespace": "prod", "uid": "u-1", "managedFields": fields}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": {"replicas": 8}}


def test_the_only_owner_hands_over_the_live_number_and_nothing_else() -> None:
    assert replicas_to_hand_over(live((MANAGER, NUMBER), ("kube-controller-manager", REST))) == {
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "cores-pool", "namespace": "prod", "uid": "u-1"}, "spec": {"replicas": 8},
    }  # fmt: skip


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [(MANAGER, REST)],
        [(MANAGER, NUMBER), (HEIR, NUMBER)],
        [(MANAGER, REST), ("kube-controller-manager", NUMBER)],
        [(MANAGER, NUMBER), ("kubectl", NUMBER)],
    ],
)
def test_a_number_that_stays_by_itself_is_left_alone(owners: list[tuple[str, dict[str, Any]]]) -> None:
    assert replicas_to_hand_over(live(*owners)) is None


@pytest.mark.slow
def test_only_a_scaled_pool_leaves_its_number_to_others() -> None:
    scaled = objects_of(body("TidegatePool", "gpus", modelsVolume=VOLUME, autoscaling={"kind": "hpa"}))
    fixed = objects_of(body("TidegatePool", "gpus", modelsVolume=VOLUME))
    gateways = objects_of(body("TidegateGateway", "main", modelsVolume=VOLUME))

    assert leaves_replicas(one_of(scaled, "StatefulSet"))
    assert not leaves_replicas(one_of(fixed, "StatefulSet"))
    assert not any(leaves_replicas(one) for one in gateways), "what scales a gateway is its resource"
