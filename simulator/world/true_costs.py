"""True costs by size: what calls really take, where that differs from what a target measured at its warm-up.

A table is a few points, each the fastest of a few runs, read along straight lines: a point that was disturbed, or a
bend between two points, is wrong for the sizes around it and right elsewhere. One factor for a whole target would then
depend on what it happened to be sent: if a policy sent it only sizes for which its table is too slow, a replay would
make it a fast device for every size, and report that the other policy would have done well.

Method: each call is its logarithm against the table. For each octave of sizes, its mean over the tier's targets is what
to expect there, and a target's own mean how far it is from that; its own calls of an octave then move that from what is
expected, as if `_PRIOR` calls had agreed with it. What comes out is a table's points, and one at each octave between
them, times these: by size alone. How slow a target was all in all, and when, follows from the same calls against the
table that comes out (`simulator/replay/measured.py`). Of a target that was sent nothing, all that is known is how its
tier did.

It can be wrong for sizes that no target of a tier was sent.
Source: Efron and Morris, "Stein's Estimation Rule and Its Competitors", JASA 1973, on the shrinking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, exp, floor, log, log2
from statistics import fmean
from typing import Final, NamedTuple

from tidegate.estimate.cost_table import CostTable

Points = tuple[tuple[float, float], ...]

_PRIOR: Final = 2.0


class _Levels(NamedTuple):
    """Logarithms against the table by octave of size, and where there is none."""

    by_octave: Mapping[int, float]
    otherwise: float

    def at(self, octave: int) -> float:
        return self.by_octave.get(octave, self.otherwise)

    def moved(self, by: float) -> _Levels:
        return _Levels({octave: level + by for octave, level in self.by_octave.items()}, self.otherwise + by)

    def learning(self, logs: Iterable[tuple[int, float]]) -> _Levels:
        """These, moved by calls of (octave, logarithm)."""
        own = defaultdict(list)
        for octave, one in logs:
            own[octave].append(one)
        # A mean of the own calls and of `_PRIOR` calls at the level that is expected.
        learned = {o: (sum(found) + _PRIOR * self.at(o)) / (len(found) + _PRIOR) for o, found in own.items()}
        return _Levels({**self.by_octave, **learned}, self.otherwise)


def true_tables(tables: Mapping[str, Points], calls: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Points]:
    """The tables of one tier's targets, one model's, in the unit that they came in.

    Args:
        calls: of each target (work units, how many times its table's seconds that took).
    """
    logs = {id: [(_octave(units), log(ratio)) for units, ratio in calls.get(id, ())] for id in tables}
    all_ = [one for own in logs.values() for one in own]
    tier = _Levels({}, fmean(one for _, one in all_) if all_ else 0.0).learning(all_)
    return {id: _times(points, _by_size(tier, logs[id])) for id, points in tables.items()}


def _by_size(tier: _Levels, logs: Sequence[tuple[int, float]]) -> _Levels:
    if not logs:
        return tier
    # How far this target is from its tier at all sizes, shrunk towards 0 where it has few calls.
    offset = sum(one - tier.at(octave) for octave, one in logs) / (len(logs) + _PRIOR)
    levels = tier.moved(offset).learning(logs)
    # The target's mean over all its calls is left to its faults by stretches of time.
    return levels.moved(-fmean(levels.at(octave) for octave, _ in logs))


def _times(points: Points, levels: _Levels) -> Points:
    table = CostTable(points)
    first, last = (log2(max(1.0, table.units[end])) for end in (0, -1))
    last = max(last, *levels.by_octave) if levels.by_octave else last
    knots = {*table.units, *(2.0**octave for octave in range(ceil(first), floor(last) + 1))}
    return tuple((units, table.seconds_for(units) * exp(levels.at(_octave(units)))) for units in sorted(knots))


def _octave(units: float) -> int:
    return round(log2(max(1.0, units)))
