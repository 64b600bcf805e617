"""One row and its acceptance numbers, and those that every row shares.

Whatever breaks: every request ends once, with a documented status, and hardly any after its deadline; logs say each
change once. Attainment is judged against what the same fleet attained before its faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tests.support.faults.matrix import Row
from tests.support.faults.matrix_seen import Seen

SOON_S: Final = 0.010
LATEST_S: Final = 0.050


class Check(NamedTuple):
    """One acceptance number. `figure` None: it did not happen, or could not be seen, which is a miss."""

    name: str
    figure: float | None
    sense: Literal["<=", ">="]
    aim: float

    @property
    def holds(self) -> bool:
        if self.figure is None:
            return False
        return self.figure <= self.aim if self.sense == "<=" else self.figure >= self.aim

    def __str__(self) -> str:
        figure = "never" if self.figure is None else f"{self.figure:.4g}"
        return f"{'' if self.holds else 'MISSED '}{self.name} {figure} {self.sense} {self.aim:g}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A row, and what of it must hold beside what always must. `quick` ones are in the short bench.

    `own`: only its own numbers hold, since the gateway itself goes, and with it its counters and callers' connections.
    `foreign`: the pool is a server that is none of ours, so it is played on a fleet of its own.
    """

    row: Row
    checks: Callable[[Seen], Iterable[Check]]
    quick: bool = True
    after_lost_points: float = 2.0
    own: bool = False
    foreign: bool = False

    def judge(self, seen: Seen) -> list[Check]:
        return [*self.checks(seen), *([] if self.own else always(seen, self.after_lost_points))]


def always(seen: Seen, after_lost_points: float) -> list[Check]:
    lost_after = points(seen.usual.attainment() - seen.after.attainment())
    return [
        Check("ended_by_10ms_after_deadline", seen.ended_within(SOON_S), ">=", 0.999),
        Check("latest_end_s", max(seen.overrun_s), "<=", LATEST_S),
        Check("arrivals_unaccounted", abs(seen.unaccounted), "<=", 0),
        Check("undocumented_ends", seen.undocumented.total(), "<=", 0),
        Check("repeated_log_lines", len(seen.repeated_lines), "<=", 0),
        Check("attainment_after_lost_points", lost_after, "<=", after_lost_points),
    ]


def points(share: float) -> float:
    """A share as points of a hundred."""
    return round(100.0 * share, 3)


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
