"""The gateway as the OIP servers see it: models from the catalog, readiness from the fleet, answers from the stack."""

from __future__ import annotations

from collections.abc import Awaitable, Container, Sequence

from gateway.core.fleet.fleet import Fleet
from gateway.default_versions import DefaultVersions
from gateway.layers.stack import Service
from gateway.observe.metrics import GatewayMetrics
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.oip.host import ModelStatistics
from tidegate.outcome import ModelNotFound
from tidegate.types import Call, Reply


class GatewayHost:
    """A `ModelHost`."""

    def __init__(
        self,
        name: str,
        defaults: DefaultVersions,
        fleet: Fleet,
        metrics: GatewayMetrics,
        infer: Service,
        unloaded: Container[str] = (),
    ) -> None:
        """Args: unloaded: the models that no request is taken for now."""
        self._unloaded = unloaded
        self._name = name
        self._defaults = defaults
        self._catalog = defaults.catalog
        self._fleet = fleet
        self._metrics = metrics
        self._infer = infer
        self._draining = False

    @property
    def server_name(self) -> str:
        return f"tidegate-gateway-{self._name}"

    def drain(self) -> None:
        """Be ready for nothing more: a balancer that asks sends its callers elsewhere."""
        self._draining = True

    def ready(self) -> bool:
        """Every static target was tried, and at least one target can be used."""
        return not self._draining and self._fleet.all_tried() and self._fleet.usable(clock.now())

    def manifests(self) -> Sequence[Manifest]:
        """Every model but the halves of those that are cut, which no caller asks for."""
        return [one for one in self._catalog.manifests if one.half is None]

    def manifest(self, name: str, version: str = "") -> Manifest:
        """One version, or what a request means that names none: its tensors are checked against it."""
        return self._defaults.manifest(name, version)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a request could be placed now: of this version, or one that names none. No while it drains."""
        if self._draining or name in self._unloaded:
            return False
        now = clock.now()
        try:
            return self._defaults.serves(name, version, now) if version else self._defaults.ready(name, now)
        except ModelNotFound:
            return False

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if not name:
            wanted: Sequence[Manifest] = self._catalog.manifests
        elif version:
            wanted = [self._catalog.manifest(name, version)]
        else:
            self._catalog.manifest(name)
            wanted = [one for one in self._catalog.manifests if one.name == name]
        return [self._metrics.statistics(one.name, one.version) for one in wanted]

    def infer(self, call: Call) -> Awaitable[Reply]:
        return self._infer(call)

    def __repr__(self) -> str:
        return f"<GatewayHost {self._name} {self._catalog!r}>"
