"""What the pool's batcher costs a request on one core, by how many wait: it must not grow faster than log n.

Each round does to a queue of constant length what serving one request does: a request comes and is told what is ahead
of it, another's caller leaves or its time runs out, the timer is armed, a batch leaves and as many come instead. Time
is the thread's own CPU time a request, deciding who shares with whom included.

    python -m tests.bench.batcher_cost [--quick] [--repeats 5]
"""

from __future__ import annotations

from itertools import count
from math import exp, log
from random import Random
from statistics import median
from time import thread_time_ns

from cloud_pool.core.batching.batcher import Batcher
from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.latency_model import LatencyModel
from cloud_pool.core.batching.queue_item import QueueItem
from tests.bench.harness import Goal, Report, Spread, parser, table

SIZES = (10, 1_000, 100_000)
POINTS = ((1.0, 0.0026), (512.0, 0.113), (8192.0, 2.5))  # fp32 on a core, docs/design/numbers.md, "Model cost"
_BUDGET_S = 1e6  # nobody is late in a queue that is never drained


class Traffic:
    """Requests of log-normal lengths and many levels, one after another."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed)
        self._numbers = count()
        self.now = 0.0

    def next(self) -> QueueItem:
        self.now += 0.001
        length = min(256, max(4, round(18 * exp(0.9 * self._draw.gauss(0.0, 1.0)))))
        due_at = self.now + _BUDGET_S * (1.0 + self._draw.random())
        return QueueItem(
            next(self._numbers), self.now, due_at, WorkShape(1, length, float(length)), (), self._draw.randrange(5)
        )


def measure(waiting: int, rounds: int, seed: int) -> float:
    """Median microseconds a request."""
    traffic = Traffic(seed)
    batcher = Batcher(LatencyModel(POINTS), max_rows=32, max_queue_size=10 * waiting)
    for _ in range(waiting):
        batcher.add([traffic.next()], traffic.now)
    took_us = []
    for number in range(rounds):
        coming = [traffic.next()]
        now = traffic.now
        began = thread_time_ns()
        batcher.add(coming, now)
        batcher.ahead(coming[0].deadline)
        batcher.drain_s()
        batcher.expire(now)
        batcher.next_wake(now, worker_free=False)
        if number % 4 == 0:
            batcher.remove([coming[0].id])
        left = batcher.release(now)
        spent_ns = thread_time_ns() - began
        missing = waiting - len(batcher)
        more = [traffic.next() for _ in range(missing)]
        began = thread_time_ns()
        for item in more:
            batcher.add([item], traffic.now)
            batcher.ahead(item.deadline)
            batcher.next_wake(traffic.now, worker_free=False)
        took_us.append((spent_ns + thread_time_ns() - began) / 1e3 / max(1, len(left)))
    return median(took_us[rounds // 10 :])


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    rounds = 200 if arguments.quick else 1_000
    report = Report("batcher_cost", {"repeats": repeats, "sizes": SIZES, "rounds": rounds})
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for seed in range(repeats):
        for size in SIZES:
            found[size].append(measure(size, rounds, seed))
    cost = {size: Spread.of(samples) for size, samples in found.items()}
    table(("waiting", "µs a request"), [(f"{size:,}", f"{cost[size]:.1f}") for size in SIZES])
    report.figures["us_a_request"] = {str(size): spread for size, spread in cost.items()}
    grown = cost[SIZES[-1]].median / cost[SIZES[0]].median
    report.goal(Goal("cost_at_100000_over_cost_at_10", grown, log(SIZES[-1]) / log(SIZES[0]), "<="))
    report.write()


if __name__ == "__main__":
    main()
