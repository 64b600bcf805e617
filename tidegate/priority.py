"""Requests are ordered by the earliest deadline, where a level of priority is worth a fixed stretch of deadline.

Strict levels (all of 1 before any of 2) starve low levels for as long as high ones keep coming, and let an
unhurried important request overtake an ordinary one that is about to be late, for nothing. Here each level below the
first moves a request's place in the order, not its deadline, back by LEVEL_S: among requests of like budgets a higher
level always goes first, and no request is overtaken by one that came more than `levels · LEVEL_S` later.

OIP's numbers: 1 is the highest, larger is lower, 0 means the default, which is DEFAULT_LEVEL so that a caller may ask
for more as well as for less. A number that is no level counts as the default, as in Triton.

Ties (a batch job stamps one deadline on everything) go by arrival, then by number: first come, first served.

Source: Triton's priority levels (docs/design/batching.md, "Queue policies") with the starvation taken out; earliest
deadline first: Liu and Layland, JACM 1973, optimal on one machine while the deadlines can be met at all.
"""

from __future__ import annotations

from typing import Final

DEFAULT_LEVEL = 2
LAST_LEVEL = 4
# what an answer in time is worth, by level (docs/design/routing.md, "Priorities")
WEIGHTS: Final = {1: 2.0, 2: 1.0, 3: 0.5, 4: 0.25}
LEVEL_S = 5.0  # over twice the usual budget, so that levels are strict among ordinary requests


def level_of(priority: int) -> int:
    """The level from 1 (first) to LAST_LEVEL that OIP's `priority` means."""
    return priority if 1 <= priority <= LAST_LEVEL else DEFAULT_LEVEL


def order_key(deadline: float, priority: int) -> float:
    """Smaller goes first. An instant: deadlines and keys may be compared only on one machine."""
    return deadline + LEVEL_S * (level_of(priority) - 1)
