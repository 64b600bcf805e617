"""A fair share divides what several gateways may use together by what is asked of each of them.

Each gateway knows what was asked of the others a moment ago, and divides by the same rule, so that the shares add up
to the whole although nobody hands them out:

    little is asked   each has what is asked of it, and an equal part of what is left
    more is asked     the least are served in full, the others get what is left in equal parts (max-min fairness)
    not known         a gateway that lives and says nothing counts as one that takes the equal part of the whole
    nothing asked     it counts as FLOOR of the equal part: the first request must not wait for a round of reports

Requests come unevenly: with exactly as much as is asked on average, a gateway served in full would refuse a tenth of
it whenever several come together. So it may use HEADROOM more for a moment, and what it does not use is the others'.

Demands are as old as a report. Where one jumps, its gateway has the old share until the others have heard of it, and
they have theirs: for that long a little may be refused that there was room for, or granted that there was none for.

Invariants: where all know the same, what the gateways served in full use and the shares of the others add up to the
whole; no share is 0 unless the whole is.
Source: Bertsekas and Gallager, "Data Networks", 1992, §6.5.2 (max-min fairness by filling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

FLOOR: Final = 0.02
HEADROOM: Final = 0.25


class QuotaUse(NamedTuple):
    """What is asked of one gateway, refused or not, and what it granted, in the same unit."""

    asked: float
    used: float


def fair_share(whole: float, own: QuotaUse, others: Sequence[QuotaUse], unknown: int = 0) -> float:
    """The share of `whole`, in its unit, of one gateway.

    Args:
        others: the usage of each of the others that have said it.
        unknown: how many live and have not.
    """
    known = 1 + len(others)
    part = whole / (known + unknown)
    asked = [max(one.asked, FLOOR * part) for one in (own, *others)]
    spare = part * known - sum(asked)
    if spare >= 0.0:
        return asked[0] + spare / known
    level, in_full = _level(part * known, asked)
    if asked[0] <= level:
        return min(level, (1.0 + HEADROOM) * asked[0])
    unused = sum(max(0.0, one - usage.used) for one, usage in zip(asked[1:], others, strict=True) if one <= level)
    return level + unused / (known - in_full)


def _level(whole: float, asked: Sequence[float]) -> tuple[float, int]:
    """What each of those gets that ask for more, and how many ask for no more; more than `whole` is asked."""
    left, count = whole, len(asked)
    for demand in sorted(asked):
        if demand * count >= left:
            break  # it and all that follow ask for more than an equal part of what is left
        left -= demand
        count -= 1
    level = left / count
    return level, sum(demand <= level for demand in asked)
