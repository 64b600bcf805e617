"""The API server as far as the operator writes to it: apply an object, read, list and delete, say a resource's status.

Objects are applied on the server (server-side apply): the operator says what it wants and owns just that, what others
have set beside it stays, and what it no longer says goes. So the same request made twice changes nothing, and an
operator that died in the middle is followed by one that makes them all again.

Everything has a time limit, answers are bounded in size, and no redirect is followed.

Source: Kubernetes documentation, "Server-Side Apply".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Self

import aiohttp

from tidegate.servers.cluster_access import AccessFailed, ApiAddress, ClusterCredentials
from tidegate.tools.operator.definitions import API_VERSION, KINDS
from tidegate.tools.operator.rendering.objects import MANAGER, Object

MAX_ANSWER_BYTES: Final = 16 * 2**20
_WORDS: Final = 300
_PLURALS: Final = {
    "ConfigMap": "configmaps", "ServiceAccount": "serviceaccounts", "Service": "services", "Role": "roles",
    "RoleBinding": "rolebindings", "Deployment": "deployments", "StatefulSet": "statefulsets",
    "DaemonSet": "daemonsets", "PodDisruptionBudget": "poddisruptionbudgets",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers", "Lease": "leases", "NetworkPolicy": "networkpolicies",
    "ScaledObject": "scaledobjects", "ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors",
    "RayService": "rayservices", "EdgeApplication": "edgeapplications",
    **{kind.name: kind.plural for kind in KINDS},
}  # fmt: skip


class ApiRefused(Exception):
    """The API server has refused, or could not be asked; `status` is its HTTP status, 0 without an answer."""

    def __init__(self, words: str, status: int = 0) -> None:
        super().__init__(words)
        self.status = status


class ClusterObjects:
    """`async with` holds the connections.

    Args:
        timeout_s: for each request as a whole.
    """

    def __init__(self, address: ApiAddress, *, timeout_s: float = 10.0) -> None:
        self._server = address.server
        self._credentials = ClusterCredentials(address)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def missing_kinds(self) -> list[str]:
        """The custom resources that the cluster does not know. Raises ApiRefused."""
        try:
            found = await self._ask("GET", f"/apis/{API_VERSION}")
        except ApiRefused as error:
            if error.status != 404:
                raise
            found = {}
        known = {one.get("name") for one in found.get("resources") or ()}
        return [kind.name for kind in KINDS if kind.plural not in known]

    async def apply(self, wanted: Object, *, manager: str = MANAGER) -> Object:
        """Return the object as it is now.

        Args:
            manager: who owns what is said; only the operator itself takes fields from others.

        Raises:
            ApiRefused: 409 also where another owner says otherwise.
        """
        meta = wanted["metadata"]
        path = path_of(wanted["apiVersion"], wanted["kind"], meta["namespace"], meta["name"])
        body = json.dumps(wanted).encode()  # which is YAML as well
        params = {"fieldManager": manager, "force": "true" if manager == MANAGER else "false"}
        return await self._ask("PATCH", path, body, "application/apply-patch+yaml", params)

    async def read(self, api: str, kind: str, namespace: str, name: str) -> Object | None:
        """None: there is no such object. Raises ApiRefused."""
        try:
            return await self._ask("GET", path_of(api, kind, namespace, name))
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise

    async def listed(self, api: str, kind: str, namespace: str, labels: Mapping[str, str]) -> list[Object]:
        """Those with the labels; none where the cluster has no such kind. Raises ApiRefused."""
        selector = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())}
        try:
            found = await self._ask("GET", path_of(api, kind, namespace), params=selector)
        except ApiRefused as error:
            if error.status == 404:
                return []
            raise
        return [{"apiVersion": api, "kind": kind, **one} for one in found.get("items") or ()]

    async def delete(self, one: Object) -> None:
        """Delete this very object, and none of its name that came after. Raises ApiRefused."""
        meta = one["metadata"]
        precondition = {"preconditions": {"uid": meta["uid"]}, "propagationPolicy": "Background"}
        path = path_of(one["apiVersion"], one["kind"], meta["namespace"], meta["name"])
        try:
            await self._ask("DELETE", path, json.dumps(precondition).encode(), "application/json")
        except ApiRefused as error:
            if error.status != 404:
                raise

    async def say_status(self, kind: str, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Raises ApiRefused."""
        path = f"{path_of(API_VERSION, kind, namespace, name)}/status"
        await self._ask("PATCH", path, json.dumps({"status": status}).encode(), "application/merge-patch+json")

    async def create(self, one: Object) -> Object:
        """Raises ApiRefused; 409: it is there already."""
        path = path_of(one["apiVersion"], one["kind"], one["metadata"]["namespace"])
        return await self._ask("POST", path, json.dumps(one).encode(), "application/json")

    async def replace(self, one: Object) -> Object:
        """Raises ApiRefused; 409: it is not of the version any more that was read."""
        meta = one["metadata"]
        path = path_of(one["apiVersion"], one["kind"], meta["namespace"], meta["name"])
        return await self._ask("PUT", path, json.dumps(one).encode(), "application/json")

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        typed: str = "",
        params: Mapping[str, str] | None = None,
    ) -> Object:
        assert self._session is not None, "enter the objects first"
        content = {"Content-Type": typed} if typed else {}
        try:
            headers = {"Accept": "application/json", **content, **self._credentials.headers()}
            async with self._session.request(
                method, self._server + path, data=body, params=params, headers=headers, ssl=self._credentials.context(),
                timeout=self._timeout, allow_redirects=False,
            ) as response:  # fmt: skip
                raw = await _bounded(response.content)
                return _answer(method, path, response.status, raw)
        except AccessFailed as error:
            raise ApiRefused(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError too
            words = f"{method} {path}: {type(error).__name__}: {error}".rstrip(": ")
            raise ApiRefused(f"the API server cannot be asked: {words}"[:_WORDS]) from error

    def __repr__(self) -> str:
        return f"<ClusterObjects {self._server}>"


def path_of(api: str, kind: str, namespace: str, name: str = "") -> str:
    """The path of an object, or of all of its kind in a namespace."""
    base = f"/api/{api}" if "/" not in api else f"/apis/{api}"
    return f"{base}/namespaces/{namespace}/{_PLURALS[kind]}" + (f"/{name}" if name else "")


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    parts, size = [], 0
    async for part in content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise ApiRefused(f"the API server said more than {MAX_ANSWER_BYTES} bytes at once")
        parts.append(part)
    return b"".join(parts)


def _answer(method: str, path: str, status: int, raw: bytes) -> Object:
    try:
        found = json.loads(raw) if raw else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ApiRefused(f"{method} {path}: {status}: what was answered is no object of JSON", status)
    if status >= 300:
        words = str(found.get("message") or raw[:_WORDS].decode(errors="replace"))[:_WORDS]
        raise ApiRefused(f"{method} {path}: {status}: {words}", status)
    return found
