"""Batch retries requeue the members of a failed batch in smaller groups, so that only a bad member fails in the end.

`cloud_pool/core/batching/isolation.py` decides the groups, and when a member is given up. Members of a batch that had
only been prepared when its worker died go back as if they had not left: they are not suspected.

Invariants: each member of the batch waits again or its caller has its error; a member whose caller has left does
neither.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from msgspec.structs import replace

from cloud_pool.core.batching.isolation import MAX_DEATHS, MAX_STARVED, final_error, retry_groups
from cloud_pool.scheduling.job import Batch, JobPart
from cloud_pool.scheduling.pending import PendingParts
from tidegate.outcome import OutOfMemory, ServeError
from tidegate.workers.process import WorkerDied

log = structlog.get_logger("scheduler")


class BatchRetries:
    """Acts on each failed batch that it is given; holds no state of its own."""

    def __init__(self, waiting: PendingParts) -> None:
        self._waiting = waiting

    def retry(self, batch: Batch, error: ServeError) -> None:
        """Requeue the members whose callers still wait, in smaller groups; a member that failed alone is to blame.

        A dead worker must be detached before this call.
        """
        died, starved = isinstance(error, WorkerDied), isinstance(error, OutOfMemory)
        if died and not batch.has_begun:
            self.put_back(batch)
            return
        alone = starved and len(batch.parts) == 1
        groups = [
            [part for part in group if self._may_retry(part, died=died, starved_alone=alone)]
            for group in retry_groups(batch.parts, worker_died=died, starved=starved)
        ]
        again = {part.queued.id for group in groups for part in group}
        told = final_error(error, [part.deaths for part in batch.parts])
        self._waiting.fail_all([part for part in batch.parts if part.queued.id not in again], told)
        if again and not batch.is_search:
            words = {"lane": batch.lane.key, "members": len(batch.parts), "reason": error.message}
            log.warning("a batch failed; its members are tried in smaller ones", **words)
        for group in groups:
            self._requeue(group)

    def put_back(self, batch: Batch) -> None:
        """Requeue the members of a batch that had only been prepared: they wait as if they had not left."""
        for part in batch.parts:
            if self._waiting.is_hopeless(part):
                self._waiting.fail(part.job, WorkerDied(self._waiting.absence_of(part.job)))
            else:
                self._waiting.readmit(part)

    def _may_retry(self, part: JobPart, *, died: bool, starved_alone: bool) -> bool:
        part.deaths += died
        part.starved += starved_alone
        if part.job.answer.done() or part.deaths >= MAX_DEATHS or part.starved >= MAX_STARVED:
            return False
        return not (died and self._waiting.is_hopeless(part))

    def _requeue(self, group: Iterable[JobPart]) -> None:
        cohort = self._waiting.next_number()
        for part in group:
            part.queued = replace(part.queued, id=self._waiting.next_number(), cohort=cohort)
            self._waiting.readmit(part)

    def __repr__(self) -> str:
        return f"<BatchRetries into {self._waiting!r}>"
