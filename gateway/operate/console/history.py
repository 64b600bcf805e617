"""The console history remembers a minute of requests by class, target and way, and five minutes of links.

It is an `Observer` of the stack. The ends of requests are counted by kind: the same class, target, way and ending, and
nearly the same time taken. The counts are moved into the statistics that are shown (`SlidingStats`) once a second, or
sooner if a reader asks: there are far fewer kinds than requests. Once a second one point of the whole is kept as well,
and every other second a sample of each link; without readers a second costs a walk over the targets, some two
microseconds each.

Invariants: ends that are counted together lie in one slot of `SlidingStats`, so counting them later changes nothing;
memory is bounded by the number of targets and by `SlidingStats`'s keys. Cancelled requests and callers' own mistakes
are not counted, as no target was late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from gateway.core.estimate.sliding_stats import SLOT_S, Ending, SlidingStats, bucket_of
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_health import SAMPLE_EVERY_S, RttTimeline
from gateway.core.history.unanswered import unanswered_word
from gateway.operate.console.generations import GenerationRates
from tidegate import clock
from tidegate.outcome import CallerError, Outcome, ServeError
from tidegate.runtime.owned_task import OwnedTask
from tidegate.types import Call, InferRequest, Reply, TargetId

log = structlog.get_logger(__name__)

POINTS: Final = 300  # one a second
TICK_S: Final = 1.0
MOST_ALIKE: Final = 2048  # kinds of ends, until they are moved into the statistics

ClassKey = tuple[str, int]  # model, priority; 0 is the default
WayKey = tuple[str, str]  # the tier that answered, and the reason; or how it ended, and the error's code
_Alike = tuple[str, int, str, str, Ending, int]  # model, priority, answering target, reason, ending, latency bucket
Ends = dict[_Alike, int]


class HistoryPoint(NamedTuple):
    """One second of the whole. Quantiles are of that second's answers, None without one."""

    at: float  # UTC seconds
    in_time: int
    late: int
    failed: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    in_flight: int


class ConsoleHistory:
    """An `Observer` of requests and links. `async with` samples once a second until it ends."""

    def __init__(
        self,
        fleet: Fleet,
        in_flight: Callable[[], int],
        generates: Callable[[InferRequest], bool] = lambda _request: False,
    ) -> None:
        """Args: generates: whether the model of a request gives its answer token by token."""
        self.on_counts: Callable[[float, Ends], None] = _kept  # called with what is moved into the statistics
        self._classes: SlidingStats[ClassKey] = SlidingStats()
        self._targets: SlidingStats[str] = SlidingStats()
        self._ways: SlidingStats[WayKey] = SlidingStats()
        self._ends: dict[_Alike, int] = {}  # since `_ends_since`, all of one slot
        self._ends_since = 0.0
        self._slot = -1
        self._added_at = 0.0
        self.points: deque[HistoryPoint] = deque(maxlen=POINTS)
        self.timelines: dict[str, RttTimeline] = {}
        self.generations = GenerationRates(generates)
        self.answered_models: set[str] = set()  # since the start; bounded by the repository
        self._fleet = fleet
        self._in_flight = in_flight
        self._second: SlidingStats[None] = SlidingStats()
        self._sampled_at = float("-inf")
        self._task = OwnedTask(self._run, name="console watch")

    async def __aenter__(self) -> ConsoleHistory:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    @property
    def classes(self) -> SlidingStats[ClassKey]:
        self._move_counts()
        return self._classes

    @property
    def targets(self) -> SlidingStats[str]:
        self._move_counts()
        return self._targets

    @property
    def ways(self) -> SlidingStats[WayKey]:
        self._move_counts()
        return self._ways

    # as an observer

    def began(self, call: Call) -> None:
        self.generations.began(call)

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        self.answered_models.add(call.request.model_name)
        self.generations.answered(call, reply, now)
        left_s, route = reply.budget_left_s, reply.route
        ending: Ending = "late" if left_s is not None and left_s < 0 else "in_time"
        if route is None:
            self._count(call, ending, "none", "none", now)
        else:
            self._count(call, ending, route.served_by, route.reason, now)

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        self.generations.ended(call, now)
        if not isinstance(error, (asyncio.CancelledError, CallerError)):
            code = Outcome.of(error).value
            attempted = isinstance(error, ServeError) and error.attempted
            self._count(call, "failed", unanswered_word(code, attempted=attempted), code, now)

    def _count(self, call: Call, ending: Ending, served_by: str, why: str, now: float) -> None:
        slot = int(now / SLOT_S)
        if slot != self._slot or len(self._ends) >= MOST_ALIKE:
            self._move_counts()
            self._slot = slot
        ends = self._ends
        if not ends:
            self._ends_since = now
        alike = call.request.model_name, call.priority, served_by, why, ending, bucket_of(now - call.arrived_at)
        ends[alike] = ends.get(alike, 0) + 1

    def _move_counts(self) -> None:
        ends, self._ends = self._ends, {}
        if ends:
            self.on_counts(self._ends_since, ends)
            self._add(self._ends_since, ends)

    def add_counts(self, at: float, ends: Ends) -> None:
        """Add what another process of this gateway has counted at an instant of the machine's clock."""
        self._move_counts()
        self.answered_models.update(model for (model, _, _, _, ending, _) in ends if ending != "failed")
        self._add(at, ends)

    def _add(self, at: float, ends: Ends) -> None:
        at = self._added_at = max(at, self._added_at)  # slots are in order, and what others counted may come late
        for (model, priority, served_by, why, ending, bucket), times in ends.items():
            self._classes.count((model, priority), ending, bucket, at, times)
            self._ways.count((TargetId.parse(served_by).tier, why), ending, bucket, at, times)
            if ending != "failed":  # no target answered: a word stands in its place
                self._targets.count(served_by, ending, bucket, at, times)
            self._second.count(None, ending, bucket, at, times)

    # sampling

    async def _run(self) -> None:
        while True:
            await clock.sleep(TICK_S)
            try:
                self.tick(clock.now(), clock.utc_s())
            except Exception:
                log.exception("the console cannot keep up")  # a defect here must not stop the console for good

    def tick(self, now: float, utc_s: float) -> None:
        """Add the point of the second that is over, and every other second a sample of each link."""
        self._move_counts()
        self.generations.sample(now)
        second, self._second = self._second.total(now), SlidingStats()
        p50_s, p95_s, p99_s = second.quantiles_s or (None, None, None)
        self.points.append(
            HistoryPoint(
                at=utc_s,
                in_time=second.in_time,
                late=second.late,
                failed=second.failed,
                p50_s=p50_s,
                p95_s=p95_s,
                p99_s=p99_s,
                in_flight=self._in_flight(),
            )
        )
        if now - self._sampled_at >= SAMPLE_EVERY_S - TICK_S / 2:
            self._sampled_at = now
            self._sample()

    def _sample(self) -> None:
        targets = self._fleet.targets
        for gone in self.timelines.keys() - targets.keys():
            del self.timelines[gone]
        for target in targets.values():
            timeline = self.timelines.get(target.id)
            if timeline is None:
                timeline = self.timelines[target.id] = RttTimeline()
            timeline.sample(target)

    def __repr__(self) -> str:
        return f"<ConsoleHistory {len(self.points)} points, {len(self.timelines)} links>"


def _kept(_at: float, _ends: Ends) -> None:
    """For a gateway of one process."""
