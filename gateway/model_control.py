"""The model control of a gateway: which models it takes requests for, changed while it runs.

A gateway computes nothing, so loading and unloading there are about its own catalog, and reach no target:

    load NAME     reads the model from the gateway's repository, so that a model that is new there, or has a new
                  version, is known without a restart; takes back an unload
    unload NAME   refuses new requests for the model at this gateway, whatever its targets serve; what was accepted is
                  answered. The refusal sends callers to another gateway

To have a target give a model's memory back, it is unloaded at the target; the gateway hears of that by the target's
offers and places elsewhere. An unload holds until the model is loaded again, or the gateway is started again.

Each change needs the right `admin` where `auth` is configured, and the operator's token where it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from gateway.catalog import Catalog
from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from gateway.identity.operator_access import OPERATOR
from tidegate.models.manifest import Manifest, Where
from tidegate.models.repository import Repository
from tidegate.oip.guard import PresentedCredentials
from tidegate.oip.host import ModelHost
from tidegate.oip.repository.model_control import ModelControl, Statuses
from tidegate.servers.model_control_access import IndexedControl, check_token
from tidegate.servers.operator_token import OperatorToken


class CatalogLoader:
    """A `ModelLoader` over a gateway's catalog. Mutable: `unloaded`, the models that are taken no requests for.

    Args:
        on_loaded: prepares what callers in text need of a model that has come.
    """

    def __init__(self, root: Path, catalog: Catalog, on_loaded: Callable[[Manifest], Awaitable[None]]) -> None:
        self.where: Where | None = None
        self.unloaded: set[str] = set()
        self._root = root
        self._catalog = catalog
        self._on_loaded = on_loaded

    def served(self) -> Mapping[str, Manifest]:
        return {one.name: one for one in self._catalog.manifests if one.name not in self.unloaded}

    async def load(self, name: str) -> Manifest:
        repository = Repository(self._root, only=(name,), pass_over=True)
        newest = await asyncio.to_thread(repository.manifest, name)
        await self._on_loaded(newest)  # where that fails, nothing has changed
        kept = [one for one in self._catalog.manifests if (one.name, one.version) in repository.damaged]
        self._catalog.adopt(name, (*repository.manifests(), *kept))
        self.unloaded.discard(name)
        return newest

    async def restore(self, name: str) -> bool:
        """One that foreign servers or devices have told of."""
        known = name in self.unloaded
        self.unloaded.discard(name)
        return known

    async def unload(self, name: str) -> None:
        self.unloaded.add(name)

    def __repr__(self) -> str:
        return f"<CatalogLoader {self._catalog!r}, unloaded: {', '.join(sorted(self.unloaded)) or 'none'}>"


class GatewayControlAccess:
    """A `ControlAccess` for operators.

    Args:
        guard: finds who calls, where `auth` is configured; None: the operator's token is wanted.
    """

    def __init__(self, control: IndexedControl, guard: GatewayGuard | None, token: OperatorToken, audit: Audit) -> None:
        self._control = control
        self._guard = guard
        self._token = token
        self._audit = audit

    async def statuses(self, host: ModelHost) -> Statuses:
        """Of the models that the caller may know."""
        known = {(one.name, one.version) for one in host.manifests()}
        return {of: status for of, status in (await self._control.statuses()).items() if of in known}

    async def admit(self, presented: PresentedCredentials) -> ModelControl:
        who = OPERATOR
        if self._guard is not None:
            who = (await self._guard.with_right(presented, "admin")).id
        else:
            check_token(self._token, presented)
        note = lambda what, status: self._audit.admin(who, presented.protocol, what, presented.peer, status)  # noqa: E731
        return AuditedControl(self._control, note)

    def __repr__(self) -> str:
        return f"<GatewayControlAccess to {self._control!r}>"


class AuditedControl:
    """A `ModelControl` whose changes are recorded."""

    def __init__(self, control: ModelControl, note: Callable[[str, int], None]) -> None:
        """Args: note: is given the change, and a status as over HTTP."""
        self._control = control
        self._note = note

    async def load(self, name: str) -> None:
        await self._noted(f"load {name[:200]}", self._control.load(name))

    async def unload(self, name: str) -> None:
        await self._noted(f"unload {name[:200]}", self._control.unload(name))

    async def _noted(self, what: str, change: Awaitable[None]) -> None:
        try:
            await change
        except BaseException:
            self._note(what, 400)
            raise
        self._note(what, 200)

    def __repr__(self) -> str:
        return f"<AuditedControl {self._control!r}>"
