"""The ejection policy limits which failing targets are excluded, and loads a target slowly when it is back.

**Never everything.** A breaker sees one target. When half of the fleet looks broken, the fault is more likely in what
they share (the network, the requests, this gateway) and taking them all out turns bad answers into none. So:

    ejected       its breaker or its path's is not closed: it gets probes and nothing else (`core/placement/probing.py`)
    over half of the edges     edges stay in use, each weighed by the chance that it answers at all (`TargetView.trust`)
    over half of all targets   panic: pools stay in use as well, hedging and exploration are off: load is no cure

One alone is therefore never taken out, and of two at most one. Targets whose link is down are not ejected but gone:
they cannot be used, whatever is decided, and count for neither side.

**Slow start.** A process that has just started, or has just been trusted again, has cold caches, and looks idle to
every gateway at once. For ten seconds its *capacity* counts as max(10 %, t / 10 s) of what it is. Of the ways to say
that to a placement by predicted finish, the *wait* is stretched by the inverse of the share: one request at a time is
served as predicted and so is predicted as before, which keeps chances honest and shows whether it works; a second,
which would have to queue, sees a queue that drains at a tenth of the speed and goes elsewhere. Stretching the compute
time too would keep it from being asked at all while an idle twin is there, until ten seconds are over and all
requests come at once, which slow start is to prevent. A cap on its share of the traffic would have to know what
share it should have; the predicted finish knows that already.

When the fleet itself is new no other target is warm: then none starts slowly. A connection that comes back to
the same process finds warm caches, and a path that heals says nothing of the process at its end: neither starts slowly.
Nor does a target that had stalled and answers again: its process is the same, a worker of it that was replaced was
warmed before it was ready, and a pool that had stood still for a moment under load was thought ten times as busy for
seconds.

Invariants: 0 <= ejected <= up, of edges and of all; a share is within [0.1, 1] and does not fall with time. All O(1).
Source: docs/design/routing.md, "Ejection limits and slow start"; Envoy's max_ejection_percent, panic threshold and slow
start.
"""

from __future__ import annotations

from typing import Final

SLOW_START_S: Final = 10.0
_LEAST_SHARE: Final = 0.1


class EjectionPolicy:
    """Mutable: `count` each target as it is now, `forget` those that are gone. `edges_spared` and `panic` follow."""

    __slots__ = ("_ejected", "_usable", "began_at", "edges_spared", "panic")

    def __init__(self) -> None:
        self.began_at: float | None = None  # when the fleet's first target was added
        self.edges_spared = False  # ejected edges are used all the same
        self.panic = False  # all that are ejected are
        self._usable = _TargetCounts()  # targets that could be used
        self._ejected = _TargetCounts()  # those of them that are ejected

    @property
    def ejected(self) -> tuple[str, ...]:
        """Targets that could be used and are ejected, in the order in which that happened."""
        return tuple(self._ejected.members)

    def count(self, target_id: str, *, edge: bool, usable: bool, ejected: bool) -> None:
        """A target is as the arguments say, whatever it was before."""
        self._usable.note(target_id, edge, usable)
        self._ejected.note(target_id, edge, usable and ejected)
        self.edges_spared = 2 * self._ejected.edges > self._usable.edges
        self.panic = 2 * len(self._ejected.members) > len(self._usable.members)

    def forget(self, target_id: str) -> None:
        self.count(target_id, edge=False, usable=False, ejected=False)

    def spares(self, *, edge: bool) -> bool:
        """Whether an ejected target of this kind is used all the same."""
        return self.panic or (edge and self.edges_spared)

    def __repr__(self) -> str:
        mood = " PANIC" if self.panic else " edges spared" if self.edges_spared else ""
        return f"<EjectionPolicy {len(self._ejected.members)} of {len(self._usable.members)} ejected{mood}>"


class _TargetCounts:
    """Mutable: the targets counted, and how many of them are edges."""

    __slots__ = ("edges", "members")

    def __init__(self) -> None:
        self.members: dict[str, bool] = {}  # id → whether it is an edge
        self.edges = 0

    def note(self, target_id: str, edge: bool, belongs: bool) -> None:
        if belongs and target_id not in self.members:
            self.members[target_id] = edge
            self.edges += edge
        elif not belongs:
            self.edges -= self.members.pop(target_id, False)


def slow_start_share(since_s: float) -> float:
    """The share of its capacity that a target counts for, so long after it came into use."""
    return min(1.0, max(_LEAST_SHARE, since_s / SLOW_START_S))
