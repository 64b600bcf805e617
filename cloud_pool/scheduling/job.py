"""A job is one caller's request in the pool, cut into parts that wait in a queue and leave it in batches.

    PoolRequest ─▶ Job ─▶ JobPart … ─▶ InstanceQueue ─▶ Batch ─▶ PoolResult

These classes hold the arrays, futures and callers that the pure core does not know; the scheduler acts on them. Those
of which each request has one are msgspec structs, as a dataclass takes several times as long to make.

`queues.py` decides which queue a job waits in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from cloud_pool.core.batching.batcher import Batcher
from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.model_instance import ModelInstance, RequestSlice
from cloud_pool.core.batching.padding import Arrays
from cloud_pool.core.batching.queue_item import QueueItem
from tidegate.trace_context import Trace
from tidegate.types import Accepted


class PoolRequest(msgspec.Struct, frozen=True, eq=False):
    """One checked request for one model instance. `units` is its work without padding; `deadline` is finite.

    `worker` names the only worker that may compute it; by default any may.
    """

    arrays: Arrays
    units: float
    arrived_at: float
    deadline: float
    priority: int = 0
    on_accepted: Callable[[Accepted], None] | None = None
    worker: str | None = None
    trace: Trace | None = None


class PoolResult(msgspec.Struct, frozen=True, eq=False):
    """Outputs and their timing; `batch_rows` and `worker` are of the batch that the last part was in."""

    outputs: dict[str, NDArray[Any]]
    queue_s: float
    compute_s: float
    batch_rows: int
    worker: str = ""
    batch_wait_s: float = 0.0  # part of `queue_s`: waiting for batch-mates while a worker was free


@dataclass(slots=True, eq=False)
class InstanceQueue:
    """The queue of one model instance, for any worker or for one."""

    lane: ModelInstance
    batcher: Batcher
    worker: str | None = None
    closed: bool = False  # nothing is taken, and what comes back from a batch has nobody to compute it


class Job(msgspec.Struct, eq=False):
    """A waiting caller's request."""

    queue: InstanceQueue
    ask: PoolRequest
    answer: asyncio.Future[PoolResult]
    parts: list[JobPart] = []

    @property
    def lane(self) -> ModelInstance:
        return self.queue.lane


class JobPart(msgspec.Struct, eq=False):
    """A part of a job in the queue or in a batch, with its results once they are there."""

    job: Job
    piece: RequestSlice
    queued: QueueItem
    deaths: int = 0  # workers that died while they computed a batch with this part
    starved: int = 0  # times that there was no memory for it alone
    began_at: float = 0.0
    batch_wait_s: float = 0.0  # time in the queue so far while a worker was free
    compute_s: float = 0.0
    outputs: dict[str, NDArray[Any]] | None = None
    batch: Batch | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """Parts that leave together. Its times are set when it begins; until then it is only prepared."""

    lane: ModelInstance
    parts: tuple[JobPart, ...]
    shape: WorkShape  # of all parts together, padding included
    closed_by: str = ""  # why it holds no more parts
    began_at: float = 0.0
    expected_end_at: float = 0.0
    stuck_at: float = 0.0  # from then on its worker counts as hung
    run: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            part.batch = self

    def traces(self) -> list[Trace]:
        """The traces of its sampled members."""
        asks = {id(part.job): part.job.ask for part in self.parts}
        return [ask.trace for ask in asks.values() if ask.trace is not None and ask.trace.kept]

    def close(self) -> None:
        """End the batch: its parts drop their reference to it, except parts that are in another batch by now."""
        self.run = None
        for part in self.parts:
            if part.batch is self:
                part.batch = None

    @property
    def units(self) -> float:
        """The batch's work, padding included."""
        return self.shape.units

    @property
    def own_units(self) -> float:
        """The work of the batch's parts, without padding."""
        return sum(part.piece.shape.units for part in self.parts)

    @property
    def takes_s(self) -> float:
        """Predicted seconds of the batch."""
        return self.lane.service.predict_s(self.shape.units, self.shape.length)

    def begin(self, now: float, free_since: float) -> None:
        """Args: free_since: since when the worker had nothing to do."""
        self.began_at, self.expected_end_at = now, now + self.takes_s
        for part in self.parts:
            part.began_at, part.batch_wait_s = now, now - max(free_since, part.job.ask.arrived_at)

    def arrays(self) -> Arrays:
        """The input arrays for the engine."""
        return self.lane.layout.stack([part.piece.arrays for part in self.parts])

    def split(self, outputs: Arrays) -> Iterable[tuple[JobPart, dict[str, NDArray[Any]]]]:
        """Each part with its own outputs. Raises WrongResults."""
        own = self.lane.layout.split(outputs, [part.piece.extent for part in self.parts])
        return zip(self.parts, own, strict=True)

    @property
    def is_for_nobody(self) -> bool:
        """Whether all callers have left and the batch has not begun, so that it need not run."""
        return not self.has_begun and all(part.job.answer.done() for part in self.parts)

    @property
    def has_begun(self) -> bool:
        return self.began_at > 0.0

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def is_search(self) -> bool:
        """Whether its members were in a batch that failed, which was logged then."""
        return self.parts[0].queued.cohort is not None
