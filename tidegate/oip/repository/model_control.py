"""Model control loads and unloads the models of a running process, as Triton's repository extension has it.

    POST /v2/repository/index                    RepositoryIndex
    POST /v2/repository/models/NAME/load         RepositoryModelLoad
    POST /v2/repository/models/NAME/unload       RepositoryModelUnload

The servers of this package know the two protocols below and nothing of what stands behind them: a pool and an edge
start and end workers (`tidegate/serving/repository_control.py`), a gateway changes what it places
(`gateway/model_control.py`). A process without model control serves a fixed set of models: then loading one of them is
answered as done, and unloading is not supported.

The index is for every caller that may use the models. Loading and unloading change the process for all callers, so
they need an operator's right, which the access checks before it hands out the control.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

from tidegate.oip.guard import Guard, PresentedCredentials
from tidegate.oip.host import ModelHost
from tidegate.outcome import NotSupported

NO_OVERRIDES: Final = "loading a model with a configuration or files of the caller's is not supported"
_FIXED: Final = (
    "unloading a model is not supported here: key 'model_control' is none; with explicit models are loaded and "
    "unloaded by request, with poll by what is in the repository"
)

IndexState = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


class ModelStatus(NamedTuple):
    """What the index says of one version."""

    state: IndexState
    reason: str = ""


Statuses = Mapping[tuple[str, str], ModelStatus]  # by name and version


class ModelControl(Protocol):
    """Loads and unloads models by name. Both return once it is done, and go on where their caller leaves."""

    async def load(self, name: str) -> None:
        """Serve a model, in the version that the repository has of it now.

        Raises:
            ModelNotFound: the repository has no such model for this process.
            NotSupported: it is not this process's to load.
            InvalidRequest: it cannot be loaded; what served before serves on.
            Overloaded: there is no memory for it.
        """
        ...

    async def unload(self, name: str) -> None:
        """Serve a model no longer: what was accepted is answered first. Raises ModelNotFound and NotSupported."""
        ...


class ControlAccess(Protocol):
    """Gives the control to callers with the right to it."""

    async def statuses(self, host: ModelHost) -> Statuses:
        """Of versions whose state is more than whether `host` serves them, of which its caller may know."""
        ...

    def admit(self, presented: PresentedCredentials) -> Coroutine[Any, Any, ModelControl]:
        """The control for a caller. Raises Unauthenticated, Forbidden and Overloaded."""
        ...


class FixedModels:
    """The `ControlAccess` of a process that serves what it was started with.

    Args:
        missing: of versions that it was to serve, and could not be started with.
    """

    def __init__(self, guard: Guard, missing: Callable[[], Statuses] = dict) -> None:
        self._guard = guard
        self._missing = missing

    async def statuses(self, host: ModelHost) -> Statuses:
        return self._missing()

    async def admit(self, presented: PresentedCredentials) -> ModelControl:
        return FixedControl(await self._guard.admit(presented))

    def __repr__(self) -> str:
        return f"<FixedModels behind {self._guard!r}>"


class FixedControl:
    """The control of a process that serves what it was started with, for callers that have the right to it."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def statuses(self) -> Statuses:
        """No version has more to say than whether it is served."""
        return {}

    async def load(self, name: str) -> None:
        self._host.manifest(name)

    async def unload(self, name: str) -> None:
        self._host.manifest(name)
        raise NotSupported(_FIXED)

    def __repr__(self) -> str:
        return f"<FixedControl of {self._host!r}>"
