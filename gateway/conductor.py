"""Performs what `core/request.py` decides, with tasks, timers and targets.

One `_Flight` per request holds its machine and turns the machine's actions into IO: a launch awaits a target, a wake
is one loop timer, an end is a reply or an error. Every event goes back into the machine with its instant; nothing is
decided here.

The first attempt, and each fallback with nothing else under way, is awaited in the caller's own task: most requests
need no task of their own, and a task costs as much as the whole placement. Only a hedge beside a pending attempt gets
a task, owned by the conductor until it has ended. To end an attempt that is awaited inline (the deadline passed, or
the hedge won) the flight cancels its own task and takes that cancellation back, as `asyncio.timeout` does, so that a
caller's cancellation is never mistaken for its own.

When the caller is cancelled every attempt is cancelled with it, and with each the work in the far queue.
A target that raises anything but a ServeError has a defect: it is logged with its traceback, and the request goes on
elsewhere as after any failure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import NamedTuple

import structlog

from gateway.core.cost import CostClass, cost_class, unloaded_p95_s
from gateway.core.evidence import Attempt
from gateway.core.hedging import Hedges, LatestUseful
from gateway.core.placement import Ask, Decision, Placer, misfit
from gateway.core.request import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from gateway.upstream.target import Target
from tidegate import clock
from tidegate.models.manifest import Feature, Manifest
from tidegate.models.work import work_of
from tidegate.outcome import InternalError, ServeError, Unreachable
from tidegate.types import Accepted, Call, InferRequest, Reply, Route, Tensor

log = structlog.get_logger(__name__)
ManifestOf = Callable[[str, str], Manifest]


class Flown(NamedTuple):
    """One finished request, for `/debug/decisions`. Holds numbers only, no tensors."""

    request_id: str
    decision: Decision | None
    end: Answer | str  # or the error in words
    elapsed_s: float


class Description(NamedTuple):
    """A call's work in words, for the access log."""

    feature: Feature
    units: float
    cost_class: CostClass
    budget_s: float


class Conductor:
    """Answers calls by placing them on targets. `targets` may change at any time; attempts under way are left alone."""

    def __init__(
        self,
        placer: Placer,
        targets: Mapping[str, Target],
        manifest_of: ManifestOf,
        *,
        draw: Callable[[], float],
        remember: int = 256,
        hedges: Hedges | None = None,
    ) -> None:
        """Args: remember: how many finished requests `flown` keeps for explanations."""
        self.flown: deque[Flown] = deque(maxlen=remember)
        self.placer = placer
        self.hedges = hedges or LatestUseful()
        self.targets = targets
        self.draw = draw
        self._manifest_of = manifest_of
        self._keys = count()
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, call: Call) -> Awaitable[Reply]:
        """The answer, from wherever it was placed.

        Raises:
            ServeError: nobody could answer before the deadline; `call.deadline` must be set.
        """
        return _Flight(self, call, self.ask(call)).fly()

    def ask(self, call: Call) -> Ask:
        """The call as placement sees it."""
        request = call.request
        manifest = self._manifest_of(request.model_name, request.model_version)
        work = work_of(manifest, request)
        assert call.deadline is not None, "the expire layer sets a deadline"
        return Ask(
            manifest.name,
            manifest.version,
            work.units,
            work.rows,
            work.longest_row,
            call.deadline,
            call.variant,
            call.priority,
            _size_of(request.inputs),
        )

    def describe(self, call: Call) -> Description:
        """What the call costs, in words. Computed on demand: only an access log wants it."""
        manifest = self._manifest_of(call.request.model_name, call.request.model_version)
        budget_s = manifest.default_budget_s if call.deadline is None else call.deadline - call.arrived_at
        ask = self.ask(call.due(call.arrived_at + budget_s))
        edges = [
            unloaded_p95_s(offered.cost, ask.units, offered.target.link.rtt_s)
            for offered in self.placer.fleet.offered(ask.model, ask.version)
            if offered.target.spec.tier == "edge" and not misfit(offered.variant, ask)
        ]
        return Description(manifest.cost.feature, ask.units, cost_class(edges, budget_s), budget_s)

    def next_key(self) -> int:
        return next(self._keys)

    def spawn(self, attempt: asyncio.Task[None]) -> None:
        """Own a hedge's task until it has ended."""
        self._tasks.add(attempt)
        attempt.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for attempts that were cancelled but have not ended yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Conductor {len(self.targets)} targets, {len(self._tasks)} hedges under way>"


class _Flight:
    """One request under way."""

    __slots__ = (
        "_answer", "_attempts", "_base_cancelling", "_body_bytes", "_call", "_conductor", "_end", "_inline",
        "_interrupted", "_loop", "_machine", "_next", "_placed_at", "_request", "_started_at", "_task", "_tasks",
        "_timer", "_units", "_waiter",
    )  # fmt: skip

    def __init__(self, conductor: Conductor, call: Call, ask: Ask) -> None:
        request = call.request
        self._conductor = conductor
        self._call = call
        # The version is settled here: what "the latest" is may differ from target to target during a rollout.
        self._request: InferRequest = request if request.model_version else request.pinned(ask.version)
        self._units, self._body_bytes = ask.units, ask.body_bytes
        self._machine = RequestMachine(ask, conductor.placer, hedges=conductor.hedges)
        self._attempts: dict[int, Attempt] = {}  # under way, by number
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of those that have one
        self._next: Launch | None = None  # to be awaited inline
        self._inline: int | None = None  # being awaited inline
        self._interrupted = False  # we cancelled our own task to end the inline attempt
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._answer: tuple[Reply, float, float] | None = None  # the winner's, its link time, its instant
        self._end: Answer | Refuse | None = None

    async def fly(self) -> Reply:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._base_cancelling = task, task.cancelling()
        self._started_at = clock.now()
        try:
            actions = self._machine.arrived(self._started_at)
            self._placed_at = clock.now()
            self._perform(actions, self._placed_at)
            while self._end is None:
                await (self._wait() if self._next is None else self._attempt_inline(self._next))
        except BaseException:
            now = clock.now()
            self._perform(self._machine.cancelled(now), now)
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
        return self._land(self._end)

    # the machine's actions

    def _perform(self, actions: list[Action], now: float) -> None:
        for action in actions:
            kind = type(action)
            if kind is Launch:
                self._launch(action, now)  # type: ignore[arg-type]  # `kind` narrows it, and is twice as fast as match
            elif kind is WakeAt:
                self._wake_at(action.at)  # type: ignore[union-attr]
            elif kind is Cancel:
                self._cancel(action.attempt, now)  # type: ignore[union-attr]
            else:
                self._end = action  # type: ignore[assignment]
        if self._waiter is not None and not self._waiter.done() and (self._end or self._next):
            self._waiter.set_result(None)

    def _launch(self, launch: Launch, now: float) -> None:
        number = launch.attempt
        self._attempts[number] = Attempt(
            launch.candidate, self._conductor.next_key(), self._units, now, self._body_bytes
        )
        if self._inline is None and self._next is None:
            self._next = launch
            return
        task = self._loop.create_task(self._attempt(launch), name=f"hedge at {launch.candidate.target.id}")
        self._tasks[number] = task
        self._conductor.spawn(task)

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._ring)

    def _cancel(self, number: int, now: float) -> None:
        self._attempts.pop(number).cancelled(now)
        if self._next is not None and self._next.attempt == number:
            self._next = None
        elif number == self._inline:
            self._interrupted = True
            self._task.cancel()
        elif number in self._tasks:
            self._tasks[number].cancel()

    # what happens: each becomes an event of the machine

    def _ring(self) -> None:
        now = clock.now()
        self._perform(self._machine.timer(now), now)

    def _accepted(self, number: int, accepted: Accepted) -> None:
        now = clock.now()
        if (attempt := self._attempts.get(number)) is not None:
            attempt.accepted(now)
        self._perform(self._machine.accepted(number, accepted, now), now)

    def _answered(self, number: int, reply: Reply) -> None:
        attempt = self._over(number)
        if attempt is None:
            return
        now = clock.now()
        link_s = attempt.answered(reply.stages, reply.load, now, _size_of(reply.response.outputs))
        actions = self._machine.answered(number, now)
        if actions:
            self._answer = reply, link_s, now
        self._perform(actions, now)

    def _failed(self, number: int, error: ServeError) -> None:
        attempt = self._over(number)
        if attempt is None:
            return
        now = clock.now()
        attempt.failed(error, now, self._conductor.draw())
        self._perform(self._machine.failed(number, error, now), now)

    def _over(self, number: int) -> Attempt | None:
        """The attempt, which is under way no more; None if it ended in the very moment in which it was cancelled."""
        if number == self._inline:
            self._inline = None  # its place in the caller's task is free for a fallback
        return self._attempts.pop(number, None)

    # attempts

    async def _attempt_inline(self, launch: Launch) -> None:
        self._next, self._inline = None, launch.attempt
        try:
            await self._attempt(launch)
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        finally:
            self._inline = None
        # Whatever way the interrupted attempt ended, our own cancellation is taken back here.
        if self._interrupted:
            self._interrupted = False
            if self._task.uncancel() > self._base_cancelling:
                raise asyncio.CancelledError  # the caller left as well

    async def _attempt(self, launch: Launch) -> None:
        try:
            reply = await self._send(launch)
        except ServeError as error:
            self._failed(launch.attempt, error)
        except Exception as error:
            log.exception("a target has a defect", target=launch.candidate.target.id)
            self._failed(launch.attempt, InternalError(f"defect: {type(error).__name__}"))
        else:
            self._answered(launch.attempt, reply)

    def _send(self, launch: Launch) -> Awaitable[Reply]:
        call, target_id = self._call, launch.candidate.target.id
        target = self._conductor.targets.get(target_id)
        if target is None:
            raise Unreachable(f"{target_id} has just left")
        assert call.deadline is not None
        return target.infer(
            self._request,
            variant=launch.candidate.variant.name,
            budget_s=call.deadline - clock.now(),
            priority=call.priority,
            traceparent=call.headers.get("traceparent", ""),
            on_accepted=partial(self._accepted, launch.attempt),
        )

    async def _wait(self) -> None:
        """Until there is something to await inline, or the end."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # the end

    def _land(self, end: Answer | Refuse) -> Reply:
        now = clock.now()
        said = end if isinstance(end, Answer) else f"{end.error.code}: {end.error.message}"
        self._conductor.flown.append(Flown(self._request.id, self._machine.decision, said, now - self._call.arrived_at))
        if isinstance(end, Refuse):
            raise end.error
        assert self._answer is not None and self._call.deadline is not None
        reply, link_s, answered_at = self._answer
        return Reply(
            response=reply.response,
            stages=self._stages(end, reply, link_s),
            route=Route(
                end.candidate.target.id,
                end.reason,
                reply.variant or end.candidate.variant.name,
                end.attempts,
                end.hedged,
                end.fallback,
                end.degraded,
            ),
            budget_left_s=self._call.deadline - answered_at,
            batch_size=reply.batch_size,
            variant=reply.variant or end.candidate.variant.name,
        )

    def _stages(self, end: Answer, reply: Reply, link_s: float) -> dict[str, float]:
        """`admit` is all of ours before placing; a failed attempt's time shows in no stage, only in the total."""
        stages = {
            "admit": self._started_at - self._call.arrived_at,
            "classify": self._placed_at - self._started_at,
        }
        if "queue" in reply.stages:
            stages["queue"] = reply.stages["queue"]
        stages["link"] = link_s
        if "compute" in reply.stages:
            stages["compute"] = reply.stages["compute"]
        return stages

    def __repr__(self) -> str:
        return f"<_Flight {self._request.id or '-'} {self._machine!r}>"


def _size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' contents: what a body's time on the wire goes by."""
    size = 0
    for tensor in tensors:
        size += len(tensor.raw)
    return size
