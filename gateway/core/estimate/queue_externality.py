"""The queue externality is the value that a request takes from the requests that it passes in a queue.

Our own targets compute in order of `order_key` (earliest deadline first, with priority). A request with a tight
deadline therefore waits less than the queue is long, and every request it passes waits for it. Counting the first
without the second promises the same seconds twice: each tight request looks cheap, and together they starve the patient
ones.

    wait  = the queue − the work of the requests that it passes
    harm  = Σ over the requests it passes: weight · [Φ(room / spread) − Φ((room − work) / spread)]

with `room` what each has left after all that is before it. The head is being computed and is never passed. Known are
this gateway's own attempts only; attempts whose deadline is unknown count as ahead and are not harmed, and so
does the work of others in load reports.

Invariants: 0 <= wait <= the queue; 0 <= harm <= the weights passed; an empty queue is not harmed. O(n log n) in those
passed, of which the first MOST_PASSED count.
Source: docs/design/routing.md, "Queue externality" (+ 2.8 points for the highest class in overload); Myerson's rule
that a price is the loss of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import erf, sqrt
from typing import Final, NamedTuple

MOST_PASSED: Final = 64
_WAIT_SPREAD: Final = 0.3
_TIMER_SPREAD_S: Final = 0.001
_SQRT_2: Final = sqrt(2.0)


class QueuePosition(NamedTuple):
    """A request's place in a queue: `key` orders, smallest first; `weight` is what its answer in time is worth."""

    key: float
    deadline: float
    weight: float = 1.0


class InsertionCost(NamedTuple):
    wait_s: float
    harm: float


def insertion_cost(
    queue: Iterable[tuple[float, QueuePosition | None]], place: QueuePosition, work_s: float, wait_s: float, now: float
) -> InsertionCost:
    """How long `place` would wait, and the value it would take from others.

    Args:
        queue: (work in seconds, place) of the attempts under way, the one being computed first.
        work_s: what the request itself adds to the wait of requests behind it.
        wait_s: how long it would wait at the very end of the queue.
    """
    passed = [(other, own_s) for own_s, other in islice(queue, 1, 1 + MOST_PASSED) if other and other.key > place.key]
    if not passed:
        return InsertionCost(wait_s, 0.0)
    passed.sort()
    ahead_s = max(0.0, wait_s - sum([own_s for _, own_s in passed]))
    return InsertionCost(ahead_s, _harm(passed, ahead_s, work_s, now))


def _harm(passed: list[tuple[QueuePosition, float]], ahead_s: float, work_s: float, now: float) -> float:
    harm, finish_s = 0.0, ahead_s
    for other, own_s in passed:
        finish_s += own_s  # when it would be done without the newcomer
        # The spread of that instant: 30 % of it, and a millisecond of timers. `scale` is 1 / (√2 · spread), for erf.
        scale = 1.0 / (_SQRT_2 * sqrt((_WAIT_SPREAD * finish_s) ** 2 + _TIMER_SPREAD_S * _TIMER_SPREAD_S))
        room_s = other.deadline - now - finish_s
        # weight · [Φ(room / spread) − Φ((room − work) / spread)]
        harm += 0.5 * other.weight * (erf(room_s * scale) - erf((room_s - work_s) * scale))
    return harm
