"""The edge's model: one runner behind the common pipeline, with its limits, its costs and its statistics.

A generation does not wait for the device's turn: it begins in a slot of its model's own worker, and holds up no other
model for its length (`tidegate/serving/generation`).

A variant's limits say what the edge takes: work beyond them is refused as NotSupported with the limit's name, never
tried. Among the variants that take the work the cheapest on this device is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from msgspec.structs import replace

from edge_agent.serving.runner import Runner
from edge_agent.serving.scheduler import EdgeScheduler, WorkResult
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.share_weights import ShareWeights
from tidegate.models.work import Work, fits
from tidegate.oip.host import ModelStatistics, TimedCount
from tidegate.outcome import InternalError, NotSupported, PeerError, Unreachable
from tidegate.serving.target_model import Computation, Computed
from tidegate.workers.channel import Arrays
from tidegate.workers.watchdog import patience_s

_LEARNT: Final = 0.1  # by one turn of answers
OnAnswered = Callable[[Runner, float | None], None]


class _TimedResult(NamedTuple):
    """What a call computed, and the seconds in which its worker was at nothing else."""

    outputs: Arrays
    took_s: float


@dataclass(slots=True)
class _Turn:
    """The calls of one model that are answered in one turn of the loop; `rest_s`: a call's part beside its own."""

    handed_over_at: float  # the first of them
    rest_s: asyncio.Future[float]
    computes_s: list[float] = field(default_factory=list)


class EdgeModel:
    """A `TargetModel` over one runner.

    Args:
        server_name: of the edge, for refusals.
        soaking: whether the runner's generation still has to prove itself, which its offer says.
        shares: the weights by which models share the device: they say in which group this one is.
        on_answered: called after each call with the runner and the seconds that the call computed, of a generation
            those of a unit of its work; or with None where the runner failed by its own fault, not by the caller's or
            through a full queue.
    """

    def __init__(
        self,
        server_name: str,
        runner: Runner,
        scheduler: EdgeScheduler,
        *,
        soaking: bool = False,
        shares: ShareWeights | None = None,
        on_answered: OnAnswered = lambda runner, compute_s: None,
    ) -> None:
        self.runner = runner
        self.soaking = soaking
        self.calls_inside = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._server_name = server_name
        self._scheduler = scheduler
        self._group = (shares or ShareWeights()).group_of(runner.manifest)
        self._on_answered = on_answered
        self._statistics = ModelStatistics(runner.manifest.name, runner.manifest.version)
        self._answered_at = -inf  # the worker's last call: one that was handed over ahead began then
        self._handed_over = 0  # calls that the worker has
        self._turn: _Turn | None = None
        self._computing = 1.0  # the part of its calls' time in which the worker computes, of late

    @property
    def label(self) -> str:
        return self.runner.name

    @property
    def manifest(self) -> Manifest:
        return self.runner.manifest

    @property
    def variants(self) -> Sequence[Variant]:
        return self.runner.variants

    @property
    def ready(self) -> bool:
        return self.runner.state == "ready"

    def offer(self) -> ModelOffer:
        offer = self.runner.offer()
        return replace(offer, state="soaking") if self.soaking and offer.state == "ready" else offer

    def statistics(self) -> ModelStatistics:
        return self._statistics

    def choose(self, variants: Sequence[Variant], work: Work, demanded: str) -> Variant:
        """The cheapest variant here that takes the work. Raises NotSupported or Unreachable."""
        fitting = [v for v in variants if fits(work, max_batch=v.max_batch, max_tokens=v.max_tokens)]
        if not fitting:
            raise NotSupported(f"too much work for {self.label!r} on {self._server_name}: {_excess(work, variants)}")
        if not self.ready:
            raise Unreachable(self.runner.unready())
        return fitting[0] if len(fitting) == 1 else min(fitting, key=lambda v: _seconds(self.runner, v, work))

    def finish_in_s(self, variant: Variant, work: Work, deadline: float, priority: int) -> float | None:
        """The predicted time until such a call would be done if it came now; None of one that generates."""
        if variant.name in self.runner.generating:
            return None
        cost_s = self.runner.service_time(variant.name).predict_s(work.units)
        return self._scheduler.finish_in_s(deadline=deadline, cost_s=cost_s, priority=priority, lane=self.runner.name)

    async def compute(self, computation: Computation) -> Computed:
        """Wait for a turn and compute.

        Raises:
            Overloaded, DeadlineExceeded: by `edge_agent/core/edge_queue.py`.
            Unreachable: the worker died or hung during this call.
            InternalError: the engine raised.
            InvalidRequest: a step of its pipeline cannot do this request.
        """
        self._enter()
        try:
            computed = await self._compute(computation)
        finally:
            self._leave()
        self._count(computed)
        self._on_answered(self.runner, computed.compute_s if computed.pace_s is None else computed.pace_s)
        return computed

    def ended(self, took_s: float, error: BaseException | None) -> None:
        if error is None:
            self._statistics.success.add(took_s)
        elif isinstance(error, Exception):
            self._statistics.fail.add(took_s)
        if isinstance(error, InternalError | PeerError):
            self._on_answered(self.runner, None)

    async def _compute(self, computation: Computation) -> Computed:
        generating = self.runner.generating.get(computation.variant.name)
        if generating is not None:
            return await generating.compute(computation)
        done = await self._schedule(computation)
        compute_s = done.result.took_s
        queue_s = max(0.0, done.queue_s + done.compute_s - compute_s)
        return Computed(done.result.outputs, queue_s, compute_s, computation.work.rows)

    async def _schedule(self, computation: Computation) -> WorkResult[_TimedResult]:
        runner, call, units = self.runner, computation.call, computation.work.units
        variant = computation.variant.name
        time = runner.service_time(variant)
        time.relax(clock.now())

        async def compute() -> _TimedResult:
            began_at = clock.now()
            self._handed_over += 1
            try:
                patient_s, left_s = patience_s(time.p99_s(units)), computation.deadline - began_at
                computed = await runner.infer(variant, computation.arrays, patient_s, budget_s=left_s)
                took_s = await self._took_s(began_at, computed.compute_s)
            except BaseException as error:
                now = clock.now()
                if isinstance(error, Unreachable):
                    # If it hung, such calls take this long at least: where it was only slow, the next get more time.
                    time.record(units, max(time.predict_s(units), now - max(began_at, self._answered_at)))
                self._answered_at = now  # what the worker does from here on is another's
                raise
            finally:
                self._handed_over -= 1
            # Recorded here and not after the wait: a call whose caller has left has cost what it cost.
            time.record(units, took_s)
            return _TimedResult(computed.outputs, took_s)

        cost_s = time.predict_s(units)
        return await self._scheduler.run(
            compute,
            lane=runner.name,
            deadline=computation.deadline,
            cost_s=cost_s,
            compute_s=cost_s * self._computing,
            priority=call.priority,
            group=self._group,
            on_accepted=call.on_accepted,
        )

    async def _took_s(self, handed_over_at: float, compute_s: float) -> float:
        """How long the worker was at a call that has just been answered, and computed for `compute_s` of it.

        Calls that were handed over ahead are answered in one turn of the loop, and when each was done nobody has seen:
        each takes an equal part of what they took beyond their computations.
        """
        if self._handed_over == 1:
            now = clock.now()
            took_s, self._answered_at = max(compute_s, now - max(handed_over_at, self._answered_at)), now
            self._learn_computing(compute_s, took_s)
            return took_s
        if self._turn is None:
            loop = asyncio.get_running_loop()
            self._turn = _Turn(handed_over_at, loop.create_future())
            loop.call_soon(self._end_turn, self._turn)
        turn = self._turn
        turn.computes_s.append(compute_s)
        return compute_s + await turn.rest_s

    def _end_turn(self, turn: _Turn) -> None:
        self._turn, now = None, clock.now()
        took_s, self._answered_at = now - max(turn.handed_over_at, self._answered_at), now
        self._learn_computing(sum(turn.computes_s), took_s)
        if not turn.rest_s.done():  # cancelled, at the end of the scheduler
            turn.rest_s.set_result(max(0.0, took_s - sum(turn.computes_s)) / len(turn.computes_s))

    def _learn_computing(self, compute_s: float, took_s: float) -> None:
        part = min(1.0, compute_s / took_s) if took_s > 0.0 else 1.0
        self._computing += _LEARNT * (part - self._computing)

    def _enter(self) -> None:
        self.calls_inside += 1
        self.idle.clear()

    def _leave(self) -> None:
        self.calls_inside -= 1
        if not self.calls_inside:
            self.idle.set()

    def _count(self, done: Computed) -> None:
        statistics = self._statistics
        statistics.last_inference_ms = int(clock.utc_s() * 1e3)
        statistics.inference_count += done.batch_rows
        statistics.execution_count += 1
        statistics.queue.add(done.queue_s)
        statistics.compute_infer.add(done.compute_s)
        statistics.batches.setdefault(done.batch_rows, TimedCount()).add(done.compute_s)

    def __repr__(self) -> str:
        return f"<EdgeModel {self.label} {self.runner.state}{' soaking' if self.soaking else ''}>"


def _seconds(runner: Runner, variant: Variant, work: Work) -> float:
    return runner.service_time(variant.name).predict_s(work.units)


def _excess(work: Work, variants: Sequence[Variant]) -> str:
    """Which limits the work is over, for the caller to read."""
    words = []
    for v in variants:
        if v.max_batch is not None and work.rows > v.max_batch:
            words.append(f"{work.rows} rows, but {v.name} takes at most {v.max_batch} (max_batch)")
        if v.max_tokens is not None and work.longest_row > v.max_tokens:
            words.append(f"rows of {work.longest_row}, but {v.name} takes at most {v.max_tokens} (max_tokens)")
    return "; ".join(words)
