"""Recycling: which worker is replaced by a fresh one now, and why?

A fresh process cures what decayed (`tidegate/oip/grpc/health.py`), but costs a load, a warm-up and the learned state of
its caches. What is kept outside of it is not lost: the queue, the cost tables with what they learned, the statistics.
So recycling is cheap once and ruinous as a habit, and the rules are there to keep a bad sign from becoming an outage:

* one worker at a time, and none while another is missing for any reason;
* at least `gap_s` (varied by a fifth) after the last one ended: a sign that recycling does not cure then costs little;
* never in overload: a pool that cannot serve what comes cannot spare a worker, and its lateness is no sign of decay;
* a complaint goes before prevention, and the longest served goes first among equals.

Prevention: after `after_requests` answers, varied by a tenth for each life, or workers that started together would end
together.

Pure: chance is an argument. It can be wrong where what is wrong is the machine: then each worker is replaced once every
`gap_s`, and the log says so.

Source: docs/design/faults.md, "Recycling".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

GAP_JITTER: Final = 0.2
COUNT_JITTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class RecyclingCandidate:
    """A worker that serves. `served` counts answers of this life, `complaint` is of its health."""

    worker: str
    complaint: str | None
    served: int
    served_most: float  # of this life; `Recycling.served_most` draws it

    @property
    def reason(self) -> str | None:
        if self.complaint is not None:
            return self.complaint
        return f"served: {self.served} requests" if self.served >= self.served_most else None


class Recycling:
    """Mutable: `decide`, and `ended` when what was decided is over, well or not.

    Args:
        draw: chance, uniform in [0, 1).
        gap_s: seconds from the end of one recycle to the next at least.
        after_requests: of one life; 0 never recycles by count.
    """

    def __init__(self, draw: Callable[[], float], *, gap_s: float = 300.0, after_requests: int = 0) -> None:
        self._draw = draw
        self._gap_s = gap_s
        self._after_requests = after_requests
        self._under_way: str | None = None
        self._not_before = -inf

    def served_most(self) -> float:
        """After how many answers the life that begins now is to end."""
        if self._after_requests == 0:
            return inf
        return self._after_requests * (1.0 + COUNT_JITTER * (2.0 * self._draw() - 1.0))

    def decide(
        self, candidates: Sequence[RecyclingCandidate], now: float, *, all_there: bool, overloaded: bool
    ) -> RecyclingCandidate | None:
        """The one to recycle now, if any. It is under way from then on until `ended`."""
        if self._under_way is not None or now < self._not_before or overloaded or not all_there:
            return None
        wanted = [one for one in candidates if one.reason is not None]
        if not wanted:
            return None
        chosen = max(wanted, key=lambda one: (one.complaint is not None, one.served))
        self._under_way = chosen.worker
        return chosen

    def ended(self, now: float) -> None:
        """What was decided is over: the next comes no sooner than after the gap."""
        self._under_way = None
        self._not_before = now + self._gap_s * (1.0 + GAP_JITTER * self._draw())

    def __repr__(self) -> str:
        return f"<Recycling {self._under_way or 'nobody'}>"
