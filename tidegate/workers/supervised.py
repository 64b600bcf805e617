"""A supervised worker: one worker process after another in the same place, each warm before it serves.

    loading → warming → ready → (it died or hung) → loading → …       after CRASH_LOOP deaths without health: bad
                          ↑  └─ (replaced) ─┐
                          └─────────────────┘

The first incarnation must succeed, unless others serve beside it: an artefact that does not load is a reason not to
start, told by name. A restart waits a full-jitter backoff, which is forgotten after HEALTHY_S of service; `bad` is
still tried.

A healthy worker can be replaced by a fresh one (`replace`) with no call refused for it: the old one ends what it
computes and gets nothing else. With `successor_first` the successor takes over when it is warm, and if it does not
come up, the old one stays. Otherwise the old one goes first.

What serving means is the owner's business (`WorkerOwner`): a pool attaches the worker to its scheduler, an edge
routes its calls there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tidegate import clock
from tidegate.fleet.offers import ModelState
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.workers.incarnation import WARMUP_TIMEOUT_S, Incarnation, StartWorker

CRASH_LOOP = 3
HEALTHY_S = 30.0

W = TypeVar("W")


class WorkerOwner(Protocol[W]):
    """What a supervised worker needs of its owner, and reports to it."""

    async def prepare(self, worker: W) -> float:
        """Load and warm everything; returns the seconds that a later incarnation should need for it."""
        ...

    async def end_of(self, worker: W) -> str:
        """Wait until the worker has died or is to be ended, and say why."""
        ...

    def serve(self, incarnation: Incarnation[W]) -> None:
        """Feed this incarnation, which is warm; also called again for one that stays."""
        ...

    def back(self, incarnation: Incarnation[W]) -> None:
        """Take note that this incarnation has taken the place of another."""
        ...

    def successor_lost(self, incarnation: Incarnation[W], successor: Incarnation[W]) -> None:
        """Take note that a successor did not come up, and this incarnation stays."""
        ...

    def ending(self, incarnation: Incarnation[W]) -> None:
        """Take note that the end has come; the process may still have to be reaped."""
        ...

    def lost(self, incarnation: Incarnation[W]) -> None:
        """Feed this incarnation no longer: it is over, for `reason`."""
        ...

    def restarting(self, incarnation: Incarnation[W], delay_s: float) -> None:
        """Take note that another one is started after this delay."""
        ...

    async def retire(self, incarnation: Incarnation[W]) -> None:
        """Let the incarnation end what it computes, and feed it no longer."""
        ...

    def changed(self) -> None:
        """Take note that `state` has changed."""
        ...


class SupervisedWorker(Generic[W]):
    """Mutable: `state`, and what `live` does. Does nothing until `live` runs.

    Args:
        owner: what the worker serves.
        start: makes a worker of a name; entered for each incarnation.
        name_of: the name of an incarnation, by its number from 1.
        cannot_start: begins the message of a StartError.
        prepare_within_s: how long an incarnation may load and warm.
    """

    def __init__(
        self,
        owner: WorkerOwner[W],
        *,
        start: StartWorker[W],
        name_of: Callable[[int], str],
        backoff: Backoff,
        cannot_start: str,
        prepare_within_s: float = WARMUP_TIMEOUT_S,
    ) -> None:
        self.state: ModelState = "loading"
        self.ready_once = asyncio.Event()
        self.tried_once = asyncio.Event()  # the first incarnation was ready, or was lost
        self.current: Incarnation[W] | None = None
        self.count = 0  # of incarnations
        self._owner = owner
        self._start = start
        self._name_of = name_of
        self._backoff = backoff
        self._cannot_start = cannot_start
        self._prepare_within_s = prepare_within_s
        self._incarnations: set[Incarnation[W]] = set()
        self._wish: asyncio.Future[bool] | None = None
        self._replaced: asyncio.Future[bool] | None = None
        self._must_start = True

    async def live(self, *, must_start: bool = True) -> None:
        """Run one incarnation after another, for ever. Raises StartError when the first one fails, if it must start."""
        self._must_start = must_start
        try:
            incarnation = await self._next()
            while True:
                self._serve(incarnation)
                incarnation = await self._until_next(incarnation)
        finally:
            self._settle_replacement(done=False)
            for one in self._incarnations:
                await one.end()

    async def replace(self, *, successor_first: bool) -> bool:
        """Replace the worker that serves by a fresh one, and wait for it; False if that did not come to be."""
        if self._wish is None or self._wish.done() or self.state != "ready":
            return False
        self._replaced = asyncio.get_running_loop().create_future()
        self._wish.set_result(successor_first)
        return await self._replaced

    def become(self, state: ModelState) -> None:
        """Change `state`. An owner says so when it begins to warm, or when an end should show at once."""
        if state != self.state:
            self.state = state
            self._owner.changed()

    def _begin(self) -> Incarnation[W]:
        self.count += 1
        incarnation = Incarnation[W](
            self._name_of(self.count),
            start=self._start,
            prepare=self._owner.prepare,
            end_of=self._owner.end_of,
            on_ending=lambda: self._owner.ending(incarnation),
            prepare_within_s=self._prepare_within_s,
        )
        self._incarnations.add(incarnation)
        incarnation.begin()
        return incarnation

    async def _next(self) -> Incarnation[W]:
        """An incarnation that is ready, after as many as it takes."""
        while True:
            incarnation = self._begin()
            if await incarnation.is_ready():
                return incarnation
            await incarnation.wait_over()  # raises a defect, which no restart mends
            await self._lost(incarnation)

    def _serve(self, incarnation: Incarnation[W]) -> None:
        self._owner.serve(incarnation)
        if self.current not in (None, incarnation):
            self._owner.back(incarnation)
        self.current, self._wish = incarnation, asyncio.get_running_loop().create_future()
        if incarnation.serving:  # else its end has come while a successor was tried
            self.become("ready")
        self.ready_once.set()
        self.tried_once.set()
        self._settle_replacement(done=True)

    async def _until_next(self, incarnation: Incarnation[W]) -> Incarnation[W]:
        """Wait for a reason for another incarnation than this one, and then until that is ready."""
        assert self._wish is not None
        over = asyncio.create_task(incarnation.wait_over(), name=f"worker {incarnation.name} is over")
        try:
            await asyncio.wait((over, self._wish), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
        finally:
            await cancel_and_wait(over)
        if not incarnation.over and self._wish.result():
            return await self._handed_over(incarnation)
        if not incarnation.over:
            await self._ended(incarnation)
            return await self._next()
        await self._lost(incarnation)
        return await self._next()

    async def _handed_over(self, incarnation: Incarnation[W]) -> Incarnation[W]:
        """Its successor, warm, with itself ended; or itself, if there came none."""
        fresh = self._begin()
        if await fresh.is_ready():
            self._owner.serve(fresh)
            await self._ended(incarnation)
            return fresh
        self._owner.successor_lost(incarnation, fresh)
        self._incarnations.discard(fresh)
        self._settle_replacement(done=False)
        return incarnation

    async def _ended(self, incarnation: Incarnation[W]) -> None:
        """End an incarnation that is replaced, once it has done what it had."""
        await self._owner.retire(incarnation)
        await incarnation.end()
        self._incarnations.discard(incarnation)

    async def _lost(self, incarnation: Incarnation[W]) -> None:
        """Report an incarnation that ended by itself, and wait for as long as the backoff says."""
        self._owner.lost(incarnation)
        self._incarnations.discard(incarnation)
        self._settle_replacement(done=False)
        self.tried_once.set()
        if self._must_start and not self.ready_once.is_set():
            raise StartError(f"{self._cannot_start}: {incarnation.reason}")
        delay_s = self._backoff.next_delay_after_s(incarnation.served_s, HEALTHY_S)
        self.become("bad" if self._backoff.failures >= CRASH_LOOP else "loading")
        self._owner.restarting(incarnation, delay_s)
        await clock.sleep(delay_s)

    def _settle_replacement(self, *, done: bool) -> None:
        if self._replaced is not None and not self._replaced.done():
            self._replaced.set_result(done)

    def __repr__(self) -> str:
        return f"<SupervisedWorker {self.state}, incarnation {self.count}>"
