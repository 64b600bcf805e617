"""The pool's host: the common pipeline (`tidegate/serving/target_host.py`) over the model instances of one scheduler.

Load reports carry the epoch of this process, microseconds of its start since 1970: larger than that of the process
before, without a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.coalescing import Coalescer
from cloud_pool.serving.generating_model import PoolGeneratingModel
from cloud_pool.serving.pool_model import Hold, PoolModel, VariantRelief
from cloud_pool.serving.sequence_state import SequenceStates
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.generating_workers import VariantWorkers
from cloud_pool.workers.model_workers import GenerationWorkers, ModelWorkers
from cloud_pool.workers.steps_worker import StepsWorker
from tidegate.serving.joint_queue import JointQueue
from tidegate.serving.model_table import ModelTable
from tidegate.serving.target_host import TargetHost
from tidegate.tracing.served import ServedTraces

_OUTSIDE_SANDBOX: Final = "all: vLLM runs outside of it"


class PoolHost(TargetHost[PoolModel | PoolGeneratingModel]):
    """A `ModelHost` over one scheduler.

    Args:
        name: of this pool; answers say "pool/NAME".
        loadables: what is served; the first of each model is used when no variant is demanded.
        lesser: the precision that answers requests without a demand, while `degraded()`; "" is none.
        spare: whether variants of that precision answer nothing but demands, at other times.
        generating: the workers of those of `loadables` that generate.
        steps: the workers of those with a pipeline, by name and version.
        epoch: unique to this process and larger than that of the one before.
        on_missed: as `TargetHost` calls it.
    """

    def __init__(
        self,
        name: str,
        loadables: Iterable[PoolLoadable],
        scheduler: PoolScheduler,
        supervisor: ModelWorkers,
        *,
        epoch: int,
        generating: GenerationWorkers | None = None,
        steps: Mapping[tuple[str, str], StepsWorker] | None = None,
        lesser: str = "",
        spare: bool = False,
        degraded: Callable[[], bool] = lambda: False,
        traces: ServedTraces | None = None,
        on_missed: Callable[[float, float], None] = lambda _arrived_at, _ended_at: None,
    ) -> None:
        server_name = f"pool/{name}"
        models = ModelTable[PoolModel | PoolGeneratingModel](server_name)
        queue = scheduler if generating is None else JointQueue(scheduler, generating.schedulers)
        super().__init__(server_name, models, queue, epoch=lambda: epoch, traces=traces, on_missed=on_missed)
        self.epoch = epoch
        self.sequences = SequenceStates()
        self._name = name
        self._scheduler = scheduler
        self._supervisor = supervisor
        self._steps = steps or {}
        self._coalescer = Coalescer(scheduler.submit)
        self._relief = VariantRelief(lesser, spare, degraded)
        versions: dict[tuple[str, str], list[PoolLoadable]] = {}
        for loadable in loadables:
            versions.setdefault((loadable.manifest.name, loadable.manifest.version), []).append(loadable)
        for version in versions.values():
            if generating is not None and version[0].manifest.generative is not None:
                models.add(self.generating_model([generating.variants[one.key] for one in version]))
            else:
                models.add(self.batched_model(version, supervisor))

    def generating_model(self, workers: Sequence[VariantWorkers]) -> PoolGeneratingModel:
        """The variants of one version that generate, for `models`."""
        inside = all(one.sandboxed for one in workers)
        lacks = self._supervisor.sandbox if inside else _OUTSIDE_SANDBOX
        return PoolGeneratingModel(self.server_name, workers, sandbox=lacks)

    def batched_model(
        self,
        version: Sequence[PoolLoadable],
        workers: ModelWorkers,
        hold: Hold | None = None,
        *,
        steps: StepsWorker | None = None,
    ) -> PoolModel:
        """The variants of one version that compute batches, for `models`; with `steps` around them, if it has any."""
        return PoolModel(
            self.server_name,
            version,
            self._scheduler,
            workers,
            sequences=self.sequences,
            coalescer=self._coalescer,
            relief=self._relief,
            hold=hold,
            steps=steps or self._steps.get((version[0].manifest.name, version[0].manifest.version)),
        )

    @property
    def coalesced(self) -> int:
        """Requests that were answered with another's computation."""
        return self._coalescer.spared

    def __repr__(self) -> str:
        models = ", ".join(f"{model.manifest.name}:{model.manifest.version}" for model in self.models)
        return f"<PoolHost {self._name} {self._supervisor.state} {models} {self._scheduler!r}>"
