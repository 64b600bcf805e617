"""Quantiles of a few sorted values, and of durations that were counted in bins; neither interpolates.

    nearest_rank   of n sorted values the one at place ⌊share · n⌋, and at most the last
    bins_at        of counted bins, the first at which the counts so far reach share · total

Other definitions differ by one observation at most, which counts only where there are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The quantile of values in ascending order, of which there is at least one. `share` is within [0, 1]."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bins_at(counts: Mapping[int, int], shares: Sequence[float]) -> list[int]:
    """For each of the ascending `shares`, in (0, 1], the bin in which it is reached; none when nothing was counted."""
    total = sum(counts.values())
    if not total:
        return []
    found: list[int] = []
    running, ordered, place = 0, iter(sorted(counts)), 0
    for share in shares:
        while running < share * total:
            place = next(ordered)
            running += counts[place]
        found.append(place)
    return found
