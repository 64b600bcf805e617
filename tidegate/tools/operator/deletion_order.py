"""What a resource has made before and does not want any more: what is ever deleted, in which order, and when (pure).

What was switched off goes at once. What serves stays until what takes its place does, with all that protects and scales
it: a pool that moves to Ray keeps its StatefulSet, NetworkPolicy, budget and autoscaler until the RayService serves,
and for good where KubeRay is not installed. A group's agents that move to KubeEdge, or back, are one a node, and new
ones do not start beside old ones. So the old ones go once the controller of the new ones has taken them up; where
KubeEdge is not installed, or a DaemonSet finds no node, they stay. A ConfigMap stays until no pod is of the template
before: such a pod may start again meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tidegate.tools.operator.conditions import Progress
from tidegate.tools.operator.rendering.objects import Object

_RBAC: Final = "rbac.authorization.k8s.io/v1"
_POLICY: Final = ("networking.k8s.io/v1", "NetworkPolicy")
_MONITORING: Final = "monitoring.coreos.com/v1"
SCALERS: Final = (("autoscaling/v2", "HorizontalPodAutoscaler"), ("keda.sh/v1alpha1", "ScaledObject"))
# By the kind of the resource, in order: what protects a workload goes after it, and what its pods need last.
DELETED: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "TidegateGateway": (
        ("v1", "Service"), (_RBAC, "RoleBinding"), (_RBAC, "Role"), ("policy/v1", "PodDisruptionBudget"), _POLICY,
        (_MONITORING, "ServiceMonitor"), ("v1", "ConfigMap"),
    ),
    "TidegatePool": (
        *SCALERS, ("apps/v1", "StatefulSet"), ("ray.io/v1", "RayService"), ("policy/v1", "PodDisruptionBudget"),
        _POLICY, (_MONITORING, "ServiceMonitor"), ("v1", "Service"), ("v1", "ServiceAccount"), ("v1", "ConfigMap"),
    ),
    "TidegateFleet": (
        ("apps/v1", "DaemonSet"), ("apps.kubeedge.io/v1alpha1", "EdgeApplication"), (_MONITORING, "PodMonitor"),
        ("v1", "ConfigMap"),
    ),
}  # fmt: skip
_KEPT_UNTIL_READY: Final = frozenset(
    {("TidegatePool", kind) for kind in ("StatefulSet", "RayService", "Service", "ServiceAccount")}
    | {(kind, "ConfigMap") for kind in DELETED}
)
_AGENTS: Final = {"DaemonSet": "EdgeApplication", "EdgeApplication": "DaemonSet"}


def waits_until_ready(resource_kind: str, kind: str, wanted: Sequence[Object]) -> bool:
    """Whether what is not wanted of a kind stays until everything that is wanted is there and ready."""
    return (resource_kind, kind) in _KEPT_UNTIL_READY or any(one["kind"] == "RayService" for one in wanted)


def is_replaced(
    unwanted: Mapping[str, Any], wanted: Sequence[Object], progress: Mapping[tuple[str, str], Progress]
) -> bool:
    """Whether agents may go that others take the place of; true of whatever nothing takes the place of.

    Args:
        progress: of the workloads that are there and wanted, by kind and name.
    """
    place = _AGENTS.get(unwanted["kind"], ""), unwanted["metadata"]["name"]
    if place not in {(one["kind"], one["metadata"]["name"]) for one in wanted}:
        return True
    found = progress.get(place)
    return found is not None and found.seen and (found.wanted > 0 or place[0] == "EdgeApplication")
