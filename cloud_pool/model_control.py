"""The model control of a pool: what puts its residents, its loader and its repository control together.

A composition root like `app.py`, for pools with `model_control: explicit` or `poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from math import inf
from typing import Self

import structlog

from cloud_pool.config import PoolConfig
from cloud_pool.core.memory.residency import Residency
from cloud_pool.resident_maker import ResidentMaker
from cloud_pool.serving.host import PoolHost
from cloud_pool.serving.model_loader import PoolModelLoader
from cloud_pool.serving.on_demand import OnDemand
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.residents import Resident
from tidegate.runtime.process import StartError
from tidegate.servers.model_control_access import TokenAccess, publish_token
from tidegate.servers.operator_token import OperatorToken
from tidegate.serving.repository_control import RepositoryControl

log = structlog.get_logger(__name__)


class PoolModelControl:
    """The models of a pool that come and go, inside `async with` of its parts, which `begin` enters.

    Args:
        maker: of the workers of each.
        places: so many workers has a model.
    """

    def __init__(self, config: PoolConfig, maker: ResidentMaker, *, places: int) -> None:
        self.residents = maker.residents
        self._config = config
        self._maker = maker
        self._token = OperatorToken()
        self._control: RepositoryControl | None = None
        self._access: TokenAccess | None = None
        self._loader: PoolModelLoader | None = None
        self._on_demand: OnDemand | None = None
        self._places = places
        self._stand_in = True  # may lower versions, for those whose files are wrong: at the start
        self._failed: dict[str, str] = {}  # by name, why the highest version was not loaded at the start
        self._stack = AsyncExitStack()
        self._check()

    @property
    def access(self) -> TokenAccess:
        assert self._access is not None, "serve a host first"
        return self._access

    @property
    def control(self) -> RepositoryControl:
        assert self._control is not None, "serve a host first"
        return self._control

    def serve(self, host: PoolHost, on_change: Callable[[], None]) -> Self:
        """Load into the models of this host from now on."""
        config = self._config
        if config.resident_models is not None or config.resident_bytes is not None:
            limits = {"most_models": config.resident_models or inf, "most_bytes": config.resident_bytes or inf}
            self._on_demand = OnDemand(Residency(**limits), places=self._places, on_change=on_change)
        self._loader = PoolModelLoader(
            host,
            self.residents,
            read=self._read,
            make=self._resident,
            check_room=self._maker.check_room,
            on_demand=self._on_demand,
            on_change=on_change,
        )
        self._control = RepositoryControl(
            host.server_name,
            config.model_repository,
            self._loader,
            mode=config.model_control,
            wanted=self._wanted,
            poll_s=config.repository_poll_s,
        )
        self._access = TokenAccess(self._control, self._token)
        return self

    def publish(self, address: str) -> None:
        """Write the operator's token for the port of this address."""
        publish_token(self._token, address, self._config.operator_token_file)

    async def __aenter__(self) -> Self:
        """Load what is to be there from the start: each of `models`, or what of the repository is right.

        Raises StartError and RepositoryError.
        """
        assert self._loader is not None and self._control is not None, "serve a host first"
        async with self._stack:
            self._stack.callback(self._token.withdraw)
            await self._stack.enter_async_context(self.residents)
            if self._on_demand is not None:
                await self._stack.enter_async_context(self._on_demand)
            if self._config.models is None:
                await self._control.begin()
            for name in self._config.models or ():
                await self._loader.load(name)
            self._stand_in = False
            self._control.failed_before(self._failed)
            await self._stack.enter_async_context(self._control)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _check(self) -> None:
        config = self._config
        if config.standby_workers:
            raise StartError("key 'standby_workers': there is no reserve where models come and go (model_control)")
        for name in config.models or ():
            if ":" in name:
                raise StartError(f"key 'models': {name!r} names a version; model_control serves the highest of a name")

    def _wanted(self, name: str) -> bool:
        """`models` is what is there from the start; with a followed folder it is all that may be there."""
        config = self._config
        return config.model_control == "explicit" or config.models is None or name in config.models

    def _read(self, name: str, reload: int) -> Sequence[PoolLoadable]:
        found = self._maker.read(name, reload, or_lower=self._stand_in)
        for (_, version), why in found.wrong_files.items():  # the highest first
            self._failed.setdefault(name, why)
            log.error("a version cannot be read, and others stand in", model=name, version=version, reason=why)
        return found.loadables

    def _resident(self, loadables: Sequence[PoolLoadable]) -> Resident:
        cold_s = self._on_demand.cold_s if self._on_demand is not None else lambda _name: 0.0
        return self._maker.make(loadables, cold_s=cold_s)

    def __repr__(self) -> str:
        return f"<PoolModelControl {self._control!r} {self.residents!r}>"
