"""The model table: the model versions of one target, by name and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tidegate.models.repository import version_key
from tidegate.outcome import ModelNotFound
from tidegate.serving.target_model import TargetModel

M = TypeVar("M", bound=TargetModel)


class ModelTable(Generic[M]):
    """Mutable: versions are added, and all versions of a name replaced or removed at once.

    Args:
        server_name: of the target, for refusals.
    """

    def __init__(self, server_name: str) -> None:
        self._server_name = server_name
        self._versions: dict[str, dict[str, M]] = {}  # by name, then by version
        self._highest: dict[str, M] = {}  # by name: what answers when no version is named
        self._unloaded: set[str] = set()
        self.is_absent: Callable[[str], bool] = lambda _name: False  # wanted, and not to be had

    def add(self, model: M) -> None:
        """Add a version beside the others of its name."""
        name = model.manifest.name
        versions = self._versions.setdefault(name, {})
        versions[model.manifest.version] = model
        self._highest[name] = versions[max(versions, key=version_key)]

    def replace(self, model: M) -> None:
        """Make this the only version of its name."""
        name = model.manifest.name
        self._unloaded.discard(name)
        self._versions[name], self._highest[name] = {model.manifest.version: model}, model

    def remove(self, name: str, *, unloaded: bool = False) -> None:
        """Remove all versions of a name, if there are any. `unloaded`: refusals say that it was served until then."""
        if unloaded and name in self._versions:
            self._unloaded.add(name)
        self._versions.pop(name, None)
        self._highest.pop(name, None)

    def get(self, name: str) -> M | None:
        """The highest version of a name, or None."""
        return self._highest.get(name)

    def find(self, name: str, version: str = "") -> M:
        """One version, or the highest when `version` is empty. Raises ModelNotFound."""
        versions = self._versions.get(name)
        if versions is None and self.is_absent(name):
            why = "it could not be loaded, and its operators are told why"  # which may name files
            raise ModelNotFound(f"model {name!r} is not served by {self._server_name} for now: {why}")
        if versions is None and name in self._unloaded:
            raise ModelNotFound(f"model {name!r} was unloaded from {self._server_name}: another may serve it")
        if versions is None:
            here = ", ".join(self._versions)
            raise ModelNotFound(f"there is no model {name!r} on {self._server_name} (models: {here})")
        model = versions.get(version) if version else self._highest[name]
        if model is None:
            here = ", ".join(versions)
            raise ModelNotFound(f"model {name!r} has no version {version!r} on {self._server_name} (versions: {here})")
        return model

    def __iter__(self) -> Iterator[M]:
        return (model for versions in self._versions.values() for model in versions.values())

    def __repr__(self) -> str:
        return f"<ModelTable {', '.join(model.label for model in self)}>"
