"""The absent models of a pool with fixed models: why each is not served, and how it comes later.

A composition root like `app.py`, for pools with `model_control: none` and without `models`. The other models share
their workers, which hold what was there at the start. One that comes later gets worker processes of its own beside
them, as where models come and go (`cloud_pool/workers/residents.py`): a model that has ended a worker once may end its
own again, and no other's. When it is tried is `tidegate/serving/absent_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from cloud_pool.resident_maker import ResidentMaker
from cloud_pool.serving.host import PoolHost
from cloud_pool.serving.model_loader import PoolModelLoader
from cloud_pool.workers.catalogue import PoolCatalogue
from cloud_pool.workers.device_worker import PoolLoadable
from tidegate.models.manifest import Manifest
from tidegate.models.repository import RepositoryError, version_key
from tidegate.oip.repository.model_control import ModelStatus, Statuses
from tidegate.outcome import ServeError
from tidegate.runtime.process import StartError
from tidegate.serving.absent_models import AbsentModels

# The number of the reload: tells its model instances from those that shared workers could have had.
_NOT_SHARED: Final = 1


class AbsentPoolModels:
    """Mutable: takes note of what is missing, and tries it again inside `async with`, once it was told of a host.

    Args:
        root: of the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._problems: dict[tuple[str, str], str] = {}  # by name and version
        self._host: PoolHost | None = None
        self._maker: ResidentMaker | None = None
        self._loader: PoolModelLoader | None = None
        self._read_last = PoolCatalogue((), {})
        self._absent = AbsentModels(root, bring=self._bring, is_served=self._is_served, on_change=lambda: None)

    def found(self, catalogue: PoolCatalogue) -> None:
        """Take note of what is wrong with the repository: with versions that others stand in for, and with models."""
        self._problems |= catalogue.problems
        served = {one.manifest.name for one in catalogue.loadables}
        for name in sorted({name for name, _ in catalogue.problems} - served):
            reasons = [why for (of, _), why in sorted(catalogue.problems.items()) if of == name]
            self._absent.note(name, "; ".join(reasons))

    def note(self, manifest: Manifest, why: str) -> None:
        """Take note of a model that is right on the disk, and that cannot be served."""
        self._problems[manifest.name, manifest.version] = why
        self._absent.note(manifest.name, why)

    def serve(self, host: PoolHost, maker: ResidentMaker, on_change: Callable[[], None]) -> None:
        """Bring models into this host from now on."""
        self._host, self._maker = host, maker
        self._loader = PoolModelLoader(
            host, maker.residents, read=self._read, make=maker.make, check_room=maker.check_room, on_change=on_change
        )

    def __contains__(self, name: object) -> bool:
        """Whether a model of this name is there, and is not served in any version."""
        return any(of == name for of, _ in self._problems)

    def statuses(self) -> Statuses:
        """Of versions that are there and are not served."""
        return {of: ModelStatus("UNAVAILABLE", why) for of, why in self._problems.items()}

    def none_is_served(self) -> StartError:
        return PoolCatalogue((), self._problems).no_model(self._root)

    async def __aenter__(self) -> Self:
        self._absent.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._absent.aclose()

    def _is_served(self, name: str) -> bool:
        return self._host is not None and self._host.models.get(name) is not None

    async def _bring(self, name: str) -> bool:
        """Raises as `AbsentModels` says."""
        assert self._loader is not None, "serve a host first"
        try:
            await self._loader.load(name)
        except (StartError, RepositoryError) as error:
            self._failed_again(name, str(error))
            raise
        except ServeError as error:
            self._failed_again(name, error.message)
            raise StartError(error.message) from error
        others = {of: why for of, why in self._problems.items() if of[0] != name}
        self._problems = others | dict(self._read_last.problems)
        return True

    def _failed_again(self, name: str, why: str) -> None:
        highest = max((version for of, version in self._problems if of == name), key=version_key)
        self._problems[name, highest] = why

    def _read(self, name: str, reload: int) -> Sequence[PoolLoadable]:
        assert self._maker is not None, "serve a host first"
        self._read_last = self._maker.read(name, reload + _NOT_SHARED, or_lower=True)
        return self._read_last.loadables

    def __repr__(self) -> str:
        return f"<AbsentPoolModels {self._absent!r}>"
