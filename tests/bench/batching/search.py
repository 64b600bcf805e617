"""The highest rate that somebody holds, in few tries: by doubling steps away from a first guess, then by halving.

Rungs are 5 % apart, so a figure is exact to that. Whether a rung is held is measured once per search: near the edge it
is chance, which repeats with other seeds average, and a search that starts at the last repeat's answer needs four or
five runs where a ladder from below needs twenty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

LOWEST: Final = 8.0  # requests a second
STEP: Final = 1.05
RUNGS: Final = 90  # the last is 640 a second


def rung(rate: float) -> int:
    """The one that is nearest to a rate."""
    return min(range(RUNGS), key=lambda number: abs(rate_of(number) - rate))


def rate_of(number: int) -> float:
    return float(LOWEST * STEP**number)


async def highest(holds: Callable[[float], Awaitable[bool]], start: float, steps: int = 2) -> float:
    """The highest rate that is held, as far as one may conclude from its neighbours; 0 if not even the lowest is.

    Args:
        start: where to begin.
        steps: rungs of the first step; each further one is twice as wide.
    """
    at = rung(start)
    if await holds(rate_of(at)):
        held, missed, outwards = at, RUNGS, 1
    else:
        held, missed, outwards = -1, at, -1
    while (held == -1 or missed == RUNGS) and 0 <= (at := at + outwards * steps) < RUNGS:
        steps *= 2
        if await holds(rate_of(at)):
            held = at
        else:
            missed = at
    while missed - held > 1:
        at = (held + missed) // 2
        if await holds(rate_of(at)):
            held = at
        else:
            missed = at
    return rate_of(held) if held >= 0 else 0.0
