"""Fair share orders the models on one device by deadline, and lets none with work starve.

The model whose first request is due first goes first: that is the pool's order, and with room for all it is the best
one. But a heavy model with short deadlines is always due first, and a light one beside it would get what is left, which
may be nothing. So each group (a model, or all models of a modality) has a weight, and is owed that share of the
device's seconds:

    owed += s · weight / Σ weights of groups with work       for every s seconds that the device gives to any group
    owed −= s                                                for the group that gets them

    1. groups that are owed `window_s` or more go first, the most owed before the others;
    2. then by deadline, groups that are not `window_s` ahead of their share;
    3. then the others, the least ahead first, because an idle device is of no use.

So a request that would be late may go first for as long as its group is not too far ahead, and a group that always has
work has had, after any time, its weighted share but for `window_s` and a few batches. This is deficit round robin with
the deadline in place of the round, on device seconds and not on requests: ten batches of 1 ms are one of 10 ms.

A group without work is owed nothing more, and keeps at most `window_s` of what it was owed: a caller that sends one
request at a time does not wait for its share to build up anew each time, and no group saves up for an hour. Debts of
idle groups are paid off by what would have been their share.

Invariants: what all groups are owed adds up to zero; among n groups none with work is ever owed more than `window_s`
and n of the longest batches.

It can be wrong where predictions are: batches are charged when they begin, as predicted, and corrected when they end.

Source: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin" (SIGCOMM 1995); eligibility by
virtual time as in Bennett and Zhang, "WF2Q" (INFOCOM 1996).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Final

from tidegate.models.manifest import Manifest
from tidegate.models.share_weights import ShareWeights

WINDOW_S: Final = 0.25


class FairShare:
    """Mutable: `order` gives the turns, `charge` records device time.

    Args:
        weights: by group; other groups have 1.
        window_s: how far from its share a group may be before that comes before deadlines.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, *, window_s: float = WINDOW_S) -> None:
        self._weights = ShareWeights(weights)
        self._window_s = window_s
        self._owed_s: dict[str, float] = {}
        self._busy: frozenset[str] = frozenset()

    def group_of(self, manifest: Manifest) -> str:
        """The model's name, or its modality where that has a weight and the model itself has none."""
        return self._weights.group_of(manifest)

    def order(self, heads: Mapping[str, float]) -> list[str]:
        """The groups with work, first those that should go first.

        Args:
            heads: the order key of each group's first request; infinity for one without any.
        """
        busy = [group for group, head in heads.items() if head < inf]
        self._look(busy)
        return sorted(busy, key=lambda group: self._turn(group, heads[group]))

    def is_owed(self, group: str) -> bool:
        """Whether the group must go before all others, which may not take what it waits for."""
        return self._owed_s.get(group, 0.0) >= self._window_s

    def charge(self, group: str, seconds: float) -> None:
        """Charge seconds of a device to a group; negative seconds return what was predicted and not needed."""
        if not isfinite(seconds) or (len(self._owed_s) == 1 and group in self._owed_s):
            return  # a group that is alone owes what it takes to itself
        # The seconds are owed to the groups with work, to this one, and to groups in debt; only this one gets them.
        self._owed_s.setdefault(group, 0.0)
        self._spread(seconds, {*self._busy, group, *(one for one, owed_s in self._owed_s.items() if owed_s < 0.0)})
        self._owed_s[group] -= seconds
        self._pay_off()

    def owed_s(self, group: str) -> float:
        """Seconds that the group should have had and has not."""
        return self._owed_s.get(group, 0.0)

    def _turn(self, group: str, head: float) -> tuple[int, float, float]:
        owed_s = self._owed_s[group]
        if owed_s >= self._window_s:
            return 0, -owed_s, head
        if owed_s > -self._window_s:
            return 1, head, -owed_s / self._weight(group)
        return 2, -owed_s / self._weight(group), head

    def _look(self, busy: Iterable[str]) -> None:
        """Note the groups with work; one that has none any more keeps at most `window_s` of what it is owed."""
        now_busy = frozenset(busy)
        for group in now_busy - self._owed_s.keys():
            self._owed_s[group] = 0.0
        for group in self._busy - now_busy:
            self._give_up(group, self._window_s, now_busy)
        self._busy = now_busy

    def _pay_off(self) -> None:
        """Limit idle groups to `window_s` again: their debts are paid by others' charges, and no more than that."""
        for group in self._owed_s.keys() - self._busy:
            self._give_up(group, self._window_s, self._busy)

    def _give_up(self, group: str, keeps_s: float, others: frozenset[str]) -> None:
        surplus_s = self._owed_s[group] - keeps_s
        if surplus_s > 0.0 and others:
            self._owed_s[group] -= surplus_s
            self._spread(surplus_s, set(others))

    def _spread(self, seconds: float, groups: set[str]) -> None:
        total = sum(self._weight(group) for group in groups)
        for group in groups:
            self._owed_s[group] += seconds * self._weight(group) / total

    def _weight(self, group: str) -> float:
        return self._weights.of_group(group)

    def __repr__(self) -> str:
        owed = ", ".join(f"{group} {owed_s * 1e3:+.0f} ms" for group, owed_s in sorted(self._owed_s.items()))
        return f"<FairShare owed: {owed or 'nothing'}>"
