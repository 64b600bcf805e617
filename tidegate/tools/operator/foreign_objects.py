"""Objects of other operators: what is said where those are missing, and how far their workloads are (pure).

A cluster without KEDA, KubeRay, KubeEdge or the Prometheus operator does not know their resources. Everything else is
made all the same, and a condition says what is missing. Their workloads are not watched, for a watch of a resource that
comes later would never begin: they are looked at every few seconds.

Source: KubeRay, `RayServiceStatuses` of ray.io/v1; Ray, "Serve, application statuses".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tidegate.tools.operator.conditions import Progress, ResourceCondition, progress_of
from tidegate.tools.operator.rendering.objects import CHECKSUM

# Each with what it is that is missing, and the condition that says so.
NEEDED: Final[Mapping[str, tuple[str, str]]] = {
    "ScaledObject": ("KEDA", "Autoscaled"),
    "ServiceMonitor": ("the Prometheus operator", "Monitored"),
    "PodMonitor": ("the Prometheus operator", "Monitored"),
    "RayService": ("KubeRay", "Ready"),
    "EdgeApplication": ("KubeEdge", "Ready"),
}
WORKLOADS: Final = ("RayService", "EdgeApplication")


def with_missing(conditions: Sequence[ResourceCondition], missing: Sequence[str]) -> list[ResourceCondition]:
    """The conditions, of which some are false because the cluster does not know these kinds."""
    said = {NEEDED[kind][1]: kind for kind in missing}
    return [_not_installed(one, said[one.type]) if one.type in said else one for one in conditions]


def _not_installed(condition: ResourceCondition, kind: str) -> ResourceCondition:
    words = f"the cluster knows no {kind}: install {NEEDED[kind][0]}"
    return replace(condition, status="False", reason="NotInstalled", message=words)


def ray_progress(service: Mapping[str, Any], application: str) -> Progress:
    """How far a RayService is, by Serve's own word on the application.

    KubeRay's condition `Ready` asks for proxies, of which there are none here. Serve calls an application RUNNING once
    all of its replicas are; while KubeRay builds a second cluster, its progress is what counts.
    """
    status = service.get("status") or {}
    wanted = int(service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"])
    pending = status.get("pendingServiceStatus") or {}
    newest = pending if pending.get("rayClusterName") else status.get("activeServiceStatus") or {}
    said = (newest.get("applicationStatuses") or {}).get(application) or {}
    state = str(said.get("status", "")) or "no application yet"
    running = state == "RUNNING"
    workers = min(wanted, int((newest.get("rayClusterStatus") or {}).get("readyWorkerReplicas", 0)))
    ready = wanted if running else workers if state == "DEPLOYING" else 0
    observed = int(status.get("observedGeneration", 0)) >= int(service["metadata"].get("generation", 1))
    words = "" if running and newest is not pending else f"Ray Serve: {state} {said.get('message', '')}".strip()
    return Progress(wanted, wanted if running else 0, ready, observed and newest is not pending, words)


def edge_progress(application: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> Progress:
    """How far an EdgeApplication is, by the Deployments that KubeEdge has made of it."""
    (said,) = application["spec"]["workloadTemplate"]["manifests"]
    wanted, checksum = int(said["spec"]["replicas"]), _checksum(said)
    if not deployments:
        return Progress(wanted, 0, 0, seen=False, words="KubeEdge has made no Deployment yet")
    parts = [(progress_of(one), _checksum(one) == checksum) for one in deployments]
    return Progress(
        wanted,
        sum(one.updated for one, newest in parts if newest),
        sum(one.ready for one, _ in parts),
        all(one.seen and newest for one, newest in parts),
    )


def _checksum(deployment: Mapping[str, Any]) -> Any:
    return (deployment["spec"]["template"]["metadata"].get("annotations") or {}).get(CHECKSUM)
