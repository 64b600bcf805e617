"""The common cause doubts the targets of a tier that have not answered since two of their siblings stalled.

A stalled target is found when it has owed an answer for a fifth of a second and more, and each is found by itself. What
stalls several devices at once (an update, a power dip, a hot room, a driver) stalls most of them, so while the first
ones are known to have stalled the others look well only because nothing has come from them yet; and a request whose
attempt moves from one to the next has soon used up its budget. So with two of a tier stalled within `RECENT_S`:

    onset     when the earliest of them began to owe an answer
    heard     siblings that have answered since the onset: they are well, and trusted as ever
    trust     (heard + 1) / (heard + stalled + 2), of a sibling that has not      Laplace's rule of succession

With many heard and two stalled this is next to 1 and nothing changes. A target is out of doubt with its first answer,
and all are when the stalls are older than `RECENT_S`: from then on each has its own evidence, for or against it.

It can be wrong where two stall by chance and the rest is idle: these are then asked less for `RECENT_S` seconds.
Invariants: a trust is in (0, 1]; a target that has answered since the onset has 1. O(targets of the tier) at most every
`_EVERY_S` while there are two stalls, else O(1).
Source: docs/design/faults.md, "Gray failure"; Marshall and Olkin, "A Multivariate Exponential Distribution", 1967
(failures by a common shock); Laplace's rule of succession.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.health.progress import ProgressWatch

RECENT_S: Final = 3.0
_LEAST_STALLS: Final = 2  # one is one's own
_EVERY_S: Final = 0.02


class _Stall(NamedTuple):
    began_at: float  # when it began to owe an answer
    found_at: float


class CommonCause:
    """Mutable: one for the targets of a tier. `stalls` is read at each decision: without any nothing is doubted."""

    __slots__ = ("_onset", "_trust", "_watches", "_worked_out_at", "stalls")

    def __init__(self) -> None:
        self.stalls: dict[str, _Stall] = {}
        self._watches: dict[str, ProgressWatch] = {}
        self._worked_out_at = 0.0
        self._onset = 0.0
        self._trust = 1.0

    def watch(self, target_id: str, progress: ProgressWatch) -> None:
        """The target, with its present process, is one of the siblings."""
        self._watches[target_id] = progress
        self.stalls.pop(target_id, None)

    def forget(self, target_id: str) -> None:
        self._watches.pop(target_id, None)
        self.stalls.pop(target_id, None)

    def stalled(self, target_id: str, now: float) -> None:
        """The target was found to owe an answer for longer than its patience."""
        progress = self._watches.get(target_id)
        if progress is not None:  # it may have been removed with attempts under way
            self.stalls[target_id] = _Stall(now - progress.overdue_s(now), now)
            self._worked_out_at = 0.0

    def trust(self, target_id: str, now: float) -> float:
        """How likely the target is not struck by what its siblings were struck by."""
        if now - self._worked_out_at >= _EVERY_S or now < self._worked_out_at:
            self._work_out(now)
        if self._trust == 1.0 or target_id in self.stalls:  # of the latter its own breaker speaks
            return 1.0
        progress = self._watches.get(target_id)
        return 1.0 if progress is None or progress.answered_at >= self._onset else self._trust

    def _work_out(self, now: float) -> None:
        for target_id, stall in list(self.stalls.items()):
            if now - stall.found_at > RECENT_S or self._watches[target_id].answered_at > stall.found_at:
                del self.stalls[target_id]
        self._worked_out_at, self._trust = now, 1.0
        if len(self.stalls) >= _LEAST_STALLS:
            self._onset = min(one.began_at for one in self.stalls.values())
            heard = sum(one.answered_at >= self._onset for one in self._watches.values())
            self._trust = (heard + 1.0) / (heard + len(self.stalls) + 2.0)

    def __repr__(self) -> str:
        return f"<CommonCause {len(self.stalls)} of {len(self._watches)} stalled, the rest trusted {self._trust:.2f}>"
