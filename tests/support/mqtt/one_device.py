"""One device behind the real batcher in virtual time: who is answered in time, and when the others are told.

Lengths and costs are those of MiniLM texts on one core (docs/design/numbers.md, "Model cost"); every batch takes what
its shape costs there, times noise that the batcher does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf
from random import Random

from cloud_pool.core.batching.batcher import EARLY_DROP_RATIO, Batcher
from cloud_pool.core.batching.grouping import WorkShape, padded_shape
from cloud_pool.core.batching.latency_model import LatencyModel
from cloud_pool.core.batching.queue_item import QueueItem
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import BatchingPolicy
from tidegate.outcome import ServeError

POINTS = ((1.0, 0.0026), (16.0, 0.0058), (64.0, 0.016), (256.0, 0.058), (512.0, 0.113), (2048.0, 0.5), (8192.0, 2.5))


@dataclass(slots=True)
class Told:
    """What became of the requests of one run. A refusal's delay is after the instant from which it was hopeless."""

    seconds: float
    arrived: int = 0
    in_time: int = 0
    late: int = 0
    refused: int = 0
    most_delay_s: float = 0.0

    @property
    def goodput_rps(self) -> float:
        return self.in_time / self.seconds


def serve(
    rate_rps: float,
    *,
    seconds: float = 20.0,
    budget_s: float = 0.25,
    sigma: float = 0.1,
    seed: int = 1,
    policy: BatchingPolicy = "deadline",
) -> Told:
    """Poisson arrivals for so long, then until nobody waits."""
    return _World(rate_rps, seconds, budget_s, sigma, seed, policy).run()


class _World:
    def __init__(
        self, rate_rps: float, seconds: float, budget_s: float, sigma: float, seed: int, policy: BatchingPolicy
    ) -> None:
        self._draw = Random(seed)
        self._model = LatencyModel(POINTS)
        self._true = CostTable(POINTS)
        self._batcher = Batcher(self._model, max_rows=32, policy=policy)
        self._told = Told(seconds)
        self._rate_rps, self._budget_s, self._sigma = rate_rps, budget_s, sigma
        self._running: list[QueueItem] = []
        self._shape, self._began_at, self._ends_at = WorkShape(1, 1, 1.0), 0.0, inf

    def run(self) -> Told:
        now, arrives_at = 0.0, self._draw.expovariate(self._rate_rps)
        while arrives_at < inf or self._running or len(self._batcher):
            wake_at = self._batcher.next_wake(now, worker_free=not self._running)
            now = min(arrives_at, self._ends_at, inf if wake_at is None else wake_at)
            if now == self._ends_at:
                self._end(now)
            if now == arrives_at:
                self._arrive(now)
                arrives_at += self._draw.expovariate(self._rate_rps)
                arrives_at = arrives_at if arrives_at < self._told.seconds else inf
            self._expire(now)
            self._begin(now)
        return self._told

    def _arrive(self, now: float) -> None:
        self._told.arrived += 1
        length = min(256, max(4, round(18 * exp(0.9 * self._draw.gauss(0.0, 1.0)))))
        item = QueueItem(self._told.arrived, now, now + self._budget_s, WorkShape(1, length, float(length)))
        try:
            self._batcher.add([item], now)
        except ServeError:
            self._told.refused += 1

    def _expire(self, now: float) -> None:
        for item in self._batcher.expire(now):
            alone_s = self._model.predict_s(item.shape.units, item.shape.length)
            self._told.refused += 1
            self._told.most_delay_s = max(self._told.most_delay_s, now - item.deadline + EARLY_DROP_RATIO * alone_s)

    def _begin(self, now: float) -> None:
        if self._running:
            return
        self._running = self._batcher.release(now)
        if self._running:
            self._shape = padded_shape([item.shape for item in self._running])
            noise = exp(self._sigma * self._draw.gauss(0.0, 1.0))
            self._began_at, self._ends_at = now, now + noise * self._true.seconds_for(self._shape.units)

    def _end(self, now: float) -> None:
        self._model.record(self._shape.units, self._shape.length, now - self._began_at)
        self._batcher.took(now - self._began_at)
        in_time = sum(now <= item.deadline for item in self._running)
        self._told.in_time += in_time
        self._told.late += len(self._running) - in_time
        self._running, self._ends_at = [], inf
