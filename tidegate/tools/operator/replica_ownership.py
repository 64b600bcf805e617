"""A workload's number of replicas changes its owner before the operator stops saying it (pure).

Server-side apply takes away what its only owner says no more, and a StatefulSet without `replicas` has one. So a pool
of eight for which autoscaling is switched on would drop to one, until its autoscaler has asked for the eight again.
The live number is first applied under another field manager, which never applies it again: the autoscaler, which
writes by force, takes it from there. Where somebody else owns the number already there is nothing to do.

Source: Kubernetes documentation, "Server-Side Apply", transferring ownership.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidegate.tools.operator.rendering.objects import MANAGER, Object

HEIR: Final = f"{MANAGER}-replicas"  # the field manager that is given the number


def leaves_replicas(wanted: Mapping[str, Any]) -> bool:
    """Whether the operator does not say how many replicas this workload has."""
    return wanted["kind"] in ("Deployment", "StatefulSet") and "replicas" not in wanted["spec"]


def replicas_to_hand_over(live: Mapping[str, Any]) -> Object | None:
    """Return what the heir applies; None: the number would stay without it."""
    meta = live["metadata"]
    owners = {one.get("manager") for one in meta.get("managedFields") or () if _owns_replicas(one)}
    if owners != {MANAGER}:
        return None
    return {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        # Of this very object: a new one of its name has nothing to keep.
        "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
        "spec": {"replicas": live["spec"]["replicas"]},
    }


def _owns_replicas(entry: Mapping[str, Any]) -> bool:
    return "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
