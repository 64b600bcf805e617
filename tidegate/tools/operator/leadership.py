"""Of several operators one acts: the holder of a Lease, which it renews; the others wait until it stands still.

    free, given back, or unchanged for `lease_s` by our own clock → taken → renewed every `renew_s`
    not renewed for two thirds of `lease_s` → not held any more, whatever the server says

No clock is compared with another machine's: a Lease has expired when *we* have seen it unchanged for its duration. Each
write names the version that was read, so of two that take it at once one is refused (409). The holder stops before
another one may begin; a request of its that is still on its way then does no harm, because what is applied is the same.

Source: Kubernetes' client-go, package leaderelection.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.tools.operator.cluster_objects import ApiRefused, ClusterObjects
from tidegate.tools.operator.rendering.objects import Object

API: Final = "coordination.k8s.io/v1"
_HELD_SHARE: Final = 2 / 3

log = structlog.get_logger(__name__)


class Leadership:
    """`async with` competes for the Lease until its end, and gives it back then.

    Args:
        identity: of this operator; no other one has it.
        on_change: called when it begins or ends to be held.
    """

    def __init__(
        self, cluster: ClusterObjects, namespace: str, name: str, identity: str, on_change: Callable[[], None],
        *, lease_s: float = 15.0, renew_s: float = 3.0,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._where = (namespace, name)
        self.identity = identity
        self._on_change = on_change
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._renewed_at: float | None = None
        self._was_held = False
        self._seen: tuple[str, float] = ("", 0.0)  # a version of another's Lease, and when it was first seen
        self._task = OwnedTask(self._compete, name="lease of the operator")

    async def __aenter__(self) -> Leadership:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        if self.held:
            self._renewed_at = None
            await self._give_back()

    @property
    def held(self) -> bool:
        """Whether this operator may act now."""
        return self._renewed_at is not None and clock.now() < self._renewed_at + self._lease_s * _HELD_SHARE

    async def _compete(self) -> None:
        while True:
            try:
                await self._try()
            except ApiRefused as error:
                log.warning("the lease could not be had or renewed", reason=str(error), held=self.held)
            self._tell()
            await clock.sleep(self._renew_s)

    async def _try(self) -> None:
        """Raises ApiRefused; 409 means that another one was faster."""
        asked_at = clock.now()
        lease = await self._cluster.read(API, "Lease", *self._where)
        if lease is None:
            await self._cluster.create(self._mine(None))
        elif self._may_take(lease, asked_at):
            await self._cluster.replace(self._mine(lease))
        else:
            self._renewed_at = None
            return
        # One that lapsed meanwhile and nobody was told of: who looked then waits to be told that it is held again.
        self._was_held = self._was_held and self.held
        self._renewed_at = asked_at

    def _may_take(self, lease: Object, now: float) -> bool:
        said = lease.get("spec") or {}
        holder = said.get("holderIdentity") or ""
        if holder in ("", self.identity):
            return True
        version = str(lease["metadata"].get("resourceVersion", ""))
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] >= max(self._lease_s, float(said.get("leaseDurationSeconds") or 0))

    def _mine(self, lease: Object | None) -> Object:
        said: dict[str, Any] = dict((lease or {}).get("spec") or {})
        stamp = datetime.fromtimestamp(clock.utc_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if said.get("holderIdentity") != self.identity:
            said |= {"acquireTime": stamp, "leaseTransitions": int(said.get("leaseTransitions") or 0) + 1}
        said |= {
            "holderIdentity": self.identity, "renewTime": stamp, "leaseDurationSeconds": max(1, round(self._lease_s))
        }  # fmt: skip
        namespace, name = self._where
        meta = {"name": name, "namespace": namespace} if lease is None else lease["metadata"]
        return {"apiVersion": API, "kind": "Lease", "metadata": meta, "spec": said}

    def _tell(self) -> None:
        if self.held != self._was_held:
            self._was_held = self.held
            log.info("this operator acts" if self.held else "this operator waits", identity=self.identity)
            self._on_change()

    async def _give_back(self) -> None:
        """So that another one need not wait; without an answer it waits."""
        try:
            lease = await self._cluster.read(API, "Lease", *self._where)
            if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                await self._cluster.replace({**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except ApiRefused as error:
            log.warning("the lease could not be given back: it runs out", reason=str(error))

    def __repr__(self) -> str:
        return f"<Leadership {'/'.join(self._where)} {self.identity} {'acts' if self.held else 'waits'}>"
