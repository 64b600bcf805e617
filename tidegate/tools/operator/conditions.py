"""What became of a resource, in the words that Kubernetes' own tools read: conditions and counts (pure).

`Accepted` says whether the resource could be rendered. Where it is false nothing was changed, and what ran before still
runs. `Ready` says whether everything runs as the resource says now. `Autoscaled`, of a pool, says whether something was
made that scales it, and `Monitored` whether something was made that scrapes. A condition keeps its time while it keeps
its status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["True", "False", "Unknown"]
_MAX_WORDS = 2000


@dataclass(frozen=True, slots=True)
class ResourceCondition:
    """One sentence about a resource.

    Attributes:
        reason: one word in CamelCase, for programs.
        message: for people; may be empty.
    """

    type: str
    status: Status
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a workload is: how many pods there shall be, are of the new template, and are ready.

    Attributes:
        seen: whether its controller has seen the newest template.
        words: what its controller says of it, if anything.
    """

    wanted: int
    updated: int
    ready: int
    seen: bool
    words: str = ""

    @property
    def complete(self) -> bool:
        return self.seen and self.updated >= self.wanted and self.ready >= self.wanted


def progress_of(workload: Mapping[str, Any]) -> Progress:
    """Return the progress of a Deployment, StatefulSet or DaemonSet, from its status."""
    status = workload.get("status") or {}
    seen = int(status.get("observedGeneration", 0)) >= int(workload["metadata"].get("generation", 1))
    if workload["kind"] == "DaemonSet":
        return Progress(
            int(status.get("desiredNumberScheduled", 0)), int(status.get("updatedNumberScheduled", 0)),
            int(status.get("numberAvailable", 0)), seen,
        )  # fmt: skip
    wanted = int(workload["spec"].get("replicas", 1))
    ready = status.get("availableReplicas" if workload["kind"] == "Deployment" else "readyReplicas", 0)
    # Pods of the old template that still answer count as a Deployment's replicas: it is complete without them.
    surplus = int(status.get("replicas", 0)) > wanted
    return Progress(wanted, int(status.get("updatedReplicas", 0)), int(ready), seen and not surplus)


def together(parts: Sequence[Progress]) -> Progress:
    return Progress(
        sum(one.wanted for one in parts), sum(one.updated for one in parts), sum(one.ready for one in parts),
        all(one.seen for one in parts), "; ".join(one.words for one in parts if one.words),
    )  # fmt: skip


def readiness(progress: Progress) -> ResourceCondition:
    if progress.complete:
        return ResourceCondition("Ready", "True", "RolledOut")
    words = f"{progress.updated} of {progress.wanted} are as they shall be, {progress.ready} are ready"
    said = f"{words}: {progress.words}" if progress.words else words
    return ResourceCondition("Ready", "False", "Progressing", said)


def new_status(
    before: Mapping[str, Any],
    generation: int,
    conditions: Sequence[ResourceCondition],
    fields: Mapping[str, Any],
    now: str,
) -> dict[str, Any]:
    """Return the status of a resource.

    Args:
        before: its present status; conditions of other types stay, for example `Ready` of what still runs.
        generation: that the conditions are about.
        now: the time of RFC 3339.
    """
    known = {one["type"]: one for one in before.get("conditions") or ()}
    for one in conditions:
        past = known.get(one.type, {})
        since = past.get("lastTransitionTime", now) if past.get("status") == one.status else now
        known[one.type] = {
            "type": one.type,
            "status": one.status,
            "reason": one.reason,
            "message": one.message[:_MAX_WORDS],
            "observedGeneration": generation,
            "lastTransitionTime": since,
        }
    ordered = [known[name] for name in sorted(known)]
    return {**before, **fields, "observedGeneration": generation, "conditions": ordered}
