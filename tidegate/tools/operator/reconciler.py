"""The reconciler makes the cluster as the resources say, one resource after another, again and again.

    reported by a watch, or due → read anew → rendered → each object applied → what is no longer wanted deleted → status

It goes by the state and not by what has happened: a change that is missed, told twice or told late ends the same, and
so does an operator that dies between any two requests. What cannot be rendered changes nothing; what cannot be applied
is tried again, ever later. It acts only while it holds the lease, which it asks before every write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from tidegate import clock
from tidegate.admin_client import AdminError
from tidegate.tools.operator.cluster_objects import ApiRefused, ClusterObjects
from tidegate.tools.operator.conditions import Progress, ResourceCondition, new_status, progress_of, readiness, together
from tidegate.tools.operator.definitions import API_VERSION
from tidegate.tools.operator.rendering.objects import CHECKSUM, OWNER_KIND, OWNER_NAME, Object
from tidegate.tools.operator.rendering.render import mentions, render
from tidegate.tools.operator.replica_ownership import HEIR, leaves_replicas, replicas_to_hand_over
from tidegate.tools.operator.resource import CustomResource, Refused, ResourceKey
from tidegate.tools.operator.rollout_handover import RolloutHandover
from tidegate.tools.operator.work_queue import WorkQueue

WORKLOADS: Final = ("Deployment", "StatefulSet", "DaemonSet")
# What a resource may have made before and not want any more; nothing else is ever deleted.
_RBAC: Final = "rbac.authorization.k8s.io/v1"
DELETED: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "TidegateGateway": (
        ("v1", "Service"), (_RBAC, "RoleBinding"), (_RBAC, "Role"), ("policy/v1", "PodDisruptionBudget"),
        ("v1", "ConfigMap"),
    ),
    "TidegatePool": (
        ("autoscaling/v2", "HorizontalPodAutoscaler"), ("keda.sh/v1alpha1", "ScaledObject"),
        ("policy/v1", "PodDisruptionBudget"), ("v1", "ConfigMap"),
    ),
    "TidegateFleet": (("apps/v1", "DaemonSet"), ("v1", "ConfigMap")),
}  # fmt: skip
RESYNC_S: Final = 300.0  # everything is looked at again, so that what others have changed by hand is found
ROLLOUT_S: Final = 5.0

log = structlog.get_logger(__name__)


class LostLease(Exception):
    """Another operator acts now: what is left is its work."""


class Reconciler:
    """`run` works until it is cancelled; the others are told by watches.

    Args:
        held: whether this operator may act now.
        draw: uniform in [0, 1).
    """

    def __init__(
        self, cluster: ClusterObjects, rollouts: RolloutHandover, held: Callable[[], bool], draw: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._rollouts = rollouts
        self._held = held
        self._queue: WorkQueue[ResourceKey] = WorkQueue(draw)
        self._known: dict[ResourceKey, CustomResource] = {}
        self._news = asyncio.Event()

    def seen(self, kind: str, body: Mapping[str, Any]) -> None:
        """A watch has shown a resource; only a changed spec is work, not the status that this operator has written."""
        found = CustomResource.of(kind, body)
        before = self._known.get(found.key)
        self._known[found.key] = found
        if before is None or (before.uid, before.generation) != (found.uid, found.generation):
            self._add(found.key)
            self._add_all(mentions(found.key, self._known.values()))

    def gone(self, kind: str, body: Mapping[str, Any]) -> None:
        key = CustomResource.of(kind, body).key
        self._forget(key)

    def touched(self, body: Mapping[str, Any]) -> None:
        """An object of a resource has changed, by its controller or by somebody's hand."""
        meta = body["metadata"]
        labels = meta.get("labels") or {}
        key = ResourceKey(labels.get(OWNER_KIND, ""), meta.get("namespace", ""), labels.get(OWNER_NAME, ""))
        if key in self._known:
            self._add(key)

    def look_at_all(self) -> None:
        self._add_all(self._known)

    async def run(self) -> None:
        resync_at = clock.now() + RESYNC_S
        while True:
            now = clock.now()
            if now >= resync_at:
                resync_at = now + RESYNC_S
                self.look_at_all()
            key = self._queue.take(now) if self._held() else None
            if key is not None:
                await self._work_on(key)
                continue
            self._news.clear()
            until = min(resync_at, self._queue.next_at() if self._held() else resync_at)
            try:
                async with asyncio.timeout(max(0.0, until - clock.now())):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _work_on(self, key: ResourceKey) -> None:
        try:
            again_s = await self._reconcile(key)
        except LostLease:
            self._queue.add(key, clock.now())
        except (ApiRefused, AdminError) as error:
            wait_s = self._queue.failed(key, clock.now())
            log.warning("to be tried again", resource=str(key), reason=str(error), after_s=round(wait_s, 1))
        except Exception:
            wait_s = self._queue.failed(key, clock.now())
            log.exception("a defect: to be tried again", resource=str(key), after_s=round(wait_s, 1))
        else:
            self._queue.succeeded(key)
            if again_s is not None:
                self._queue.add(key, clock.now() + again_s)

    async def _reconcile(self, key: ResourceKey) -> float | None:
        """Return the seconds after which it is to be looked at again; None: when something changes.

        Raises:
            ApiRefused, AdminError: the API server or a gateway has not done what it was asked.
            LostLease: another operator acts.
        """
        body = await self._cluster.read(API_VERSION, *key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None
        resource = self._known[key] = CustomResource.of(key.kind, body)
        if key.kind == "TidegateRollout":
            return await self._carry(resource)
        await self._know_named(resource)
        try:
            rendered = render(resource, self._known)
        except Refused as error:
            log.warning("refused", resource=str(key), reason=error.reason, words=str(error))
            await self._say(
                resource, [ResourceCondition("Accepted", "False", error.reason, str(error)), *_never_ran(resource)], {}
            )
            return None
        applied = [await self._apply(one) for one in rendered.objects]
        workloads = [one for one in applied if one["kind"] in WORKLOADS]
        progress = together([progress_of(one) for one in workloads])
        await self._delete_others(resource, rendered.objects, complete=progress.complete)
        ready = readiness(progress) if workloads else ResourceCondition("Ready", "True", "Applied")
        fields = {**rendered.fields, **_counts(key.kind, workloads, progress)}
        accepted = ResourceCondition("Accepted", "True", "Rendered")
        await self._say(resource, [accepted, ready, *rendered.conditions], fields)
        return None

    async def _know_named(self, resource: CustomResource) -> None:
        """Read the resources that it names and no watch has shown yet, as at the start: they are not missing."""
        for key in resource.named:
            if key not in self._known and (body := await self._cluster.read(API_VERSION, *key)):
                self._known[key] = CustomResource.of(key.kind, body)
                self._add(key)

    async def _carry(self, resource: CustomResource) -> float | None:
        self._check_lease()
        try:
            report = await self._rollouts.carry(resource)
        except Refused as error:
            refused = ResourceCondition("Accepted", "False", error.reason, str(error))
            await self._say(resource, [refused, *_never_ran(resource)], {})
            return None
        except AdminError as error:
            waits = ResourceCondition("Ready", "False", "GatewayRefuses" if error.status else "GatewayAway", str(error))
            await self._say(resource, [waits], {})
            raise
        await self._say(resource, report.conditions, report.fields)
        return None if report.over else ROLLOUT_S

    async def _apply(self, wanted: Object) -> Object:
        if leaves_replicas(wanted):
            await self._hand_over_replicas(wanted)
        self._check_lease()
        return {**wanted, **await self._cluster.apply(wanted)}

    async def _hand_over_replicas(self, wanted: Object) -> None:
        meta = wanted["metadata"]
        live = await self._cluster.read(wanted["apiVersion"], wanted["kind"], meta["namespace"], meta["name"])
        if live is not None and (given := replicas_to_hand_over(live)):
            self._check_lease()
            await self._cluster.apply(given, manager=HEIR)

    async def _delete_others(self, resource: CustomResource, wanted: Sequence[Object], *, complete: bool) -> None:
        """ConfigMaps stay until no pod is of the template before: one of those may start again meanwhile."""
        names = {(one["kind"], one["metadata"]["name"]) for one in wanted}
        key = resource.key
        for api, kind in DELETED.get(key.kind, ()):
            if kind == "ConfigMap" and not complete:
                continue
            labels = {OWNER_KIND: key.kind, OWNER_NAME: key.name}
            for one in await self._cluster.listed(api, kind, key.namespace, labels):
                owners = {owner.get("uid") for owner in one["metadata"].get("ownerReferences") or ()}
                if (kind, one["metadata"]["name"]) not in names and resource.uid in owners:
                    self._check_lease()
                    await self._cluster.delete(one)
                    log.info("deleted", resource=str(key), object=f"{kind} {one['metadata']['name']}")

    async def _say(
        self, resource: CustomResource, conditions: Sequence[ResourceCondition], fields: Mapping[str, Any]
    ) -> None:
        stamp = datetime.fromtimestamp(clock.utc_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = new_status(resource.status, resource.generation, conditions, fields, stamp)
        if status != resource.status:
            self._check_lease()
            await self._cluster.say_status(*resource.key, status)

    def _check_lease(self) -> None:
        if not self._held():
            raise LostLease

    def _add(self, key: ResourceKey) -> None:
        self._queue.add(key, clock.now())
        self._news.set()

    def _add_all(self, keys: Iterable[ResourceKey]) -> None:
        for key in list(keys):
            self._add(key)

    def _forget(self, key: ResourceKey) -> None:
        self._known.pop(key, None)
        self._queue.forget(key)
        self._add_all(mentions(key, self._known.values()))

    def __repr__(self) -> str:
        return f"<Reconciler {len(self._known)} resources, {self._queue!r}>"


def _never_ran(resource: CustomResource) -> list[ResourceCondition]:
    """`Ready` of a refused resource stays what it was; one that never ran is not ready."""
    known = {one["type"] for one in resource.status.get("conditions") or ()}
    return [] if "Ready" in known else [ResourceCondition("Ready", "False", "NotAccepted")]


def _counts(kind: str, workloads: Sequence[Object], progress: Progress) -> dict[str, Any]:
    if kind == "TidegateFleet":
        return {
            "devices": progress.wanted, "updatedDevices": progress.updated, "readyDevices": progress.ready,
            "groups": len(workloads),
        }  # fmt: skip
    if not workloads:
        return {}
    selector = workloads[0]["spec"]["selector"]["matchLabels"]
    return {
        "replicas": progress.wanted, "updatedReplicas": progress.updated, "readyReplicas": progress.ready,
        "selector": ",".join(f"{key}={value}" for key, value in sorted(selector.items())),
        "configHash": workloads[0]["spec"]["template"]["metadata"]["annotations"][CHECKSUM],
    }  # fmt: skip
