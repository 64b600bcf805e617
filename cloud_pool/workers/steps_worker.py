"""The steps' worker: a process of one model that runs what its pipeline has before and after the batches.

Steps do not run in the workers that compute batches. A request would wait for a batch to end before its text could be
looked at, and then again for its labels; and a module that loops would hold a device, and everybody's batches, for what
it may take. In a process of the model's own they cost other models nothing but processor time, and the device none.

    request ─▶ before ─▶ the model's queue, batches with others ─▶ after ─▶ answer

How many requests may be inside is bounded by the model's `max_queue_size`, beside that of its queue. Restarts and crash
loops are those of every worker (`tidegate/workers/supervised.py`); while there is no process, requests fail with
Unreachable at once.

What steps cost is measured once, around real answers of the model, for what gateways are offered: seconds by the
caller's work, of which the model's part is taken from what its variants were measured to cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import structlog
from numpy.typing import NDArray

from cloud_pool.workers.device_worker import DeviceWorker, EngineProcess
from tidegate import clock
from tidegate.estimate.cost_table import CostTable
from tidegate.fleet.offers import ModelState
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.work import Work, work_of_arrays
from tidegate.outcome import DeadlineExceeded, Overloaded, Unreachable
from tidegate.pipeline.plan import Part, StepPlan, WasmLimits, plan_of
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.workers.incarnation import Incarnation
from tidegate.workers.lost_workers import LostWorkers
from tidegate.workers.process import EngineSpec, WorkerDied
from tidegate.workers.supervised import SupervisedWorker
from tidegate.workers.warmup import CostPoints, sizes

Arrays = Mapping[str, NDArray[Any]]
# Of the model's own inputs and their work: its outputs.
ComputeModel = Callable[[dict[str, NDArray[Any]], Work], Awaitable[Arrays]]
_REPEATS: Final = 3
_RETRY_AFTER_S: Final = 0.1  # steps are short: there is room again soon
log = structlog.get_logger(__name__)


class PreparedRequest(NamedTuple):
    """A request behind the steps before the model: the model's inputs, and what only later steps need."""

    inputs: dict[str, NDArray[Any]]
    kept: dict[str, NDArray[Any]]
    took_s: float


class _StepCost(NamedTuple):
    """What the steps of one size took, by the caller's and the model's work."""

    units: float
    model_units: float
    seconds: float


class StepsWorker:
    """Alive inside `async with`, again and again, which returns once its steps are loaded, and measured the first time.

    Args:
        manifest: with the pipeline, as callers see it.
        variant: of those that are served: how large requests may be.
        folder: of the version's files.
        compute: has the model answer, to measure; the model serves by then.
        start_process: makes a worker process of a name.
        on_change: called after each change of `state`.

    Raises:
        StartError: a step cannot be loaded, or cannot do what it is measured with.
    """

    def __init__(
        self,
        manifest: Manifest,
        variant: Variant,
        folder: Path,
        *,
        limits: WasmLimits,
        compute: ComputeModel,
        start_process: Callable[[str], AbstractAsyncContextManager[EngineProcess]],
        backoff: Backoff,
        hang_timeout_s: float = 30.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.manifest = manifest
        self.lost_workers = LostWorkers()
        self._variant = variant
        self._plans = {part: _plan(manifest, folder, limits, part) for part in _PARTS}
        self._artefacts = manifest.of_model
        self._compute = compute
        self._start_process = start_process
        self._hang_timeout_s = hang_timeout_s
        self._on_change = on_change
        self._costs: list[_StepCost] = []
        self._inside = 0
        self._task: asyncio.Task[None] | None = None
        self._backoff = backoff
        self._supervised = self._new_supervised()

    @property
    def name(self) -> str:
        return f"{self.manifest.name}:{self.manifest.version}"

    @property
    def state(self) -> ModelState:
        return "loading" if self._task is None else self._supervised.state

    def _new_supervised(self) -> SupervisedWorker[DeviceWorker]:
        return SupervisedWorker[DeviceWorker](
            self,
            start=self._started,
            name_of=lambda number: f"steps of {self.name}.{number}",
            backoff=self._backoff,
            cannot_start=f"model {self.name!r} cannot be served",
        )

    async def __aenter__(self) -> Self:
        self._supervised = self._new_supervised()
        self._task = asyncio.create_task(self._supervised.live(), name=f"steps of {self.name}")
        ready = asyncio.create_task(self._supervised.ready_once.wait(), name=f"first start of steps of {self.name}")
        try:
            await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
        except BaseException:
            await self.__aexit__()
            raise
        finally:
            await cancel_and_wait(ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)

    async def failed(self) -> None:
        """Wait for the end of the supervision itself, which only a defect brings: raises it."""
        if self._task is None:
            await asyncio.get_running_loop().create_future()
        else:
            await asyncio.shield(self._task)

    def offered_cost(self, of_model: CostPoints) -> CostPoints:
        """Seconds by the caller's work, for a variant that takes so many by the model's own."""
        if not of_model:
            return ()
        table, points = CostTable(of_model), dict[float, float]()
        for one in self._costs:
            points[one.units] = max(one.seconds + table.seconds_for(one.model_units), points.get(one.units, 0.0))
        return tuple(sorted(points.items()))

    async def before(self, inputs: Arrays, deadline: float) -> PreparedRequest:
        """The model's inputs for a caller's.

        Raises:
            InvalidRequest: a step cannot do this request.
            Overloaded: too many requests are inside.
            DeadlineExceeded: its time ran out.
            Unreachable: there is no process, or it died or hung during this call.
            InternalError: a step's defect.
        """
        if self._inside >= self.manifest.batching.max_queue_size:
            raise Overloaded(
                f"{self._inside} requests wait for the steps of {self.name!r}", retry_after_s=_RETRY_AFTER_S
            )
        found, took_s = await self._run("before", inputs, deadline)
        kept = self._plans["before"].kept
        model = [spec.name for spec in self._artefacts.inputs]
        return PreparedRequest({name: found[name] for name in model}, {name: found[name] for name in kept}, took_s)

    async def after(self, outputs: Arrays, kept: Arrays, deadline: float) -> tuple[dict[str, NDArray[Any]], float]:
        """A caller's outputs for the model's, and the seconds that it took. Raises as `before`, but Overloaded."""
        known = [spec.name for spec in self._artefacts.outputs]
        return await self._run("after", {**{name: outputs[name] for name in known}, **kept}, deadline)

    async def _run(self, part: Part, inputs: Arrays, deadline: float) -> tuple[dict[str, NDArray[Any]], float]:
        incarnation = self._supervised.current
        worker = incarnation.worker if incarnation is not None and incarnation.serving else None
        if worker is None or not worker.alive:
            state = "without a process" if self.state == "ready" else self.state  # it has just died
            raise Unreachable(f"the steps of model {self.name!r} are {state} here")
        self._inside += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - clock.now())):
                done = await worker.infer(part, inputs, budget_s=deadline - clock.now())
        except TimeoutError as error:
            raise DeadlineExceeded(f"ran out of time {part} the model") from error
        except WorkerDied as error:
            raise Unreachable(f"the steps of model {self.name!r}: {error.message}") from error
        finally:
            self._inside -= 1
        return done.outputs, done.compute_s

    # what the supervised worker needs of its owner (`tidegate.workers.supervised.WorkerOwner`)

    async def prepare(self, worker: DeviceWorker) -> float:
        began_at = clock.now()
        for part, plan in self._plans.items():
            await worker.load_steps(EngineSpec(part, None, Path(plan.folder), (), steps=plan))
        loaded_s = clock.now() - began_at
        if not self._costs:
            self._supervised.become("warming")
            self._costs = [await self._measured(worker, lengths) for lengths in sizes(self.manifest, self._variant)]
        return loaded_s

    async def _measured(self, worker: DeviceWorker, lengths: dict[str, int]) -> _StepCost:
        """The fastest of some runs, as the parent sees them; the first one is not timed."""
        inputs = example_arrays(self.manifest, lengths)
        found = (await worker.infer("before", inputs)).outputs
        work = work_of_arrays(self._artefacts, found)
        outputs = await self._compute({spec.name: found[spec.name] for spec in self._artefacts.inputs}, work)
        behind = {**outputs, **{name: found[name] for name in self._plans["before"].kept}}
        await worker.infer("after", behind)
        taken = [
            await _timed_s(worker, "before", inputs) + await _timed_s(worker, "after", behind) for _ in range(_REPEATS)
        ]
        return _StepCost(work_of_arrays(self.manifest, inputs).units, work.units, min(taken))

    async def end_of(self, worker: DeviceWorker) -> str:
        return await worker.end()

    def serve(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Nothing: `before` and `after` use the incarnation that serves."""

    def back(self, incarnation: Incarnation[DeviceWorker]) -> None:
        log.info("steps' worker back", worker=incarnation.name)

    def successor_lost(self, incarnation: Incarnation[DeviceWorker], successor: Incarnation[DeviceWorker]) -> None:
        """Nothing: none is replaced while it is well."""

    def ending(self, incarnation: Incarnation[DeviceWorker]) -> None:
        self.lost_workers.lost(incarnation.reason, clock.now())
        self._supervised.become("loading")

    def lost(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Nothing: its calls have failed by then."""

    def restarting(self, incarnation: Incarnation[DeviceWorker], delay_s: float) -> None:
        words = {"worker": incarnation.name, "reason": incarnation.reason, "restart_in_s": round(delay_s, 3)}
        log.warning("steps' worker lost", **words, state=self.state)

    async def retire(self, incarnation: Incarnation[DeviceWorker]) -> None:
        """Nothing: none is replaced while it is well."""

    def changed(self) -> None:
        self._on_change()

    @asynccontextmanager
    async def _started(self, name: str) -> AsyncIterator[DeviceWorker]:
        async with self._start_process(name) as process:
            yield DeviceWorker(process, device="cpu", threads=1, hang_timeout_s=self._hang_timeout_s)

    def __repr__(self) -> str:
        return f"<StepsWorker of {self.name} {self.state}, {self._inside} inside>"


_PARTS: Final[tuple[Part, ...]] = ("before", "after")


def _plan(manifest: Manifest, folder: Path, limits: WasmLimits, part: Part) -> StepPlan:
    plan = plan_of(manifest, str(folder), limits, part)
    if plan is None:
        raise ValueError(f"model {manifest.name!r} has no pipeline")
    return plan


async def _timed_s(worker: DeviceWorker, part: Part, inputs: Arrays) -> float:
    began_at = clock.now()
    await worker.infer(part, inputs)
    return clock.now() - began_at
