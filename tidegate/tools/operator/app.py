"""The operator's composition: the lease, the reconciler and the watches, from start to end."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from tidegate import clock
from tidegate.runtime import events
from tidegate.runtime.owned_task import OwnedTask
from tidegate.servers.cluster_access import ApiAddress
from tidegate.tools.operator.cluster_objects import ApiRefused, ClusterObjects
from tidegate.tools.operator.leadership import Leadership
from tidegate.tools.operator.reconciler import Reconciler
from tidegate.tools.operator.rollout_handover import RolloutHandover
from tidegate.tools.operator.watching import watch

LEASE: Final = "tidegate-operator"
_ASK_AGAIN_S: Final = 2.0

log = structlog.get_logger(__name__)


async def operate(
    address: ApiAddress,
    *,
    namespaces: Sequence[str],
    identity: str,
    conductors: Mapping[str, str],
    liveness: str | None = None,
    lease_s: float = 15.0,
) -> None:
    """Work until cancelled or ended by a signal; the lease, in the operator's own namespace, is given back then.

    Args:
        namespaces: whose resources; none: those of the whole cluster.
        identity: of this operator among several.
        conductors: admin ports of gateways by name, for rollouts.
        liveness: URL on which it says that it lives.
    """
    async with ClusterObjects(address) as cluster:
        leadership: Leadership

        def held() -> bool:
            return leadership.held

        reconciler = Reconciler(cluster, RolloutHandover(conductors), held, random.random)
        leadership = Leadership(
            cluster, address.namespace, LEASE, identity, reconciler.look_at_all, lease_s=lease_s, renew_s=lease_s / 5
        )
        worker = OwnedTask(reconciler.run, name="reconciler", crash_means="resources are no longer looked at")
        await _until_defined(cluster)
        async with leadership, worker:
            events.emit("ready", role="operator", identity=identity)
            await watch(address, namespaces, reconciler, liveness=liveness)


async def _until_defined(cluster: ClusterObjects) -> None:
    """Wait for the cluster, and for the resources: kopf looks for them once, at its start."""
    while True:
        try:
            missing = await cluster.missing_kinds()
            if not missing:
                return
            way_out = "`tidegate operator crds | kubectl apply --server-side -f -`"
            log.warning("the cluster does not know these resources", missing=missing, way_out=way_out)
        except ApiRefused as error:
            log.warning("waiting for the API server", reason=str(error))
        await clock.sleep(_ASK_AGAIN_S)
