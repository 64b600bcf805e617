"""The resident maker reads a model of the repository and makes the workers that it has for itself.

A part of two composition roots: of `model_control.py`, where models come and go, and of `absent_models.py`, where they
are fixed and one that was missing at the start comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cloud_pool.config import PoolConfig
from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.memory.device_memory import human_size
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.catalogue import PoolCatalogue, check_memory, read_catalogue
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.generating_workers import GeneratingWorkers
from cloud_pool.workers.memory_limit import MemoryLimit
from cloud_pool.workers.residents import Resident, Residents
from cloud_pool.workers.steps_worker import StepsWorker
from cloud_pool.workers.supervisor import PoolSupervisor
from tidegate.models.repository import Repository
from tidegate.outcome import OutOfMemory
from tidegate.runtime.process import StartError
from tidegate.workers.warming.measured_costs import MeasuredCosts

_RETRY_AFTER_S = 5.0  # for a model that had no room: by then another may have been unloaded


class ResidentMaker:
    """Makes residents; holds nothing of them.

    Args:
        precisions: of the variants that are served, the preferred one first.
        workers_on_cpu: so many of a model's workers are in the machine's memory.
        supervising, generating: make the workers of one model; steps: that of the steps around one.
    """

    def __init__(
        self,
        config: PoolConfig,
        scheduler: PoolScheduler,
        *,
        residents: Residents,
        precisions: Sequence[str],
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
        self._costs = costs
        self._memory_limit = memory_limit
        self._supervising = supervising
        self._generating = generating
        self._steps = steps

    def read(self, name: str, reload: int, *, or_lower: bool) -> PoolCatalogue:
        """A model in its highest version, or where that is wrong in a lower one. Blocks. Raises as `read_catalogue`."""
        config = self._config
        found = read_catalogue(
            Repository(config.model_repository),
            [name],
            self._precisions[0],
            self._precisions[1:],
            config.allowed_engines,
            check=config.steps.check,
            or_lower=or_lower,
        )
        return replace(found, loadables=tuple(replace(one, reload=reload) for one in found.loadables))

    def make(self, loadables: Sequence[PoolLoadable], *, cold_s: Callable[[str], float] = lambda _: 0.0) -> Resident:
        """Args: cold_s: as `Resident` takes it."""
        return Resident(
            loadables,
            supervising=self._supervising,
            generating=self._generating,
            on_defect=self.residents.report,
            sandbox=self.residents.sandbox,
            known=self._known(loadables),
            cold_s=cold_s,
            steps=None if loadables[0].public is None else self._steps(loadables[0]),
        )

    def check_room(self, loadables: Sequence[PoolLoadable]) -> None:
        """Raises OutOfMemory where the model surely does not fit beside what is in memory."""
        cpu = self._scheduler.allotment.devices.get("cpu")
        held_bytes = 0.0 if cpu is None else cpu.held_bytes
        left_bytes = self._memory_limit.of(None) - held_bytes
        try:
            check_memory(loadables, workers=self._workers_on_cpu, limit_bytes=left_bytes, device="cpu")
        except StartError as error:
            beside = f"{human_size(held_bytes)} are held by other models, which could be unloaded"
            raise OutOfMemory(f"{error} ({beside})", retry_after_s=_RETRY_AFTER_S) from error

    def _known(self, loadables: Sequence[PoolLoadable]) -> dict[str, ModelInstance]:
        """The model instances whose costs are known from an earlier run."""
        found = {one.key: (one, self._costs.known(one.variant)) for one in loadables if one.manifest.generative is None}
        return {key: ModelInstance(key, one.manifest, one.variant, cost) for key, (one, cost) in found.items() if cost}

    def __repr__(self) -> str:
        return f"<ResidentMaker {self.residents!r}>"
