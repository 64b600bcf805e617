"""The model control of a pool: what puts its residents, its loader and its repository control together.

A composition root like `app.py`, for pools with `model_control: explicit` or `poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from typing import Self

import structlog

from cloud_pool.config import PoolConfig
from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.memory.device_memory import human_size
from cloud_pool.core.memory.residency import Residency
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.host import PoolHost
from cloud_pool.serving.model_loader import PoolModelLoader
from cloud_pool.serving.on_demand import OnDemand
from cloud_pool.workers.catalogue import check_memory, read_catalogue
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.generating_workers import GeneratingWorkers
from cloud_pool.workers.memory_limit import MemoryLimit
from cloud_pool.workers.residents import Resident, Residents
from cloud_pool.workers.steps_worker import StepsWorker
from cloud_pool.workers.supervisor import PoolSupervisor
from tidegate.models.repository import Repository
from tidegate.outcome import OutOfMemory
from tidegate.runtime.process import StartError
from tidegate.servers.model_control_access import TokenAccess, publish_token
from tidegate.servers.operator_token import OperatorToken
from tidegate.serving.repository_control import RepositoryControl
from tidegate.workers.warming.measured_costs import MeasuredCosts

log = structlog.get_logger(__name__)
_RETRY_AFTER_S = 5.0  # for a model that had no room: by then another may have been unloaded


class PoolModelControl:
    """The models of a pool that come and go, inside `async with` of its parts, which `begin` enters.

    Args:
        precisions: of the variants that are served, the preferred one first.
        supervising, generating: make the workers of one model; steps: that of the steps around one.
    """

    def __init__(
        self,
        config: PoolConfig,
        scheduler: PoolScheduler,
        *,
        residents: Residents,
        precisions: Sequence[str],
        places: int,
        workers_on_cpu: int,
        costs: MeasuredCosts,
        memory_limit: MemoryLimit,
        supervising: Callable[[Sequence[PoolLoadable], str, Mapping[str, ModelInstance]], PoolSupervisor],
        generating: Callable[[Sequence[PoolLoadable]], GeneratingWorkers],
        steps: Callable[[PoolLoadable], StepsWorker],
    ) -> None:
        self.residents = residents
        self._config = config
        self._scheduler = scheduler
        self._precisions = tuple(precisions)
        self._workers_on_cpu = workers_on_cpu
        self._memory_limit = memory_limit
        self._supervising = supervising
        self._generating = generating
        self._steps = steps
        self._token = OperatorToken()
        self._control: RepositoryControl | None = None
        self._access: TokenAccess | None = None
        self._loader: PoolModelLoader | None = None
        self._on_demand: OnDemand | None = None
        self._places = places
        self._costs = costs
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
            check_room=self._check_room,
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
        config = self._config
        found = read_catalogue(
            Repository(config.model_repository),
            [name],
            self._precisions[0],
            self._precisions[1:],
            config.allowed_engines,
            check=config.steps.check,
            or_lower=self._stand_in,
        )
        for (_, version), why in found.wrong_files.items():  # the highest first
            self._failed.setdefault(name, why)
            log.error("a version cannot be read, and others stand in", model=name, version=version, reason=why)
        return [replace(one, reload=reload) for one in found.loadables]

    def _resident(self, loadables: Sequence[PoolLoadable]) -> Resident:
        return Resident(
            loadables,
            supervising=self._supervising,
            generating=self._generating,
            on_defect=self.residents.report,
            sandbox=self.residents.sandbox,
            known=self._known(loadables),
            cold_s=self._on_demand.cold_s if self._on_demand is not None else lambda _name: 0.0,
            steps=None if loadables[0].public is None else self._steps(loadables[0]),
        )

    def _known(self, loadables: Sequence[PoolLoadable]) -> dict[str, ModelInstance]:
        """The model instances whose costs are known from an earlier run."""
        found = {one.key: (one, self._costs.known(one.variant)) for one in loadables if one.manifest.generative is None}
        return {key: ModelInstance(key, one.manifest, one.variant, cost) for key, (one, cost) in found.items() if cost}

    def _check_room(self, loadables: Sequence[PoolLoadable]) -> None:
        """Raises OutOfMemory where the model surely does not fit beside what is in memory."""
        cpu = self._scheduler.allotment.devices.get("cpu")
        held_bytes = 0.0 if cpu is None else cpu.held_bytes
        left_bytes = self._memory_limit.of(None) - held_bytes
        try:
            check_memory(loadables, workers=self._workers_on_cpu, limit_bytes=left_bytes, device="cpu")
        except StartError as error:
            beside = f"{human_size(held_bytes)} are held by other models, which could be unloaded"
            raise OutOfMemory(f"{error} ({beside})", retry_after_s=_RETRY_AFTER_S) from error

    def __repr__(self) -> str:
        return f"<PoolModelControl {self._control!r} {self.residents!r}>"
