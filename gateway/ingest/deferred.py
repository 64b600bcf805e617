"""The deferred worker computes deferred requests by normal placement, after live requests, with a better variant.

A deferred request is not urgent, and its caller was promised an answer. So it goes through admission at the lowest
priority, a few at a time, with a budget of its own, and to a variant that is better than the unsure one. While no
target can answer (none is up, none has room, all are late) it is tried again, at growing intervals, for a day; an error
that the request itself caused is reported at once. That its model is unknown is such an error only when the gateway has
run and had the request for UNKNOWN_S: after a start it learns of shipped versions, and of other servers' models, later
than of its journal, and a version may reach a device before this gateway hears of it.

Callers' metrics do not count it, as it is no live traffic. Targets' estimates do, since its work is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Self

import structlog
from msgspec.structs import replace

from gateway.ingest.journal import DeferredJob
from gateway.ingest.receiver import Ingest
from tidegate import clock
from tidegate.fleet.stored import MAX_BODY_BYTES, MAX_WORDS, DeferredAnswer
from tidegate.generate.check import checked_generation
from tidegate.models.manifest import Manifest
from tidegate.oip.call import call_of
from tidegate.oip.grpc.codec import message_from_response, request_from_bytes
from tidegate.oip.reply import reply_parameters
from tidegate.oip.status import error_code, message_of
from tidegate.outcome import CallerError, Forbidden, ModelNotFound, ServeError, TooLarge
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.storage.database import DatabaseUnavailable
from tidegate.types import DEFERRED, Call, Reply

AT_ONCE: Final = 2
BUDGET_S: Final = 30.0
LOWEST_PRIORITY: Final = 4
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0
NO_ROOM_S: Final = 1.0
UNKNOWN_S: Final = 600.0
RETRY_S: Final = 5.0  # after a defect or a disk that fails

Service = Callable[[Call], Awaitable[Reply]]

log = structlog.get_logger(__name__)


class DeferredWorker:
    """Computes deferred requests inside `async with`.

    Args:
        infer: the service that answers calls.
        manifest_of: returns a manifest by name and version.
        may_ask: whether a device, by its name, may ask for a model.
    """

    def __init__(
        self,
        ingest: Ingest,
        infer: Service,
        manifest_of: Callable[[str, str], Manifest],
        may_ask: Callable[[str, str], bool],
    ) -> None:
        self._ingest = ingest
        self._infer = infer
        self._manifest_of = manifest_of
        self._may_ask = may_ask
        self._work: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._began_at = 0.0

    async def __aenter__(self) -> Self:
        self._began_at = clock.now()
        self._task = asyncio.create_task(self._run(), name="deferred requests")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await cancel_and_wait(self._task, *self._work.values())

    async def _run(self) -> None:
        while True:
            self._ingest.work.clear()
            try:
                wait_s = await self._begin()
            except DatabaseUnavailable:
                wait_s = RETRY_S  # the database has logged it
            except Exception:
                log.exception("computing deferred requests failed by a defect; they stay in the journal")
                wait_s = RETRY_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._ingest.work.wait()
            except TimeoutError:
                pass

    async def _begin(self) -> float | None:
        """Start due requests while there is room; return how long to wait for the next, None: until woken."""
        free = AT_ONCE - len(self._work)
        if free <= 0:
            return None
        jobs = await self._ingest.jobs(free, frozenset(self._work))
        for job in jobs:
            task = asyncio.create_task(self._compute(job), name=f"deferred {job.device}/{job.id}")
            self._work[job.seq] = task
            task.add_done_callback(partial(self._over, job.seq))
        if len(jobs) == free or self._work:
            return None
        due_in_s = await self._ingest.due_in_s()
        # What is due and was not given out waits for room in the journal: it is not started until it can be answered.
        return due_in_s or (None if due_in_s is None else NO_ROOM_S)

    def _over(self, seq: int, _task: asyncio.Task[None]) -> None:
        del self._work[seq]
        self._ingest.work.set()

    async def _compute(self, job: DeferredJob) -> None:
        try:
            await self._settle(job)
        except DatabaseUnavailable:
            await clock.sleep(RETRY_S)  # what became of it could not be stored: it is computed again
        except Exception:
            log.exception("a deferred request failed by a defect", device=job.device, id=job.id)
            await clock.sleep(RETRY_S)
            try:
                await self._ingest.postpone(job, LONGEST_WAIT_S)
            except Exception:  # it is due at once, but no sooner than after this rest
                log.exception("a deferred request cannot be postponed", device=job.device, id=job.id)

    async def _settle(self, job: DeferredJob) -> None:
        """Raises DatabaseUnavailable, and what is a defect."""
        try:
            call = self._call(job)
        except ServeError as error:
            is_early = min(clock.now() - self._began_at, self._ingest.age_s(job)) < UNKNOWN_S
            await self._failed(job, error, is_final=not (isinstance(error, ModelNotFound) and is_early))
            return
        try:
            reply = await self._infer(call)
            await self._answer(job, reply)
        except ServeError as error:
            await self._failed(job, error)

    def _call(self, job: DeferredJob) -> Call:
        now = clock.now()
        request = request_from_bytes(job.body)
        if not self._may_ask(job.device, request.model_name):
            asked = f"device {job.device!r} may not ask for model {request.model_name!r}"
            raise Forbidden(f"{asked} (key 'ingest.models' of the gateway)")
        manifest = self._manifest_of(request.model_name, request.model_version)
        if manifest.generative is not None:
            checked_generation(manifest.generative, request)  # as the servers of live callers do
        call = call_of(request, manifest, protocol=DEFERRED, headers={}, arrived_at=now)
        floor = max(call.min_quality, manifest.better_than(job.variant))
        # The tenant that the device's caller named is dropped: no credential has proved it.
        return replace(call.due(now + BUDGET_S), min_quality=floor, priority=LOWEST_PRIORITY, tenant="")

    async def _answer(self, job: DeferredJob, reply: Reply) -> None:
        body = message_from_response(reply.response, reply_parameters(reply)).SerializeToString()
        if len(body) > MAX_BODY_BYTES:
            why = f"the answer has {len(body)} bytes, at most {MAX_BODY_BYTES} can be sent; the gateway keeps it"
            await self._ingest.answered(
                job, DeferredAnswer(job.id, code=TooLarge.code, why=why), variant=reply.variant, whole=body
            )
        else:
            await self._ingest.answered(job, DeferredAnswer(job.id, body), variant=reply.variant, whole=body)

    async def _failed(self, job: DeferredJob, error: ServeError, *, is_final: bool = True) -> None:
        if isinstance(error, CallerError) and is_final:
            await self._ingest.answered(
                job, DeferredAnswer(job.id, code=error_code(error), why=message_of(error)[:MAX_WORDS])
            )
            return
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(job.attempts, 10))
        await self._ingest.postpone(job, max(wait_s, error.retry_after_s or 0.0))

    def __repr__(self) -> str:
        return f"<DeferredWorker {len(self._work)} under way>"
