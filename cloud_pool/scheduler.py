"""The scheduler: sole owner of the futures; it feeds one worker batch after batch and gives each caller its answer.

All decisions are the batchers' (`core/batching.py`), one for each lane, which is a model variant on this device. The
scheduler performs them: it keeps what the pure core must not know (arrays, futures, callers), wakes at the instants
that the batchers name, runs the chosen batch, and settles its members. With several lanes the one whose head is first
in order goes first.

Invariants:
* A caller is answered exactly once. Futures are made, set and dropped here alone, and never set after their caller
  has left. A caller who leaves frees its places in the queue in the same instant, and disturbs no batch-mate.
* One batch runs at a time, so that whoever comes while it runs still takes part in forming the next.
* A batch that fails does not fail all of its members: each is tried once more by itself, so that only a bad one fails
  twice. The same holds when the batch took its worker down with it.
* While there is no worker, those whose budget will not last until it should be back are refused at once, as a fault
  of ours that another target may mend; the others wait.
* A request larger than a batch runs in parts, and is answered when the last of them is done.

Source: `reference/batching.md` D.2, the list of what has gone wrong in others' batchers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import structlog
from numpy.typing import NDArray

from cloud_pool.core.batching import DOOM_RATIO, Queued
from cloud_pool.core.grouping import padded_units
from cloud_pool.core.lane import Lane, Piece
from cloud_pool.core.padding import Arrays, WrongResults
from tidegate import clock
from tidegate.oip.host import Tally
from tidegate.outcome import DeadlineExceeded, InternalError, ServeError, Unreachable
from tidegate.priority import order_key
from tidegate.types import Accepted
from tidegate.workers.process import Computed, WorkerDied

log = structlog.get_logger("scheduler")

Compute = Callable[[str, Arrays], Awaitable[Computed]]
_MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked request for one lane. `units` is its work without padding; `deadline` is a finite instant."""

    arrays: Arrays
    units: float
    arrived_at: float
    deadline: float
    priority: int = 0
    on_accepted: Callable[[Accepted], None] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs, and how they came to be; `batch_rows` is of the batch that the last part was in."""

    outputs: dict[str, NDArray[Any]]
    queue_s: float
    compute_s: float
    batch_rows: int


@dataclass(slots=True, eq=False)
class _Job:
    """A caller who waits."""

    lane: Lane
    ask: Ask
    answer: asyncio.Future[Answer]
    parts: list[_Part] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Part:
    """A piece of a job in the queue or in a batch, with its results once it has any."""

    job: _Job
    piece: Piece
    queued: Queued
    attempts: int = 0
    began_at: float = 0.0
    compute_s: float = 0.0
    outputs: dict[str, NDArray[Any]] | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    lane: Lane
    parts: tuple[_Part, ...]
    units: float  # padding included
    began_at: float
    expected_end_at: float

    @property
    def rows(self) -> int:
        return sum(part.piece.extent.rows for part in self.parts)


class Scheduler:
    """Runs inside `async with`. Give it lanes with `open` and a worker with `attach`; then `submit`."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._compute: Compute | None = None
        self._absence = "no worker has started yet"
        self._back_at = 0.0
        self._restart_s = 0.0
        self._waiting: dict[int, _Part] = {}
        self._jobs: set[_Job] = set()
        self._running: _Batch | None = None
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._server = asyncio.create_task(self._serve(), name="scheduler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._server is not None:
            await asyncio.wait([self._server])

    def close(self) -> None:
        """Stop for good: whoever still waits is answered now. Call it before the worker is ended, to end quietly."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.cancel()
        for job in list(self._jobs):
            self._fail(job, Unreachable("the pool is shutting down"))

    def open(self, lane: Lane) -> None:
        """Take requests for a lane from now on."""
        self._lanes[lane.key] = lane

    def attach(self, compute: Compute, *, restart_s: float) -> None:
        """A worker is there. `restart_s`: how long the next one would take to come back."""
        self._compute, self._restart_s = compute, restart_s
        self._changed.set()

    def detach(self, reason: str) -> None:
        """The worker is gone: refuse whoever cannot wait for the next one."""
        if self._compute is None:
            return
        self._compute, self._absence = None, reason
        self._back_at = clock.now() + self._restart_s
        for part in [part for part in self._waiting.values() if self._cannot_wait(part.job.lane, part.queued)]:
            self._fail(part.job, WorkerDied(reason))

    async def submit(self, key: str, ask: Ask) -> Answer:
        """Wait in the lane of `key` and be answered. Cancelling gives the place up at once.

        Raises:
            Overloaded, DeadlineExceeded: as `Batcher.add` says, or later when the time has run out.
            WorkerDied: there is no worker, and no time to wait for one; or it died under this request twice.
            InternalError: the engine failed on this request.
        """
        lane = self._lanes.get(key)
        if self._closed or lane is None:
            raise Unreachable("the pool is shutting down" if self._closed else f"{key} is not loaded yet")
        job = self._enqueue(lane, ask)
        try:
            self._accept(job)
            return await job.answer
        finally:
            self._forget(job)

    async def drained(self) -> None:
        """Wait until nobody waits and nothing runs."""
        answers = [job.answer for job in self._jobs]
        if answers:
            await asyncio.wait(answers)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._running.parts) if self._running else 0

    def queue_delay_s(self, now: float) -> float:
        """Predicted wait of a request that would come now with the default priority and a late deadline."""
        return self._busy_s(now) + sum(lane.batcher.drain_s() for lane in self._lanes.values())

    def __repr__(self) -> str:
        worker = "computing" if self._running else "idle" if self._compute else f"without a worker: {self._absence}"
        return f"<Scheduler {worker}, {self.queued} waiting, {self.in_flight} in flight>"

    # In: requests become parts in a batcher's queue.

    def _enqueue(self, lane: Lane, ask: Ask) -> _Job:
        job = _Job(lane, ask, asyncio.get_running_loop().create_future())
        job.parts = [_Part(job, piece, self._queued(piece, ask)) for piece in lane.pieces(ask.arrays, ask.units)]
        if self._compute is None and any(self._cannot_wait(lane, part.queued) for part in job.parts):
            raise WorkerDied(self._absence)
        now = clock.now()
        lane.service.relax(now)
        lane.batcher.add([part.queued for part in job.parts], now)
        self._jobs.add(job)
        self._waiting.update((part.queued.id, part) for part in job.parts)
        self._wake(now)
        return job

    def _queued(self, piece: Piece, ask: Ask) -> Queued:
        return Queued(next(self._numbers), ask.arrived_at, ask.deadline, piece.shape, piece.kind, ask.priority)

    def _accept(self, job: _Job) -> None:
        if job.ask.on_accepted is None:
            return
        key, now = order_key(job.ask.deadline, job.ask.priority), clock.now()
        ahead = [lane.batcher.ahead(key) for lane in self._lanes.values()]
        own_s = sum(job.lane.service.predict_s(part.piece.shape.units) for part in job.parts)
        finish_in_s = self._busy_s(now) + sum(seconds for _, seconds in ahead) + own_s
        job.ask.on_accepted(Accepted(self.in_flight + sum(count for count, _ in ahead), finish_in_s))

    def _forget(self, job: _Job) -> None:
        """The caller has its answer or has left. A part of it in the running batch is ignored when that ends."""
        self._jobs.discard(job)
        self._withdraw(job)
        if not job.answer.cancel() and not job.answer.cancelled():
            job.answer.exception()  # seen, even when its caller was cancelled in the moment in which it was set

    def _withdraw(self, job: _Job) -> None:
        waiting = [part.queued.id for part in job.parts if self._waiting.pop(part.queued.id, None)]
        if waiting:
            job.lane.batcher.remove(waiting)

    # Around: one batch after another, and a timer for those whose time runs out meanwhile.

    async def _serve(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                await self._run(batch)

    def _next_batch(self) -> _Batch | None:
        now = clock.now()
        self._expire(now)
        batch = None
        if self._compute is not None:
            batch = next((batch for lane in self._in_turn() if (batch := self._release(lane, now))), None)
        self._arm(now, worker_free=batch is None and self._compute is not None)
        return batch

    def _in_turn(self) -> list[Lane]:
        return sorted(self._lanes.values(), key=lambda lane: lane.batcher.head_key)

    def _release(self, lane: Lane, now: float) -> _Batch | None:
        parts = tuple(self._waiting.pop(item.id) for item in lane.batcher.release(now))
        if not parts:
            return None
        units = padded_units([part.piece.shape for part in parts])
        return _Batch(lane, parts, units, now, now + lane.service.predict_s(units))

    def _expire(self, now: float) -> None:
        for lane in self._lanes.values():
            for item in lane.batcher.expire(now):
                if part := self._waiting.pop(item.id, None):  # else another part of its job was found just now
                    waited_ms = (now - part.job.ask.arrived_at) * 1e3
                    self._fail(part.job, DeadlineExceeded(f"no time is left for it after {waited_ms:.0f} ms here"))

    def _wake(self, now: float) -> None:
        self._changed.set()
        if self._running is not None:  # else the server arms the timer as soon as it has looked
            self._arm(now, worker_free=False)

    def _arm(self, now: float, *, worker_free: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wakes = [lane.batcher.next_wake(now, worker_free=worker_free) for lane in self._lanes.values()]
        wake_at = min((wake for wake in wakes if wake is not None), default=None)
        self._timer = None if wake_at is None else asyncio.get_running_loop().call_at(wake_at, self._tick)

    def _tick(self) -> None:
        now = clock.now()
        self._expire(now)
        self._wake(now)

    # Out: a batch's results, or its failure, to each of its members.

    async def _run(self, batch: _Batch) -> None:
        assert self._compute is not None
        self._running = batch
        for part in batch.parts:
            part.attempts, part.began_at = part.attempts + 1, batch.began_at
        try:
            await self._compute_and_settle(batch, self._compute)
        except WorkerDied as error:
            self.detach(error.message)
            self._retry(batch, error)
        except ServeError as error:
            self._retry(batch, error)
        except WrongResults as error:
            self._retry(batch, InternalError(f"{batch.lane.key}: {error}"))
        except Exception as error:  # a defect of ours must not stop the queue: those it hit are told, the rest go on
            log.exception("a batch could not be run", lane=batch.lane.key, rows=batch.rows)
            self._fail_all(batch.parts, InternalError(f"{batch.lane.key}: {type(error).__name__}: {error}"))
        finally:
            self._running = None

    async def _compute_and_settle(self, batch: _Batch, compute: Compute) -> None:
        layout = batch.lane.layout
        computed = await compute(batch.lane.key, layout.stack([part.piece.arrays for part in batch.parts]))
        outputs = layout.split(computed.outputs, [part.piece.extent for part in batch.parts])
        batch.lane.service.record(batch.units, clock.now() - batch.began_at)
        _count_batch(batch, computed.compute_s)
        for part, own in zip(batch.parts, outputs, strict=True):
            part.outputs, part.compute_s = own, computed.compute_s
            self._settle(part.job, batch.rows)

    def _settle(self, job: _Job, batch_rows: int) -> None:
        done = [part.outputs for part in job.parts if part.outputs is not None]
        if len(done) < len(job.parts) or job.answer.done():
            return
        queue_s = max(0.0, job.parts[0].began_at - job.ask.arrived_at)
        compute_s = sum(part.compute_s for part in job.parts)
        job.answer.set_result(Answer(job.lane.layout.join_rows(done), queue_s, compute_s, batch_rows))

    def _retry(self, batch: _Batch, error: ServeError) -> None:
        """Give each member one more try by itself, unless it was by itself already or nobody waits for it any more."""
        again = [part for part in batch.parts if self._may_retry(part, batch, error)]
        self._fail_all([part for part in batch.parts if part not in again], error)
        if again:
            log.warning(
                "a batch failed; its members are tried one by one",
                lane=batch.lane.key, members=len(batch.parts), reason=error.message,
            )  # fmt: skip
        for part in again:
            self._requeue(part)

    def _may_retry(self, part: _Part, batch: _Batch, error: ServeError) -> bool:
        if part.attempts >= _MAX_ATTEMPTS or part.job.answer.done():
            return False
        if isinstance(error, WorkerDied):
            return not self._cannot_wait(batch.lane, part.queued)
        return len(batch.parts) > 1

    def _requeue(self, part: _Part) -> None:
        if part.job.answer.done():  # another part of it was given up just now
            return
        part.queued = replace(part.queued, id=next(self._numbers), alone=True)
        try:
            part.job.lane.batcher.add([part.queued], clock.now(), readmit=True)
        except ServeError as error:
            self._fail(part.job, error)
        else:
            self._waiting[part.queued.id] = part

    def _fail_all(self, parts: Iterable[_Part], error: ServeError) -> None:
        for part in parts:
            self._fail(part.job, error)

    def _fail(self, job: _Job, error: ServeError) -> None:
        """Tell the caller, and take what else of its request waits out of the queue before it costs anything."""
        if not job.answer.done():
            job.answer.set_exception(error)
        self._withdraw(job)

    # Predictions.

    def _busy_s(self, now: float) -> float:
        """Seconds until the worker should be free for the first in the queue."""
        if self._compute is None:
            return max(0.0, self._back_at - now)
        return max(0.0, self._running.expected_end_at - now) if self._running else 0.0

    def _cannot_wait(self, lane: Lane, queued: Queued) -> bool:
        return self._back_at + DOOM_RATIO * lane.service.predict_s(queued.shape.units) > queued.deadline


def _count_batch(batch: _Batch, compute_s: float) -> None:
    statistics = batch.lane.statistics
    statistics.execution_count += 1
    statistics.inference_count += batch.rows
    statistics.last_inference_ms = int(clock.utc_s() * 1e3)
    statistics.batches.setdefault(batch.rows, Tally()).add(compute_s)
