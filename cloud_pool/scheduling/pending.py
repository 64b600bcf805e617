"""The pending parts map each waiting part's number to the part, until a batch takes it or its job fails.

The batchers hold what the decisions need, numbers and times; here are the parts that go with these numbers, so that a
batch, an error or a leaving caller finds them in one step. A part that leaves here leaves its queue in the same
instant.

While no worker holds its model, a part is hopeless if its budget will not last until a worker should be back
(`is_hopeless`): it is refused as a fault of this pool, so that another target may answer. A part that was bound to a
worker that is gone is refused with that reason.

Invariants: a part is here as long as its number is in its queue, and a job that has its answer has no part here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from cloud_pool.core.batching.batcher import EARLY_DROP_RATIO
from cloud_pool.core.batching.queue_item import QueueItem
from cloud_pool.scheduling.job import Job, JobPart
from cloud_pool.scheduling.worker_slots import WorkerSlots
from tidegate import clock
from tidegate.outcome import InternalError, ServeError, Unreachable
from tidegate.workers.process import WorkerDied


class PendingParts:
    """Mutable: `enter` and `readmit`; `leave` with a batch, `withdraw` or `fail` without one."""

    def __init__(self, slots: WorkerSlots) -> None:
        self._slots = slots
        self._parts: dict[int, JobPart] = {}
        self._numbers = itertools.count(1)

    def absence_of(self, job: Job) -> str:
        """The reason for which there is no worker for a job."""
        found = self._slots.absence_of(job.lane.key)
        return self._slots.absence if found is None else found[0]

    def next_number(self) -> int:
        """A number for a part or for a retried group, never given twice."""
        return next(self._numbers)

    def enter(self, job: Job, now: float) -> None:
        """Queue all parts of a job. Raises what `Batcher.add` raises; then none is queued."""
        queued = job.queue.batcher.add([part.queued for part in job.parts], now)
        for part, item in zip(job.parts, queued, strict=True):
            part.queued = item
        self._parts.update((part.queued.id, part) for part in job.parts)

    def readmit(self, part: JobPart) -> None:
        """Queue a part that was in a batch again, or fail its job with the reason why it cannot wait."""
        if part.job.answer.done():  # its caller has left, or another part of it was given up just now
            return
        if (worker := part.job.queue.worker) is not None and worker not in self._slots:
            self.fail(part.job, WorkerDied(f"worker {worker} is gone"))
            return
        if part.job.queue.closed:
            self.fail(part.job, Unreachable(f"{part.job.lane.key} is served no longer"))
            return
        try:
            part.job.queue.batcher.add([part.queued], clock.now(), readmit=True)
        except ServeError as error:
            self.fail(part.job, error)
        else:
            self._parts[part.queued.id] = part

    def leave(self, items: Sequence[QueueItem]) -> tuple[JobPart, ...]:
        """Take out the parts of the items that their batcher has released."""
        return tuple([self._parts.pop(item.id) for item in items])

    def get(self, item: QueueItem) -> JobPart | None:
        return self._parts.get(item.id)

    def is_hopeless(self, part: JobPart) -> bool:
        """Whether there is no worker, and none will be back in time for this part."""
        lane, queued = part.job.lane, part.queued
        absence = self._slots.absence_of(lane.key)
        return absence is not None and absence[1] + EARLY_DROP_RATIO * lane.alone_s(queued.shape) > queued.deadline

    def withdraw(self, job: Job) -> None:
        """Take a job's waiting parts out of the queue, and its prepared parts back from a worker if not begun."""
        waiting = [part.queued.id for part in job.parts if self._parts.pop(part.queued.id, None)]
        if waiting:
            job.queue.batcher.remove(waiting)
        for part in job.parts:
            if part.batch is not None and part.batch.is_for_nobody and part.batch.run is not None:
                part.batch.run.cancel()

    def fail(self, job: Job, error: ServeError) -> None:
        """Fail the caller's future, and withdraw the rest of its request."""
        if not job.answer.done():
            job.answer.set_exception(error)
        self.withdraw(job)

    def fail_all(self, parts: Iterable[JobPart], error: ServeError) -> None:
        for part in parts:
            self.fail(part.job, error)

    @contextmanager
    def assert_none_lost(self, parts: Sequence[JobPart]) -> Iterator[None]:
        """Fail parts that left a queue and reach no batch because of a defect, so that none is forgotten."""
        try:
            yield
        except Exception as error:
            self.fail_all(parts, InternalError(f"its batch could not be formed: {type(error).__name__}"))
            raise

    def fail_items(self, items: Iterable[QueueItem], error: ServeError) -> None:
        """Fail the jobs of items whose queue was dropped."""
        self.fail_all([part for item in items if (part := self._parts.get(item.id))], error)

    def fail_hopeless(self, error: ServeError) -> None:
        self.fail_all([part for part in self._parts.values() if self.is_hopeless(part)], error)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<PendingParts {len(self)} parts>"
