"""The scheduler owns the callers' futures, feeds the workers batch after batch, and gives each caller its answer.

All decisions are the batchers' (`cloud_pool/core/batching/batcher.py`), one for each model instance, which is a model
variant on this pool's devices. The scheduler performs them: it wakes at the instants that the batchers name, gives each
free worker the next batch, and settles its members. `device_arbiter.py` decides which model instance goes next, and how
large a batch the device has memory for; `pending.py` holds the waiting parts, and `retries.py` requeues the members of
a failed batch.

Workers are alike, and pull: a free worker takes what is due now, so a slow one takes less by itself and no request is
stuck behind a worker. Where models come and go, a worker holds one of them (`attach`), and of the workers at one place
the one whose queue is next begins (`worker_slots.py`). A request that is bound to a worker (`PoolRequest.worker`) waits
in that worker's own queue.

Invariants:
* A caller is answered exactly once. Futures are made, set and dropped here alone, and never set after their caller
  has left. A leaving caller frees its places in the queue in the same instant, and disturbs no batch-mate.
* One batch runs at a time on each worker, so that a request that arrives while all run may still join the next one. A
  second batch is sent ahead only for the last moment before, and where more requests wait than it holds
  (`worker_slots.py`).
* A batch that fails does not fail all of its members: they are tried again in smaller groups
  (`cloud_pool/core/batching/isolation.py`), so that only a bad one fails in the end. A member of a batch whose worker
  died is tried once more, wherever there is room. Other workers' batches go on. A batch that had no memory is halved
  too; a request that has none alone is tried twice.
* A batch that takes far longer than any like it is stuck, and its worker is given up
  (`cloud_pool/core/health/watchdog.py`).
* While no worker holds a model, its requests whose budget will not last until one should be back are refused at once,
  as a fault of this pool, so that another target may answer; the others wait. A request that was bound to a worker that
  is gone is refused.
* A request larger than a batch runs in parts, on any workers, and is answered when the last of them is done. One whose
  parts cannot be joined fails, and nothing else with it.

`submit` costs its batcher's `add` and a future; its cost grows only with the logarithm of the number of waiting
requests.

Source: docs/design/batching.md, "Scheduler invariants", the list of what has gone wrong in others' batchers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple, Self

import structlog

from cloud_pool.core.batching.grouping import padded_shape
from cloud_pool.core.batching.model_instance import ModelInstance, RequestSlice
from cloud_pool.core.batching.padding import WrongResults
from cloud_pool.core.batching.queue_item import QueueItem
from cloud_pool.core.health.standby import Standby
from cloud_pool.core.health.watchdog import batch_patience_s
from cloud_pool.scheduling.batch_counts import BatchCounts
from cloud_pool.scheduling.device_arbiter import DeviceArbiter
from cloud_pool.scheduling.job import Batch, InstanceQueue, Job, JobPart, PoolRequest, PoolResult
from cloud_pool.scheduling.pending import PendingParts
from cloud_pool.scheduling.queues import InstanceQueues
from cloud_pool.scheduling.retries import BatchRetries
from cloud_pool.scheduling.worker_slots import Compute, WorkerSlot, WorkerSlots
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, InternalError, OutOfMemory, Overloaded, ServeError, Unreachable
from tidegate.priority import level_of
from tidegate.trace_context import Trace
from tidegate.types import Accepted
from tidegate.workers.process import ComputeResult, WorkerDied

_AGAIN_S: Final = 1.0  # after a defect the next dispatch is no later than this
_RESOLUTION_S: Final = 0.001  # resolution of uvloop's timers
_RECENT: Final = 4096  # newest answers whose times are kept
log = structlog.get_logger("scheduler")


class AnsweredJob(NamedTuple):
    """Seconds from arrival to answer of one request, and those that its model has as its target."""

    took_s: float
    target_s: float


class PoolScheduler:
    """Runs inside `async with`. Give it model instances with `open` and workers with `attach`; then `submit`.

    Args:
        on_traced: called with each batch that has sampled members, and the name of the worker that computed it.
    """

    def __init__(
        self,
        standby: Standby | None = None,
        allotment: DeviceArbiter | None = None,
        *,
        on_traced: Callable[[Batch, list[Trace], str], None] = lambda _batch, _members, _worker: None,
    ) -> None:
        self.seats = WorkerSlots(standby)
        self.refused = 0  # since the start, for a full queue or a wait that was too long
        self.demoted = Counter[tuple[str, str, str]]()  # requests by lane, by the level asked for, by the level given
        self.answered: deque[AnsweredJob] = deque(maxlen=_RECENT)
        self.queues = InstanceQueues()
        self.batches = BatchCounts()
        self._on_traced = on_traced
        self.allotment = allotment or DeviceArbiter()
        self._waiting = PendingParts(self.seats)
        self._retries = BatchRetries(self._waiting)
        self._jobs: set[Job] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: asyncio.Handle | None = None  # the next dispatch
        self._runs: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.look()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        if self._runs:
            await asyncio.wait(list(self._runs))

    def close(self) -> None:
        """Stop for good: every waiting request is answered now. Call it before the workers end, to end quietly."""
        self._closed = True
        for handle in (self._timer, self._due):
            if handle is not None:
                handle.cancel()
        for task in self._runs:
            task.cancel()
        for job in list(self._jobs):
            self._waiting.fail(job, Unreachable("the pool is shutting down"))

    def open(self, lane: ModelInstance) -> None:
        """Take requests for a model instance from now on."""
        self.queues.open(lane)

    def shut(self, key: str, error: ServeError) -> None:
        """Take no more requests for a model instance: those that wait end with the error."""
        self._waiting.fail_items(self.queues.close(key), error)
        self.seats.forget(key)

    def attach(
        self,
        worker: str,
        compute: Compute,
        *,
        restart_s: float,
        standby: bool = False,
        lanes: frozenset[str] | None = None,
        place: str = "",
    ) -> None:
        """Add a worker that is ready.

        Args:
            worker: the name of this incarnation, which is never used again.
            restart_s: predicted seconds until a successor would be ready.
            standby: whether the worker is a reserve (`cloud_pool/core/health/standby.py`).
            lanes: the keys of the model instances that it holds; None: of all that have no workers of their own.
            place: where it computes; of the workers at one place, one computes at a time. "": a place of its own.
        """
        if worker not in self.seats:
            self.seats.add(
                worker, compute, restart_s=restart_s, standby=standby, now=clock.now(), lanes=lanes, place=place
            )
            self.look()

    def detach(self, worker: str, reason: str) -> None:
        """Remove a worker: refuse requests bound to it and, if none is left, those that cannot wait for the next."""
        if not self.seats.remove(worker, reason, clock.now()):
            return
        self.allotment.leave(worker)
        self.look()  # others may have the memory that it held, and a reserve its part
        self._waiting.fail_items(self.queues.drop(worker), WorkerDied(reason))
        if not self.seats or self.seats.partial:
            self._waiting.fail_hopeless(WorkerDied(reason))

    def absent_for(self, lanes: frozenset[str] | None, wait_s: float, reason: str) -> None:
        """Note when the successor of a lost worker should be there, and refuse at once what cannot wait for it.

        Args:
            lanes: as of `attach`.
        """
        self.seats.absent_until(lanes, clock.now() + wait_s)
        if not self.seats or self.seats.partial:
            self._waiting.fail_hopeless(WorkerDied(reason))

    async def retire(self, worker: str) -> None:
        """Give a worker no more batches, and wait until it has finished the ones it has; `detach` it then."""
        if (slot := self.seats.get(worker)) is not None:
            slot.retiring = True
            if slot.running is not None:
                await slot.vacated.wait()

    async def submit(self, key: str, ask: PoolRequest) -> PoolResult:
        """Queue a request for the model instance `key` and wait for its answer. Cancelling leaves the queue at once.

        Raises:
            Overloaded, DeadlineExceeded: as `Batcher.add` says, or later when the time has run out.
            OutOfMemory: there will never be memory for it here, by prediction, or there was none when it was tried.
            WorkerDied: there is no worker, and no time to wait for one; or it died under this request twice; or the
                worker that the request is bound to is gone.
            InternalError: the engine failed on this request.
        """
        if self._closed or key not in self.queues:
            raise Unreachable("the pool is shutting down" if self._closed else f"{key} is not loaded yet")
        try:
            job = self._enqueue(self._queue_for(key, ask.worker), ask)
        except Overloaded:
            self.refused += 1
            raise
        try:
            self._accept(job)
            return await job.answer
        finally:
            self._forget(job)

    def look(self) -> None:
        """Dispatch in the next turn of the loop: what has changed until then is seen in one look.

        Call it after a limit has changed, which no request and no end of a batch would trigger.
        """
        if self._due is None and self._loop is not None and not self._closed:
            self._due = self._loop.call_soon(self._look)

    async def drained(self) -> None:
        """Wait until no request waits and no batch runs."""
        answers = [job.answer for job in self._jobs]
        if answers:
            await asyncio.wait(answers)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def unsettled(self) -> int:
        """Jobs without an answer, and tasks of batches that have not ended."""
        return len(self._jobs) + len(self._runs)

    @property
    def in_flight(self) -> int:
        return self.seats.in_flight

    def queue_delay_s(self, now: float) -> float:
        """Predicted wait of a request that arrives now with the default priority and a late deadline."""
        busy_s, width = self.seats.outlook(now)
        return busy_s + self.queues.drain_s() / width

    def __repr__(self) -> str:
        return f"<PoolScheduler {self.seats!r}, {self.queued} waiting, {self.in_flight} in flight>"

    # In: requests become parts in a batcher's queue.

    def _queue_for(self, key: str, worker: str | None) -> InstanceQueue:
        """Raises WorkerDied where `worker` is not there."""
        if worker is not None and worker not in self.seats:
            raise WorkerDied(f"worker {worker} is gone")
        return self.queues.of(key, worker)

    def _enqueue(self, queue: InstanceQueue, ask: PoolRequest) -> Job:
        job, lane = Job(queue, ask, asyncio.get_running_loop().create_future()), queue.lane
        most_units = self.allotment.most_units(lane)
        pieces = lane.pieces(ask.arrays, ask.units, most_units)
        if (units := max([piece.shape.units for piece in pieces])) > most_units:
            self.allotment.check(lane, units)
        job.parts = [JobPart(job, piece, self._queued(piece, ask)) for piece in pieces]
        if (not self.seats or self.seats.partial) and any(self._waiting.is_hopeless(part) for part in job.parts):
            raise WorkerDied(self._waiting.absence_of(job))
        now = clock.now()
        lane.service.relax(now)
        self._waiting.enter(job, now)
        if (level := level_of(job.parts[0].queued.priority)) != level_of(ask.priority):
            self.demoted[lane.key, str(level_of(ask.priority)), str(level)] += 1
        self._jobs.add(job)
        self._wake(now, first=len(self._waiting) == len(job.parts))
        return job

    def _queued(self, piece: RequestSlice, ask: PoolRequest) -> QueueItem:
        return QueueItem(
            self._waiting.next_number(), ask.arrived_at, ask.deadline, piece.shape, piece.kind, ask.priority
        )

    def _accept(self, job: Job) -> None:
        if job.ask.on_accepted is None:
            return
        key, now = job.parts[0].queued.key, clock.now()
        count, ahead_s = self.queues.ahead(key)
        busy_s, width = self.seats.outlook(now)
        own_s = sum([job.lane.alone_s(part.piece.shape) for part in job.parts])
        work_s = ahead_s / width + own_s / min(width, len(job.parts))
        job.ask.on_accepted(Accepted(self.in_flight + count, busy_s + work_s))

    def _forget(self, job: Job) -> None:
        """Forget a job whose caller has its answer or has left. Its part in a running batch is ignored at the end."""
        self._jobs.discard(job)
        answer = job.answer
        if not answer.done() or answer.cancelled() or answer.exception() is not None:  # else no part of it is left
            self._waiting.withdraw(job)
            # The exception was seen above, even when its caller was cancelled in the moment in which it was set.
            answer.cancel()
        job.parts = []  # no cycle keeps its arrays longer than it lives

    # Around: a batch for each free worker, and a timer for requests whose time runs out meanwhile.

    def _look(self) -> None:
        self._due = None
        self.dispatch()

    def dispatch(self) -> None:
        """Give every free worker what is due now, and prepare the next batches where possible. Never raises."""
        try:
            self._give_out(clock.now())
        except Exception:  # a defect, say in a policy, must not end the service of all other requests
            log.exception("the next batches could not be formed")
            self._arm_at(clock.now() + _AGAIN_S, clock.now())  # or no caller would hear when its time has run out

    def _give_out(self, now: float) -> None:
        if not self._waiting and self.seats.standby is None:
            return  # as after most batches of a quiet hour
        self._expire(now)
        self.queues.shared_by(self.seats.width)
        for slot in self._in_turn(self.seats.free(now, lambda: self.queue_delay_s(now))):
            # checked for each: some may have nothing to do, and leave it to the next
            if self.seats.has_room and not self.seats.is_taken(slot):
                self._feed(slot, now)
        for slot in self.seats.preparable(now):
            self._feed(slot, now, early=True)
        self._arm(now, worker_free=self.seats.any_free())

    def _feed(self, slot: WorkerSlot, now: float, *, early: bool = False) -> None:
        """Send a worker the next batch, if there is one, and memory for it."""
        batch = self._next_batch(slot, now, early=early)
        if batch is None:
            return
        with self._waiting.assert_none_lost(batch.parts):
            patience = batch_patience_s(batch.lane.service, batch.shape) + slot.patience_left_s(now)
            batch.stuck_at = now + patience
            if slot.running is None:  # a prepared batch waits for the one that runs, not for the scheduler
                due_at = max(batch.parts[0].job.queue.batcher.due_at, slot.free_since, slot.rests_until)
                self.batches.dispatched(batch, max(0.0, now - due_at))
            slot.give(batch, now)
        batch.run = asyncio.create_task(self._run(slot, batch, patience), name=f"batch on {slot.name}")
        self._runs.add(batch.run)
        batch.run.add_done_callback(lambda run: self._left(slot, batch, run))

    def _in_turn(self, slots: list[WorkerSlot]) -> list[WorkerSlot]:
        """Workers that hold some models only, in the turn of these; those with nothing to do are left out."""
        if not self.seats.partial:
            return slots
        due = [queue.lane.key for queue in self.allotment.in_turn(self.queues, "")]
        turns = [(next((turn for turn, key in enumerate(due) if slot.takes(key)), None), slot) for slot in slots]
        return [slot for turn, slot in sorted([(t, s) for t, s in turns if t is not None], key=lambda one: one[0])]

    def _queues_of(self, slot: WorkerSlot, *, early: bool) -> list[InstanceQueue]:
        """The queues that a worker may feed from, in the order of turns."""
        queues = self.allotment.in_turn(self.queues, slot.name)
        if not self.seats.partial:
            return queues
        if early and queues and not slot.takes(queues[0].lane.key):
            return []  # another worker at its place is next
        return [queue for queue in queues if slot.takes(queue.lane.key)]

    def _next_batch(self, slot: WorkerSlot, now: float, *, early: bool) -> Batch | None:
        for queue in self._queues_of(slot, early=early):
            batch = self._release(queue, now, early=early)
            if batch is None and early:
                return None  # this queue is next, and no other batch may be formed before its own
            if batch is None:
                continue
            with self._waiting.assert_none_lost(batch.parts):
                if self.allotment.begin(slot.name, batch):
                    return batch
                self._retries.put_back(batch)
            if self.allotment.must_wait_for(queue):
                return None
        return None

    def _release(self, queue: InstanceQueue, now: float, *, early: bool) -> Batch | None:
        parts = self._waiting.leave(queue.batcher.release(now, early=early))
        with self._waiting.assert_none_lost(parts):
            shape = padded_shape([part.piece.shape for part in parts]) if parts else None
            return Batch(queue.lane, parts, shape, queue.batcher.closed_by) if shape else None

    def _expire(self, now: float) -> None:
        for queue in self.queues:
            for item in queue.batcher.expire(now):
                if part := self._waiting.get(item):  # absent if another part of its job expired just now
                    self.refused += 1
                    waited_ms = (now - part.job.ask.arrived_at) * 1e3
                    late = DeadlineExceeded(f"no time is left for it after {waited_ms:.0f} ms here")
                    self._waiting.fail(part.job, late)

    def _wake(self, now: float, *, first: bool = True) -> None:
        """Args: first: whether nothing waited before: then the timer is not yet set for the workers' next instant."""
        self.look()
        if self.seats.any_free():
            return  # `dispatch` is about to arm the timer
        if first:
            self._arm(now, worker_free=False)
        else:
            self._arm_at(self.queues.next_wake(now, worker_free=False), now)

    def _arm(self, now: float, *, worker_free: bool) -> None:
        """Arm the timer; an earlier one is left alone, as it only arms again, which costs less than one a request."""
        if self.seats.partial:
            wake_at = self.queues.next_wake(now, worker_free=worker_free, free_for=self.seats.free_for)
        else:
            wake_at = self.queues.next_wake(now, worker_free=worker_free)
        if self._waiting:
            wake_at = min(wake_at, self.seats.next_at(now))
        self._arm_at(wake_at, now)

    def _arm_at(self, wake_at: float, now: float) -> None:
        """Arm the timer, at least one resolution ahead: a loop may run a timer early, and a shorter rest would spin."""
        wake_at = max(wake_at, now + _RESOLUTION_S)
        if wake_at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at, self._timer = wake_at, asyncio.get_running_loop().call_at(wake_at, self._tick)

    def _tick(self) -> None:
        # A loop's timers may come a rounding error early, and would come again and again until the clock gets there.
        now, self._timer, self._timer_at = max(clock.now(), self._timer_at), None, inf
        self._expire(now)
        self._wake(now)

    # Out: a batch's results, or its failure, to each of its members.

    async def _run(self, slot: WorkerSlot, batch: Batch, patience: float) -> None:
        seen = False  # whether the next batch was looked for after the end of this one
        try:
            computed = await slot.compute(batch.lane.key, batch.arrays(), patience)
            self._record(slot, batch, computed)
            self.dispatch()  # the worker first, then the callers: it idles meanwhile
            self._settle(slot, batch, computed)
            seen = True
        except ServeError as error:
            self._failed(slot, batch, error)
        except WrongResults as error:
            self._failed(slot, batch, InternalError(f"{batch.lane.key}: {error}"))
        except Exception as error:  # a defect must not stop the queue: its members fail, the others go on
            log.exception("a batch could not be run", lane=batch.lane.key, rows=batch.rows)
            self._waiting.fail_all(batch.parts, InternalError(f"{batch.lane.key}: {type(error).__name__}: {error}"))
        finally:
            self._over(slot, batch, seen=seen)

    def _left(self, slot: WorkerSlot, batch: Batch, run: asyncio.Task[None]) -> None:
        """End the batch of a task that was cancelled before its first step, as no `finally` of the task runs then."""
        self._runs.discard(run)
        if batch.run is not None:
            self._over(slot, batch, seen=False)

    def _over(self, slot: WorkerSlot, batch: Batch, *, seen: bool) -> None:
        self._end(slot, batch)
        batch.close()
        if not seen:
            self.look()

    def _end(self, slot: WorkerSlot, batch: Batch) -> None:
        now = clock.now()
        self.allotment.end(batch, now)
        slot.end(batch, now)

    def _record(self, slot: WorkerSlot, batch: Batch, computed: ComputeResult) -> None:
        now = clock.now()
        batch.lane.service.record(batch.shape.units, batch.shape.length, now - batch.began_at)
        batch.parts[0].job.queue.batcher.took(now - batch.began_at)
        self.batches.took(batch)
        if members := batch.traces():
            self._on_traced(batch, members, slot.name)
        batch.lane.count(batch.rows, computed.compute_s, utc_s=clock.utc_s())
        slot.saw(batch, now)
        self.allotment.passed(batch, computed.peak_bytes)
        self._end(slot, batch)

    def _settle(self, slot: WorkerSlot, batch: Batch, computed: ComputeResult) -> None:
        rows = batch.rows
        for part, outputs in batch.split(computed.outputs):
            part.outputs, part.compute_s = outputs, computed.compute_s
            self._settle_job(part.job, rows, slot.name)

    def _settle_job(self, job: Job, batch_rows: int, worker: str) -> None:
        parts = job.parts
        done = [part.outputs for part in parts if part.outputs is not None]
        if len(done) < len(parts) or job.answer.done():
            return
        try:
            outputs = job.lane.layout.join_rows(done)
        except WrongResults as error:  # of this request alone: its batch-mates have their rows
            most = job.lane.manifest.batching.max_batch_size
            fewer = f"send no more than {most} rows at once (max_batch_size)"
            self._waiting.fail(job, InternalError(f"{job.lane.key}: {error}; {fewer}"))
            return
        self.answered.append(AnsweredJob(clock.now() - job.ask.arrived_at, job.lane.latency_target_s))
        queue_s = max(0.0, min([part.began_at for part in parts]) - job.ask.arrived_at)
        batch_wait_s = min(queue_s, max(0.0, min([part.batch_wait_s for part in parts])))
        compute_s = sum([part.compute_s for part in parts])
        job.answer.set_result(PoolResult(outputs, queue_s, compute_s, batch_rows, worker, batch_wait_s))

    def _failed(self, slot: WorkerSlot, batch: Batch, error: ServeError) -> None:
        if isinstance(error, OutOfMemory):
            error = self.allotment.failed(batch, error)
        if isinstance(error, WorkerDied):
            self.detach(slot.name, error.message)
        self._retries.retry(batch, error)
