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
from http import HTTPStatus
from typing import Any, Final

import structlog

from tidegate import clock
from tidegate.admin_client import AdminError
from tidegate.tools.operator.cluster_objects import ApiRefused, ClusterObjects
from tidegate.tools.operator.conditions import Progress, ResourceCondition, new_status, progress_of, readiness, together
from tidegate.tools.operator.definitions import API_VERSION
from tidegate.tools.operator.deletion_order import DELETED, SCALERS, is_replaced, waits_until_ready
from tidegate.tools.operator.foreign_objects import NEEDED, edge_progress, ray_progress, with_missing
from tidegate.tools.operator.foreign_objects import WORKLOADS as FOREIGN_WORKLOADS
from tidegate.tools.operator.rendering.fleet import GROUP_LABEL
from tidegate.tools.operator.rendering.objects import CHECKSUM, OWNER_KIND, OWNER_NAME, Object
from tidegate.tools.operator.rendering.ray_service import APPLICATION
from tidegate.tools.operator.rendering.render import mentions, render
from tidegate.tools.operator.replica_ownership import HEIR, leaves_replicas, replicas_to_hand_over
from tidegate.tools.operator.resource import CustomResource, Refused, ResourceKey
from tidegate.tools.operator.rollout_handover import RolloutHandover
from tidegate.tools.operator.work_queue import WorkQueue

WORKLOADS: Final = ("Deployment", "StatefulSet", "DaemonSet")
RESYNC_S: Final = 300.0  # everything is looked at again, so that what others have changed by hand is found
ROLLOUT_S: Final = 5.0
_FOREIGN_S: Final = (5.0, 30.0)  # workloads that are not watched: under way, and complete
_MISSING_S: Final = 15.0  # until what is not installed is looked for again
_REPLACED_S: Final = 1.0

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
        if self._know(found):
            self._add(found.key)

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
        resource = CustomResource.of(key.kind, body)
        self._know(resource)
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
        scalers = [one for one in rendered.objects if _kind_of(one) in SCALERS]
        applied, missing = await self._apply_all(one for one in rendered.objects if one not in scalers)
        workloads = [one for one in applied if one["kind"] in (*WORKLOADS, *FOREIGN_WORKLOADS)]
        parts = {(one["kind"], one["metadata"]["name"]): await self._progress(one) for one in workloads}
        progress = together(list(parts.values()))
        without = any(kind in FOREIGN_WORKLOADS for kind in missing)
        await self._delete_others(resource, rendered.objects, parts, complete=progress.complete and not without)
        in_the_way = await self._scalers_in_the_way(resource, scalers)
        if not in_the_way:
            missing += (await self._apply_all(scalers))[1]
        ready = readiness(progress) if workloads else ResourceCondition("Ready", "True", "Applied")
        accepted = ResourceCondition("Accepted", "True", "Rendered")
        conditions = with_missing([accepted, ready, *rendered.conditions], missing)
        fields = {**rendered.fields, **_counts(resource, workloads, progress)}
        await self._say(resource, [_replacing(one, in_the_way) for one in conditions], fields)
        return _again_s(workloads, progress, missing=missing, replacing=bool(in_the_way))

    async def _know_named(self, resource: CustomResource) -> None:
        """Read the resources that it names and no watch has shown yet, as at the start: they are not missing."""
        for key in resource.named:
            if key not in self._known and (body := await self._cluster.read(API_VERSION, *key)):
                self._know(CustomResource.of(key.kind, body))
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

    async def _apply_all(self, wanted: Iterable[Object]) -> tuple[list[Object], list[str]]:
        """Return what there is now, and the kinds that the cluster does not know."""
        applied: list[Object] = []
        missing: list[str] = []
        for one in wanted:
            try:
                applied.append(await self._apply(one))
            except ApiRefused as error:
                if error.status != HTTPStatus.NOT_FOUND or one["kind"] not in NEEDED:
                    raise
                missing.append(one["kind"])
        return applied, missing

    async def _progress(self, workload: Object) -> Progress:
        if workload["kind"] == "RayService":
            return ray_progress(workload, APPLICATION)
        if workload["kind"] != "EdgeApplication":
            return progress_of(workload)
        meta = workload["metadata"]
        chosen = {key: meta["labels"][key] for key in (OWNER_KIND, OWNER_NAME, GROUP_LABEL)}
        made = await self._cluster.listed("apps/v1", "Deployment", meta["namespace"], chosen)
        return edge_progress(workload, made)

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

    async def _delete_others(
        self,
        resource: CustomResource,
        wanted: Sequence[Object],
        progress: Mapping[tuple[str, str], Progress],
        *,
        complete: bool,
    ) -> None:
        key = resource.key
        for api, kind in DELETED.get(key.kind, ()):
            if not complete and waits_until_ready(key.kind, kind, wanted):
                continue
            for one in await self._unwanted(resource, api, kind, wanted):
                if one["metadata"].get("deletionTimestamp"):
                    continue
                if not is_replaced(one, wanted, progress):
                    complete = False  # it runs on, and needs its ConfigMap
                    continue
                self._check_lease()
                await self._cluster.delete(one)
                log.info("deleted", resource=str(key), object=f"{kind} {one['metadata']['name']}")

    async def _scalers_in_the_way(self, resource: CustomResource, wanted: Sequence[Object]) -> list[Object]:
        """What still scales the workload and shall not: KEDA refuses to scale what a HorizontalPodAutoscaler does.

        A deleted ScaledObject stays until KEDA has let go of it.
        """
        if not wanted:
            return []
        return [one for api, kind in SCALERS for one in await self._unwanted(resource, api, kind, wanted)]

    async def _unwanted(self, resource: CustomResource, api: str, kind: str, wanted: Sequence[Object]) -> list[Object]:
        """What the resource has made of a kind and does not want any more."""
        names = {one["metadata"]["name"] for one in wanted if one["kind"] == kind}
        labels = {OWNER_KIND: resource.key.kind, OWNER_NAME: resource.key.name}
        return [
            one
            for one in await self._cluster.listed(api, kind, resource.key.namespace, labels)
            if one["metadata"]["name"] not in names
            and resource.uid in {owner.get("uid") for owner in one["metadata"].get("ownerReferences") or ()}
        ]

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

    def _know(self, found: CustomResource) -> bool:
        """Whether its spec is news. Those that it changes are looked at then, whoever was the first to see it."""
        before = self._known.get(found.key)
        if before is not None and before.uid == found.uid and before.generation > found.generation:
            return False  # a watch that is behind what was read
        self._known[found.key] = found
        if before is not None and (before.uid, before.generation) == (found.uid, found.generation):
            return False
        self._add_all(mentions(found.key, self._known.values()))
        return True

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


def _kind_of(one: Object) -> tuple[str, str]:
    return one["apiVersion"], one["kind"]


def _replacing(condition: ResourceCondition, in_the_way: Sequence[Object]) -> ResourceCondition:
    if not in_the_way or condition.type != "Autoscaled":
        return condition
    one = in_the_way[0]
    words = f"{one['kind']} {one['metadata']['name']} has to be gone first; the replicas stay meanwhile"
    return ResourceCondition("Autoscaled", "False", "Replacing", words)


def _again_s(
    workloads: Sequence[Object], progress: Progress, *, missing: Sequence[str], replacing: bool
) -> float | None:
    """When nobody reports a change, the seconds until somebody has to look."""
    if replacing:
        return _REPLACED_S
    if missing:
        return _MISSING_S
    if any(one["kind"] in FOREIGN_WORKLOADS for one in workloads):
        return _FOREIGN_S[progress.complete]
    return None


def _counts(resource: CustomResource, workloads: Sequence[Object], progress: Progress) -> dict[str, Any]:
    if resource.key.kind == "TidegateFleet":
        return {
            "devices": progress.wanted, "updatedDevices": progress.updated, "readyDevices": progress.ready,
            "groups": len(workloads),
        }  # fmt: skip
    if not workloads:
        return {}
    selector, checksum = _pods_of(workloads[0])
    return {
        "replicas": progress.wanted, "updatedReplicas": progress.updated, "readyReplicas": progress.ready,
        "selector": ",".join(f"{key}={value}" for key, value in sorted(selector.items())),
        "configHash": checksum,
    }  # fmt: skip


def _pods_of(workload: Object) -> tuple[Mapping[str, str], str]:
    """The labels of its pods, and the digest of their configuration."""
    spec = workload["spec"]
    if workload["kind"] == "RayService":
        workers = spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
        return workers, workload["metadata"]["annotations"][CHECKSUM]
    return spec["selector"]["matchLabels"], spec["template"]["metadata"]["annotations"][CHECKSUM]
