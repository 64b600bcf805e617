"""The scoped host shows one caller only the models that it may use, and puts its identity on every call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gateway.core.access.entitlement import check_may_infer, check_model, delegated_tenant
from tidegate.caller import Identity
from tidegate.models.manifest import Manifest
from tidegate.oip.guard import PresentedCredentials
from tidegate.oip.host import ModelHost, ModelStatistics
from tidegate.outcome import Forbidden, ModelNotFound
from tidegate.types import Call, Reply


class ScopedHost:
    """A `ModelHost` that limits another one to `identity`. It is made for each request, so it stores references only.

    Args:
        refused: called with (reason, credential's id, presented credentials) for each refused request.
    """

    __slots__ = ("_host", "_identity", "_presented", "_refused")

    def __init__(
        self,
        host: ModelHost,
        identity: Identity,
        presented: PresentedCredentials,
        refused: Callable[[str, str, PresentedCredentials], None],
    ) -> None:
        self._host = host
        self._identity = identity
        self._presented = presented
        self._refused = refused

    @property
    def server_name(self) -> str:
        return self._host.server_name

    def ready(self) -> bool:
        return self._host.ready()

    def manifests(self) -> Sequence[Manifest]:
        self._check(None)
        return [one for one in self._host.manifests() if self._identity.may_use(one.name)]

    def manifest(self, name: str, version: str = "") -> Manifest:
        self._check(name)
        try:
            return self._host.manifest(name, version)
        except ModelNotFound as error:
            raise ModelNotFound(self._not_found(name, version)) from error

    def model_ready(self, name: str, version: str = "") -> bool:
        self._check(name)
        return self._host.model_ready(name, version)

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if name:
            self.manifest(name, version)
            return self._host.statistics(name, version)
        self._check(None)
        return [one for one in self._host.statistics() if self._identity.may_use(one.name)]

    def infer(self, call: Call) -> Awaitable[Reply]:
        if call.tenant:  # checked here, because the layers do not know the presented credentials
            self._audited(lambda: delegated_tenant(call, self._identity))
        return self._host.infer(call.by(self._identity))

    def _check(self, name: str | None) -> None:
        self._audited(lambda: check_may_infer(self._identity))
        if name is not None:
            self._audited(lambda: check_model(self._identity, name))

    def _audited(self, check: Callable[[], object]) -> None:
        try:
            check()
        except Forbidden:
            self._refused("forbidden", self._identity.id, self._presented)
            raise

    def _not_found(self, name: str, version: str) -> str:
        """Return the catalog's error text, over the models that this caller may see."""
        seen = self.manifests()
        versions = [one.version for one in seen if one.name == name]
        if versions:
            return f"model {name!r} has no version {version!r}; it has {', '.join(versions)}"
        return f"no model is called {name!r}; known models: {', '.join(sorted({one.name for one in seen})) or 'none'}"

    def __repr__(self) -> str:
        return f"<ScopedHost {self._identity!r} {self._host!r}>"
