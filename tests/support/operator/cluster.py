"""A Kubernetes API server for the operator, on kmock's server: objects, server-side apply, watches, leases and faults.

kmock parses Kubernetes' URLs, serves the discovery of resources and streams; here is what its emulator leaves out:
versions by which a watch is resumed and which it may have forgotten, generations, conflicts, field managers, garbage.
Controllers are as much as a status needs: `controllers` rolls every workload out at once.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

import kmock
from kmock import KubernetesError, KubernetesScaffold, Request

from tests.support.operator.api_rules import defaulted, kept_schema, refusals
from tidegate import clock
from tidegate.servers.cluster_access import ApiAddress
from tidegate.testing.ports import free_port
from tidegate.tools.operator.cluster_objects import _PLURALS as PLURALS
from tidegate.tools.operator.definitions import API_VERSION, KIND_OF

_REMEMBERED = 8  # requests: of those, nobody is still looked for

Key = tuple[str, str, str]  # plural, namespace, name
GROUPS = {
    "configmaps": "v1", "serviceaccounts": "v1", "services": "v1", "deployments": "apps/v1",
    "statefulsets": "apps/v1", "daemonsets": "apps/v1", "roles": "rbac.authorization.k8s.io/v1",
    "rolebindings": "rbac.authorization.k8s.io/v1", "poddisruptionbudgets": "policy/v1",
    "horizontalpodautoscalers": "autoscaling/v2", "leases": "coordination.k8s.io/v1",
    "networkpolicies": "networking.k8s.io/v1", "scaledobjects": "keda.sh/v1alpha1",
    "servicemonitors": "monitoring.coreos.com/v1", "podmonitors": "monitoring.coreos.com/v1",
    "rayservices": "ray.io/v1", "edgeapplications": "apps.kubeedge.io/v1alpha1",
    **{kind.plural: API_VERSION for kind in KIND_OF.values()},
}  # fmt: skip
KINDS = {plural: kind for kind, plural in PLURALS.items()}
WORKLOADS = ("deployments", "statefulsets", "daemonsets", "rayservices", "edgeapplications")
FOREIGN = {plural for plural, api in GROUPS.items() if api.partition("/")[0] in (
    "keda.sh", "monitoring.coreos.com", "ray.io", "apps.kubeedge.io"
)}  # fmt: skip


class OperatorCluster:
    """`async with` serves the namespace `prod`. `stop` and `start` end the server and begin it again.

    Args:
        controllers: whether workloads are rolled out as soon as they are applied; else by `roll_out`.
    """

    def __init__(self, *, controllers: bool = True) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.writes: list[tuple[str, str, str]] = []  # verb, plural, name; leases are not counted
        self.asked: Counter[tuple[str, str]] = Counter()  # verb and plural
        self.installed = set(FOREIGN)  # resources of others that the cluster knows
        self.quiet: set[str] = set()  # plurals whose watches say nothing for now
        self.held_back: set[str] = set()  # plurals whose controller lets go of a deleted object in `let_go` alone
        self.on_change: Callable[[Key, dict[str, Any] | None], None] = lambda _key, _one: None
        self._controllers = controllers
        self._faults: list[tuple[Callable[[str, str], bool], int]] = []
        self._applied: dict[tuple[Key, str], dict[str, Any]] = {}
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._version = 100
        self._known_from = 0
        self._round = 0
        self._news = asyncio.Event()
        self._port = free_port()
        self._kmock: KubernetesScaffold | None = None
        self._server = AsyncExitStack()
        self._stack = AsyncExitStack()

    @property
    def address(self) -> ApiAddress:
        return ApiAddress(f"http://127.0.0.1:{self._port}", "prod", None, None)

    async def __aenter__(self) -> Self:
        self._kmock = served = await self._stack.enter_async_context(KubernetesScaffold())
        served.resources["v1/namespaces"].kind = "Namespace"  # kopf begins when it has heard of them
        served.resources["v1/namespaces"].verbs = {"list", "watch"}
        served.resources["v1/namespaces"].namespaced = False
        for plural, api in GROUPS.items():
            info = served.resources[f"{api}/{plural}"]
            info.namespaced, info.kind, info.verbs = True, KINDS[plural], {"get", "list", "watch", "patch"}
            served[kmock.action.LIST, kmock.resource(f"{api}/{plural}")] << self._list
            served[kmock.action.WATCH, kmock.resource(f"{api}/{plural}")] << self._watch
        for action in (kmock.action.FETCH, kmock.action.CREATE, kmock.action.UPDATE, kmock.action.DELETE):
            served[action] << self._object
        served[kmock.method.PUT] << self._object
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._stack.aclose()

    async def start(self) -> None:
        await self._server.enter_async_context(kmock.Server(self._kmock, port=self._port))

    async def stop(self) -> None:
        self.cut_watches()
        await self._server.aclose()

    # what a test does

    def send(self, one: dict[str, Any]) -> dict[str, Any]:
        """`kubectl apply`. Raises AssertionError: the API server would refuse it."""
        plural = PLURALS[one["kind"]]
        key = (plural, "prod", one["metadata"]["name"])
        assert refusals(one, self.objects.get(key)) == []
        full = defaulted(kept_schema(one["kind"]), one)
        before = self.objects.get(key, {"metadata": {}})
        return self._store(key, {**before, **full, "metadata": {**before["metadata"], **full["metadata"]}})

    def change(self, kind: str, name: str, **spec: Any) -> None:
        """A part of a resource's spec, replaced."""
        one = self.one(kind, name)
        self.send({**one, "spec": {**one["spec"], **spec}})

    def by_hand(self, kind: str, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Somebody edits an object."""
        one = copy.deepcopy(self.one(kind, name))
        change(one)
        self._store((PLURALS[kind], "prod", name), one)

    def remove(self, kind: str, name: str) -> None:
        """Delete an object, and what it owns."""
        self._delete((PLURALS[kind], "prod", name))

    def let_go(self, kind: str, name: str) -> None:
        """What the controller of an object with a finalizer does once it is deleted."""
        key = (PLURALS[kind], "prod", name)
        assert self.objects[key]["metadata"].get("deletionTimestamp")
        self._delete(key)

    def one(self, kind: str, name: str) -> dict[str, Any]:
        return self.objects[PLURALS[kind], "prod", name]

    def names(self, kind: str) -> set[str]:
        return {name for plural, _, name in self.objects if plural == PLURALS[kind]}

    def condition(self, kind: str, name: str, which: str = "Ready") -> dict[str, Any]:
        """Empty where there is none."""
        conditions = self.one(kind, name).get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == which), {})

    def fail(self, status: int, times: int, *, verb: str = "", plural: str = "") -> None:
        """Answer the next requests of the kind with a status."""
        left = [times]

        def matches(asked_verb: str, asked_plural: str) -> bool:
            if left[0] <= 0 or verb not in ("", asked_verb) or plural not in ("", asked_plural):
                return False
            left[0] -= 1
            return True

        self._faults.append((matches, status))

    def cut_watches(self) -> None:
        self._round += 1
        self._wake()

    def forget_log(self) -> None:
        """Watches from any version up to now get 410, as after a compaction of etcd."""
        self._version += 1
        self._known_from = self._version
        self._log.clear()

    def roll_out(self, kind: str, name: str) -> None:
        """What the controller of a workload says once its pods run."""
        one = copy.deepcopy(self.one(kind, name))
        wanted = one["spec"].get("replicas", 1)
        numbers = ("replicas", "updatedReplicas", "availableReplicas", "readyReplicas")
        if kind == "DaemonSet":
            numbers = ("desiredNumberScheduled", "updatedNumberScheduled", "numberAvailable", "numberReady")
        one["status"] = {"observedGeneration": one["metadata"]["generation"], **dict.fromkeys(numbers, wanted)}
        self._store((PLURALS[kind], "prod", name), one)

    def serve(self, name: str, state: str, message: str = "", *, pending: bool = False) -> None:
        """What KubeRay says of a RayService; it has no proxies, so KubeRay never calls it ready.

        Args:
            state: Serve's, of the newest cluster; pending: whether that is a second one.
        """
        one = copy.deepcopy(self.one("RayService", name))
        wanted = one["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"]
        newest = {
            "rayClusterName": f"{name}-{'second' if pending else 'first'}",
            "applicationStatuses": {"pool": {"status": state, "message": message}},
            "rayClusterStatus": {"readyWorkerReplicas": wanted},
        }
        before = one.get("status", {}).get("activeServiceStatus", {})
        one["status"] = {
            "observedGeneration": one["metadata"]["generation"],
            "numServeEndpoints": 0,
            "activeServiceStatus": before if pending else newest,
            "pendingServiceStatus": newest if pending else {},
        }
        self._store(("rayservices", "prod", name), one)

    def _deploy(self, application: dict[str, Any]) -> None:
        """A Deployment for the NodeGroup, as KubeEdge's controller makes it, and its pods."""
        (manifest,) = application["spec"]["workloadTemplate"]["manifests"]
        (group,) = application["spec"]["workloadScope"]["targetNodeGroups"]
        made = copy.deepcopy(manifest)
        made["metadata"]["name"] += f"-{group['name']}"
        made["metadata"]["ownerReferences"] = [{"uid": application["metadata"]["uid"]}]
        made["spec"]["replicas"] = group["overriders"]["replicas"]
        self._store(("deployments", "prod", made["metadata"]["name"]), made)
        self.roll_out("Deployment", made["metadata"]["name"])

    # what the server does

    def _list(self, request: Request) -> dict[str, Any]:
        self._note("list", request)
        found = [one for key, one in sorted(self.objects.items()) if key[0] == request.resource.plural]
        selector = request.params.get("labelSelector", "")
        for wanted in filter(None, selector.split(",")):
            name, _, value = wanted.partition("=")
            found = [one for one in found if one["metadata"].get("labels", {}).get(name) == value]
        # As the real one, without the kind of each item.
        items = [{key: one for key, one in each.items() if key not in ("kind", "apiVersion")} for each in found]
        kind = KINDS[request.resource.plural]
        meta = {"resourceVersion": str(self._version)}
        return {"kind": f"{kind}List", "apiVersion": GROUPS[request.resource.plural], "metadata": meta, "items": items}

    async def _watch(self, request: Request) -> AsyncIterator[Any]:
        self._note("watch", request)
        plural, this_round = request.resource.plural, self._round
        version = int(request.params.get("resourceVersion") or self._version)
        until = clock.now() + float(request.params.get("timeoutSeconds") or 60)
        yield b""
        if version < self._known_from:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            return
        while clock.now() < until and this_round == self._round:
            news = self._news
            for at, kind, one in list(self._log) if plural not in self.quiet else ():
                if at > version and PLURALS[one["kind"]] == plural:
                    version = at
                    yield {"type": kind, "object": one}
            try:
                async with asyncio.timeout_at(until):
                    await news.wait()
            except TimeoutError:
                return

    def _object(self, request: Request) -> dict[str, Any]:
        plural, method = request.resource.plural, str(request.method.value).lower()
        self._note(method, request)
        if method == "post":
            sent = _sent(request)
            key = (plural, "prod", sent["metadata"]["name"])
            if key in self.objects:
                raise KubernetesError(status=409, message=f"{plural} {key[2]} already exists")
        else:
            key = (plural, "prod", str(request.name))
        if method not in ("post",) and key not in self.objects and not self._may_create(request):
            raise KubernetesError(status=404, message=f"{plural} {key[2]!r} not found")
        if method == "get":
            return self._with_owners(key)
        if plural != "leases":
            verb = "status" if request.subresource == "status" else method
            self.writes.append((verb, plural, key[2]))
        if method == "delete":
            self._check_uid(key, _sent(request))
            return self._mark_deleted(key) if plural in self.held_back else self._delete(key)
        if method == "patch":
            return self._patch(key, request)
        sent = _sent(request)
        if (
            method == "put"
            and sent["metadata"].get("resourceVersion") != self.objects[key]["metadata"]["resourceVersion"]
        ):
            raise KubernetesError(status=409, message="the object has been modified")
        return self._store(key, sent)

    def _may_create(self, request: Request) -> bool:
        return "apply-patch" in request.headers.get("Content-Type", "")

    def _mark_deleted(self, key: Key) -> dict[str, Any]:
        one = copy.deepcopy(self.objects[key])
        one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return self._store(key, one)

    def _admit(self, key: Key, sent: dict[str, Any]) -> None:
        """As KEDA's webhook: what a HorizontalPodAutoscaler scales is not scaled by a ScaledObject as well."""
        target = sent["spec"].get("scaleTargetRef") if key[0] == "scaledobjects" else None
        scaled = [
            one["spec"].get("scaleTargetRef") for (plural, *_), one in self.objects.items()
            if plural == "horizontalpodautoscalers"
        ]  # fmt: skip
        if target is not None and target in scaled:
            raise KubernetesError(status=403, message="the workload is already managed by an hpa")

    def _check_uid(self, key: Key, options: dict[str, Any]) -> None:
        wanted = options.get("preconditions", {}).get("uid")
        if wanted and wanted != self.objects[key]["metadata"]["uid"]:
            raise KubernetesError(status=409, message="the UID is another one")

    def _patch(self, key: Key, request: Request) -> dict[str, Any]:
        sent = _sent(request)
        if self._may_create(request):
            return self._apply(key, request.params["fieldManager"], sent)
        before = self.objects[key]
        assert set(sent) == {"status"} and request.subresource == "status", "the operator writes statuses alone"
        return self._store(key, {**before, "status": sent["status"]})

    def _apply(self, key: Key, manager: str, sent: dict[str, Any]) -> dict[str, Any]:
        before = copy.deepcopy(self.objects.get(key, {"metadata": {}}))
        assert sent["metadata"].get("uid") in (None, before["metadata"].get("uid"))
        self._admit(key, sent)
        others = [one for (known, other), one in self._applied.items() if known == key and other != manager]
        _take_away(before, self._applied.get((key, manager), {}), sent, others)
        self._applied[key, manager] = copy.deepcopy(sent)
        made = self._store(key, _merged(before, sent))
        asyncio.get_running_loop().call_later(0.05, self._collect, key)
        if self._controllers and key[0] in WORKLOADS:
            asyncio.get_running_loop().call_later(0.01, self._roll_out_if_there, key)
        return made

    def _with_owners(self, key: Key) -> dict[str, Any]:
        """An object with who has applied which of its fields, as far as they are still as they were applied."""
        one = self.objects[key]
        fields = [
            {"manager": manager, "operation": "Apply", "fieldsType": "FieldsV1", "fieldsV1": _owned(applied, one)}
            for (known, manager), applied in self._applied.items() if known == key
        ]  # fmt: skip
        full = {"apiVersion": GROUPS[key[0]], "kind": KINDS[key[0]], **one}
        return full if not fields else {**full, "metadata": {**one["metadata"], "managedFields": fields}}

    def _collect(self, key: Key) -> None:
        """What was applied after its owner had gone goes as well."""
        there = {one["metadata"]["uid"] for one in self.objects.values()}
        owners = {
            owner["uid"] for owner in self.objects.get(key, {"metadata": {}})["metadata"].get("ownerReferences", ())
        }
        if owners and not owners & there:
            self._delete(key)

    def _roll_out_if_there(self, key: Key) -> None:
        if key not in self.objects:
            return
        match key[0]:
            case "rayservices":
                self.serve(key[2], "RUNNING")
            case "edgeapplications":
                self._deploy(self.objects[key])
            case plural:
                self.roll_out(KINDS[plural], key[2])

    def _store(self, key: Key, one: dict[str, Any]) -> dict[str, Any]:
        before = self.objects.get(key)
        one = copy.deepcopy(one)
        meta = one["metadata"]
        if before is not None and _without_version(before) == _without_version(one):
            return before
        same_spec = before is not None and _content(before) == _content(one)
        generation = 0 if before is None else before["metadata"]["generation"]
        meta |= {
            "namespace": "prod",
            "uid": uuid.uuid4().hex if before is None else before["metadata"]["uid"],
            "generation": generation + (not same_spec),
        }
        self._version += 1
        meta["resourceVersion"] = str(self._version)
        self.objects[key] = one
        self._say(key, "ADDED" if before is None else "MODIFIED", one)
        return one

    def _delete(self, key: Key) -> dict[str, Any]:
        one = self.objects.pop(key)
        self._applied = {known: sent for known, sent in self._applied.items() if known[0] != key}
        self._version += 1
        self._say(key, "DELETED", one)
        owned = [
            other for other, each in self.objects.items()
            if one["metadata"]["uid"] in {owner["uid"] for owner in each["metadata"].get("ownerReferences", ())}
        ]  # fmt: skip
        for other in owned:
            self._delete(other)
        return one

    def _say(self, key: Key, kind: str, one: dict[str, Any]) -> None:
        whole = {"apiVersion": GROUPS[key[0]], "kind": KINDS[key[0]], **copy.deepcopy(one)}
        self._log.append((self._version, kind, whole))
        self.on_change(key, None if kind == "DELETED" else whole)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _note(self, verb: str, request: Request) -> None:
        # kmock finds who answers a request by filtering every request that ever came, and keeps them all: an operator's
        # thousands took most of a test's time. It offers no other way to forget.
        del self._kmock._requests[:-_REMEMBERED]  # noqa: SLF001
        plural = request.resource.plural
        self.asked[verb, plural] += 1
        for matches, status in self._faults:
            if matches(verb, plural):
                raise KubernetesError(status=status, message=f"a fault of the test: {status}")
        if plural not in GROUPS or plural in FOREIGN - self.installed:
            raise KubernetesError(status=404, message=f"there is no {plural} here")


def _sent(request: Request) -> dict[str, Any]:
    found = json.loads(request.body or b"{}")
    assert isinstance(found, dict)
    return found


def _merged(before: Any, sent: Any) -> Any:
    """Lists are whole, as in what the operator applies."""
    if not isinstance(before, dict) or not isinstance(sent, dict):
        return copy.deepcopy(sent)
    return {**before, **{key: _merged(before.get(key), one) for key, one in sent.items()}}


def _take_away(
    there: dict[str, Any], applied: dict[str, Any], sent: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    """What its manager has applied before and does not say any more goes, where it has no other owner."""
    for key, one in applied.items():
        now = there.get(key)
        if isinstance(one, dict) and isinstance(now, dict):
            inner = [each[key] for each in others if isinstance(each.get(key), dict)]
            _take_away(now, one, sent[key] if isinstance(sent.get(key), dict) else {}, inner)
            if not now and key not in sent:
                del there[key]
        elif key not in sent and now == one and all(each.get(key) != now for each in others):
            there.pop(key, None)


def _owned(applied: dict[str, Any], there: dict[str, Any]) -> dict[str, Any]:
    """The fields of what was applied that nobody has changed since; lists are whole."""
    return {
        f"f:{key}": _owned(one, there[key]) if isinstance(one, dict) and isinstance(there[key], dict) else {}
        for key, one in applied.items()
        if key in there and (isinstance(one, dict) or there[key] == one)
    }


def _content(one: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in one.items() if key not in ("metadata", "status", "kind", "apiVersion")}


def _without_version(one: dict[str, Any]) -> dict[str, Any]:
    kept = ("labels", "annotations", "ownerReferences", "name", "deletionTimestamp")
    meta = {key: one["metadata"].get(key) for key in kept}
    return {**{key: each for key, each in one.items() if key not in ("kind", "apiVersion")}, "metadata": meta}
