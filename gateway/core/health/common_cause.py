"""The common cause doubts the targets of a tier that have not answered since their siblings fell silent.

A stalled target is found when it has owed an answer for a fifth of a second and more, and each is found by itself. What
stalls several devices at once (an update, a power dip, a hot room, a driver) stalls most of them, so while the first
ones are known to have stalled the others look well only because nothing has come from them yet; and a request whose
attempt moves from one to the next has soon used up its budget. So with two of a tier stalled within `RECENT_S`:

    onset     when the earliest of them began to owe an answer
    heard     siblings that have answered since the onset: they are well, and trusted as ever
    trust     (heard + 1) / (heard + stalled + 2), of a sibling that has not      Laplace's rule of succession

With many heard and two stalled this is next to 1 and nothing changes. A target is out of doubt with its first answer,
and all are when the stalls are older than `RECENT_S`: from then on each has its own evidence, for or against it.

Sooner than that a stall of all is seen from their silence together: where `_LEAST_OWING` of them have owed an answer
for `_OWED_S`, and none of the tier has answered anything since the first of these owed its own, they count as stalled,
and are doubted themselves, as the others are. The next answer of any of them ends that. So it is with one that is a new
process: its stall was another's, but what struck that may strike it. While nobody answers, stalls are old after
`SILENT_S` only.

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
SILENT_S: Final = 10.0
_LEAST_STALLS: Final = 2  # one is one's own
_EVERY_S: Final = 0.02
_LEAST_OWING: Final = 3
_OWED_S: Final = 0.05  # beyond what an answer is usually late by: two margins are in its due time


class _Stall(NamedTuple):
    began_at: float  # when it began to owe an answer
    found_at: float
    is_certain: bool = True  # found by itself; else by the silence of all


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
        stall = self.stalls.get(target_id)
        if stall is not None:
            self.stalls[target_id] = stall._replace(is_certain=False)

    def forget(self, target_id: str) -> None:
        self._watches.pop(target_id, None)
        self.stalls.pop(target_id, None)

    def stalled(self, target_id: str, now: float) -> None:
        """The target was found to owe an answer for longer than its patience."""
        progress = self._watches.get(target_id)
        if progress is not None:  # it may have been removed with attempts under way
            self.stalls[target_id] = _Stall(now - progress.overdue_s(now), now)
            self._worked_out_at = 0.0

    def owes(self, now: float) -> None:
        """An answer of one of the targets is overdue: see whether all of them are silent. O(targets of the tier)."""
        owing = {one: watch.overdue_s(now) for one, watch in self._watches.items()}
        owing = {one: owed_s for one, owed_s in owing.items() if owed_s >= _OWED_S}
        if len(owing) < _LEAST_OWING:
            return
        onset = now - max(owing.values())
        if any(watch.answered_at >= onset for watch in self._watches.values()):
            return
        for one, owed_s in owing.items():
            if one not in self.stalls:
                self.stalls[one] = _Stall(now - owed_s, now, is_certain=False)
        self._worked_out_at = 0.0

    def trust(self, target_id: str, now: float) -> float:
        """How likely the target is not struck by what its siblings were struck by."""
        if now - self._worked_out_at >= _EVERY_S or now < self._worked_out_at:
            self._work_out(now)
        if self._trust == 1.0:
            return 1.0
        stall = self.stalls.get(target_id)
        if stall is not None and stall.is_certain:
            return 1.0  # its own breaker speaks of it
        progress = self._watches.get(target_id)
        return 1.0 if progress is None or progress.answered_at >= self._onset else self._trust

    def _work_out(self, now: float) -> None:
        heard_at = max([one.answered_at for one in self._watches.values()], default=0.0)
        for target_id, stall in list(self.stalls.items()):
            answered_at = self._watches[target_id].answered_at if stall.is_certain else heard_at
            old_s = RECENT_S if heard_at > stall.found_at else SILENT_S
            if now - stall.found_at > old_s or answered_at > stall.found_at:
                del self.stalls[target_id]
        self._worked_out_at, self._trust = now, 1.0
        if len(self.stalls) >= _LEAST_STALLS:
            self._onset = min(one.began_at for one in self.stalls.values())
            heard = sum(one.answered_at >= self._onset for one in self._watches.values())
            self._trust = (heard + 1.0) / (heard + len(self.stalls) + 2.0)

    def __repr__(self) -> str:
        return f"<CommonCause {len(self.stalls)} of {len(self._watches)} stalled, the rest trusted {self._trust:.2f}>"
