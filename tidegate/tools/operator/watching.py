"""kopf watches the resources and their objects, and tells the reconciler what it sees.

kopf lists, watches, goes on where a watch was cut, and lists again where the server has forgotten (410). No handler of
its kinds for creation and change is used, and none for deletion: those leave annotations and finalizers on resources,
and a finalizer would keep a resource from being deleted while no operator is there. What a deleted resource has made is
collected by Kubernetes, by its owner references.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import kopf

from tidegate.servers.cluster_access import ApiAddress, ClusterCredentials
from tidegate.tools.operator.definitions import GROUP, KINDS, VERSION
from tidegate.tools.operator.reconciler import Reconciler
from tidegate.tools.operator.rendering.objects import MANAGED_BY, MANAGER

_WORKLOADS: Final = ("deployments", "statefulsets", "daemonsets")
WATCH_S: Final = 60.0


class Forever:
    """Waits between tries that never end: kopf gives up, and ends the process, where its iterable ends."""

    def __init__(self, *waits_s: float) -> None:
        self._waits_s = waits_s

    def __iter__(self) -> Iterator[float]:
        yield from self._waits_s
        yield from repeat(self._waits_s[-1])


async def watch(
    address: ApiAddress, namespaces: Sequence[str], reconciler: Reconciler, *, liveness: str | None = None
) -> None:
    """Watch until cancelled, or until kopf ends by a signal.

    Args:
        namespaces: which ones; none: the whole cluster.
        liveness: the URL on which kopf says that it lives.
    """
    await kopf.operator(
        registry=_registry(address, reconciler),
        settings=_settings(),
        standalone=True,  # which operator acts is settled by a Lease (leadership.py)
        clusterwide=not namespaces,
        namespaces=tuple(namespaces),
        liveness_endpoint=liveness,
    )


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # it would need the right to watch CustomResourceDefinitions
    settings.watching.server_timeout = WATCH_S
    settings.watching.client_timeout = WATCH_S + 10
    settings.watching.connect_timeout = 10.0
    settings.watching.reconnect_backoff = 0.2
    settings.networking.request_timeout = 10.0
    settings.networking.error_backoffs = Forever(0.2, 0.5, 1.0, 2.0)
    settings.queueing.error_delays = (0.2, 0.5, 1, 2, 5)
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = None  # it would kill the process: a supervisor does that better
    return settings


def _registry(address: ApiAddress, reconciler: Reconciler) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    credentials = ClusterCredentials(address)

    def login(**_: Any) -> kopf.ConnectionInfo:
        """Asked again when the API server no longer takes the token."""
        shown = credentials.headers().get("Authorization", "").removeprefix("Bearer ")
        return kopf.ConnectionInfo(
            server=address.server,
            ca_path=str(address.ca_file) if address.ca_file else None,
            token=shown or None,
            default_namespace=address.namespace,
        )

    kopf.on.login(registry=registry)(login)
    for kind in KINDS:
        kopf.on.event(GROUP, VERSION, kind.plural, registry=registry, id=kind.plural)(
            _of_resource(kind.name, reconciler)
        )
    for plural in _WORKLOADS:
        kopf.on.event("apps", "v1", plural, labels={MANAGED_BY: MANAGER}, registry=registry, id=plural)(
            _of_workload(reconciler)
        )
    return registry


def _of_resource(kind: str, reconciler: Reconciler) -> Any:
    async def told(event: Any, body: Any, **_: Any) -> None:
        if event["type"] == "DELETED":
            reconciler.gone(kind, body)
        else:
            reconciler.seen(kind, body)

    return told


def _of_workload(reconciler: Reconciler) -> Any:
    async def told(body: Any, **_: Any) -> None:
        reconciler.touched(body)

    return told
