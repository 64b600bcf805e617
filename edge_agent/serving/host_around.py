"""A host for local callers that stands around another one, and says as that one does all but its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from tidegate.models.manifest import Manifest
from tidegate.oip.host import ModelHost, ModelStatistics

HostT_co = TypeVar("HostT_co", bound=ModelHost, covariant=True)


class HostAround(Generic[HostT_co]):
    """Of a `ModelHost` all but `infer`, taken from another one."""

    __slots__ = ("_host",)

    def __init__(self, host: HostT_co) -> None:
        self._host = host

    @property
    def server_name(self) -> str:
        return self._host.server_name

    def ready(self) -> bool:
        return self._host.ready()

    def manifests(self) -> Sequence[Manifest]:
        return self._host.manifests()

    def manifest(self, name: str, version: str = "") -> Manifest:
        return self._host.manifest(name, version)

    def model_ready(self, name: str, version: str = "") -> bool:
        return self._host.model_ready(name, version)

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        return self._host.statistics(name, version)
