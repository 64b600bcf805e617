"""The batch choice selects, among batches that could run now, the one that keeps the most value in time.

Earliest deadline first is optimal on one machine for as long as every deadline can be met, and bad from then on: it
works on the batch that is about to be late and makes the next one late too. Strict priority is the opposite: lower
levels wait even where there is room for all. A batching device adds a third thing: a call has a fixed cost, so running
two short requests at once, as they come, in calls of their own wastes time that the long ones behind them then lack,
although the short ones had slack to wait for each other.

Method:

    1  in the order of deadlines, groups are laid one after another; where one would end late, the one that is worth
       least for its time is given up until those kept fit (Moore and Hodgson, with weights as a heuristic);
    2  expected arrivals are counted in: behind each group time passes `stretch` times faster, 1 / (1 - load), so that
       under load a group of little worth does not take the room that a more valuable one will need in a moment;
    3  where all groups could be kept, the order is free, and the group goes first that is worth most for its time, of
       the groups that make none before them late nor reduce its guard: short groups pass long ones that can wait, so
       that no caller waits for a batch that its own could have preceded. But patience ends: a group that has waited
       long, relative to its cost, is passed only by groups that are worth more. If not all could be kept, the first of
       the kept ones goes; and if none could be, the one that is worth most for its time.

Where memory is short, another worker's batch waits for the bytes that this one holds while it computes, so a group is
worth not what it brings for its time but for its time and its bytes (`density`): small batches of little memory then
run beside each other, instead of one large one alone.

Running the longest first, so that short requests gain batch-mates by waiting, was tried: replayed on MiniLM's lengths
it held 2 to 3 % more within 250 ms and nothing within 100 ms, but of short texts among long ones one in six was passed
by a long one that could have waited, and their median was a third higher.

Invariants: one of the groups is chosen; if laid by deadline all would be in time, they still are after the choice.

It can be wrong where weights are: those of priority levels are a matter of taste. Groups given up are not refused
here; they may still run in a quiet moment, until it is provably too late for them.

Source: Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs", Management Science
1968; weights by level as in docs/design/routing.md, "Priorities".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple


class BatchCandidate(NamedTuple):
    """Requests that could run as one batch, as indices into a list of the caller."""

    members: tuple[int, ...]
    cost_s: float
    due_at: float  # the earliest deadline among them
    weight: float  # the value of all members together, if in time
    guard_s: float = 0.0  # slack that no other batch may take from the members on purpose
    held_bytes: float = 1.0  # the memory that it needs where that is short; the same for all where it is not
    patient_until: float = inf  # until when the members let others of no more worth go first

    @property
    def density(self) -> float:
        """What it is worth for the device that it takes: seconds, times bytes where memory is short."""
        return self.weight / (self.cost_s * self.held_bytes)

    @property
    def worth(self) -> float:
        """The value of one member."""
        return self.weight / len(self.members)


def next_candidate(groups: Sequence[BatchCandidate], now: float, stretch: float = 1.0) -> BatchCandidate:
    """The group to run now.

    Args:
        groups: at least one.
        stretch: how many times longer the work of the groups will take, with the arrivals meanwhile, and with as many
            workers as there are: at least 1 for one worker.
    """
    kept = _feasible(groups, now, stretch)
    if not kept:
        return max(groups, key=lambda group: group.density)
    return _worthiest_with_room(kept, now, stretch) if len(kept) == len(groups) else kept[0]


def _feasible(groups: Sequence[BatchCandidate], now: float, stretch: float) -> list[BatchCandidate]:
    """The groups that can all be in time together, in the order of their deadlines."""
    kept: list[BatchCandidate] = []
    before_s = 0.0
    for group in sorted(groups, key=lambda one: one.due_at):
        kept.append(group)
        # Moore and Hodgson: while this group would end late, give up the one that is worth least for its time.
        while now + before_s + group.cost_s > group.due_at:
            worst = min(kept, key=lambda one: one.density)
            kept.remove(worst)
            if worst is group:
                break
            before_s -= worst.cost_s * stretch
        else:
            before_s += group.cost_s * stretch
    return kept


def _worthiest_with_room(kept: Sequence[BatchCandidate], now: float, stretch: float) -> BatchCandidate:
    best, room_s, starts_at = kept[0], inf, now
    patience_s: dict[float, float] = {}  # of the groups before, by their worth
    for group in kept:
        # Going first, this group delays every group before it by its cost: that must fit into the least of their slack
        # (`room_s`), and into the patience of those that are worth no more.
        may_take_s = min([room_s, *[least_s for worth, least_s in patience_s.items() if worth >= group.worth]])
        if group.cost_s <= may_take_s and group.density > best.density:
            best = group
        room_s = min(room_s, group.due_at - starts_at - group.cost_s - group.guard_s)
        patience_s[group.worth] = min(patience_s.get(group.worth, inf), group.patient_until - starts_at)
        starts_at += group.cost_s * stretch
    return best
