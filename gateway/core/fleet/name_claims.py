"""Name claims notice two live agents of one device name, and decide which of the two keeps the name.

Every start of an agent has an identifier (`boot`) that it sends whenever it begins a session: over MQTT in its birth,
on a stream that it dials in its hello. A restart is one new identifier, and the old one is never seen again. So an
identifier that comes back after another one is proof that both agents live: they take the name from each other, and
each of them looks like a device that reconnects.

    A  B           B restarted, or took A's place: nothing is wrong
    A  B  A        two agents: a conflict begins
    … the refused one claims again      refused, while the other has claimed since, or is seen to be there
    … and again, the other has not      the other is gone: the name is the claimant's, and the conflict is over

The agent that has run longest keeps the name. What was copied with its name (a card, an image, a configuration) starts
later than what it was copied from, and callers, calibration and rollouts know the first. Each agent says how long it
has run, so several gateways decide alike, whichever they heard of first. Of two that started in one instant the lesser
identifier keeps the name.

Invariants: at most one agent of a name is not refused; the memory is bounded in names and in starts of each. An agent
without an identifier (an older version) is never refused.
It can be wrong where an agent was stopped for a while (SIGSTOP, a suspended machine) and its successor serves: the
older one returns, and keeps the name until an operator ends it. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from tidegate.fleet.name_conflict import MOST_STAND_DOWN_S, MOST_WORDS, NAME_TAKEN

MOST_NAMES: Final = 16_384
MOST_STARTS: Final = 8  # of one name
SETTLE_S: Final = 10.0  # a refused agent may say the same again before it has heard
HOLD_S: Final = 2.0 * MOST_STAND_DOWN_S  # without a claim of the refused agent


class NameClaim(NamedTuple):
    """One start of an agent, as it was last heard."""

    boot: str
    epoch: int
    address: str
    started_at: float  # by this gateway's clock

    def in_words(self, now: float) -> str:
        return f"{self.address or 'without an address'}, epoch {self.epoch}, started {now - self.started_at:.0f} s ago"


@dataclass(slots=True)
class NameConflict:
    """Two agents of one name: the one that keeps it, and the one that is refused."""

    device: str
    kept: NameClaim
    refused: NameClaim
    since: float
    kept_at: float  # when each was last heard to claim the name
    refused_at: float

    def evidence(self, now: float) -> str:
        """Both sides, for people."""
        return (
            f"two live agents have this name; kept, as it has run longer: {self.kept.in_words(now)}; "
            f"refused: {self.refused.in_words(now)}"
        )

    def refusal(self, now: float) -> str:
        """What the refused agent is told."""
        return f"{NAME_TAKEN}, and has run longer: {self.kept.in_words(now)}"[:MOST_WORDS]


class NameClaims:
    """Mutable: `claim` takes each session's beginning; `standing` returns the conflicts that last."""

    def __init__(self) -> None:
        # Called when a conflict begins (True) and when it has ended.
        self.on_change: Callable[[NameConflict, bool, float], None] = lambda _conflict, _begun, _now: None
        self._starts: OrderedDict[str, OrderedDict[str, NameClaim]] = OrderedDict()
        self._conflicts: dict[str, NameConflict] = {}

    def remembered(self, device: str, claim: NameClaim) -> None:
        """Note what a broker kept: it says who had the name, and not that it lives. Its start is unknown."""
        if claim.boot and device not in self._starts:
            self._note(device, claim._replace(started_at=inf))

    def claim(self, device: str, claim: NameClaim, now: float) -> NameConflict | None:
        """Note that an agent has begun a session; returns the conflict by which it is refused, or None."""
        if not claim.boot:
            return None
        self._end_old(device, now)
        starts = self._starts.get(device, OrderedDict[str, NameClaim]())
        last = next(reversed(starts.values()), None)
        if last is not None and last.boot != claim.boot and claim.boot in starts:
            self._returned(device, claim, last, now)
        self._note(device, claim)
        conflict = self._conflicts.get(device)
        if conflict is None:
            return None
        if claim.boot == conflict.kept.boot:
            conflict.kept, conflict.kept_at = claim, now
        elif claim.boot == conflict.refused.boot:
            if conflict.kept_at < conflict.refused_at and now - conflict.refused_at >= SETTLE_S:
                self._end(conflict, now)
                return None
            conflict.refused, conflict.refused_at = claim, now
            return conflict
        return None

    def still_here(self, device: str, boot: str, now: float) -> None:
        """Note that the agent's stream stands: the other side of a conflict need not wait for its next claim."""
        conflict = self._conflicts.get(device)
        if conflict is not None and boot == conflict.kept.boot:
            conflict.kept_at = now

    def keeps(self, device: str, boot: str) -> bool:
        """Whether a conflict stands and this agent keeps the name."""
        conflict = self._conflicts.get(device)
        return conflict is not None and conflict.kept.boot == boot

    def refusal_of(self, device: str, boot: str, now: float) -> str:
        """What an agent whose stream stands is told; "" where it is not refused."""
        conflict = self._conflicts.get(device)
        return conflict.refusal(now) if conflict is not None and conflict.refused.boot == boot else ""

    def must_hear(self, device: str, boot: str) -> bool:
        """Whether a claim counts although its epoch is past: of a start that is new here, or a side of a conflict.

        Any other may be a late message of a start that is over.
        """
        conflict = self._conflicts.get(device)
        if conflict is not None and boot in (conflict.kept.boot, conflict.refused.boot):
            return True
        return boot not in self._starts.get(device, ())

    def refused_by(self, device: str, epoch: int) -> NameConflict | None:
        """The conflict by which the agent is refused that speaks in this epoch; None where it is not refused.

        An epoch that both agents have says nothing about who speaks.
        """
        conflict = self._conflicts.get(device)
        return conflict if conflict is not None and conflict.refused.epoch == epoch != conflict.kept.epoch else None

    def in_conflict(self, device: str) -> bool:
        return device in self._conflicts

    def standing(self, now: float) -> list[NameConflict]:
        """The conflicts that last, the oldest first."""
        for device in list(self._conflicts):
            self._end_old(device, now)
        return sorted(self._conflicts.values(), key=lambda one: one.since)

    def forget(self, device: str) -> None:
        """Forget a device that an operator has deleted."""
        self._starts.pop(device, None)
        self._conflicts.pop(device, None)

    def _returned(self, device: str, claim: NameClaim, last: NameClaim, now: float) -> None:
        held = self._conflicts.get(device)
        kept, refused = sorted((claim, last), key=_longest_first)
        if held is not None and {claim.boot, last.boot} == {held.kept.boot, held.refused.boot}:
            return  # decided already: how long each has run does not change which has run longer
        if held is not None and held.kept.boot not in (claim.boot, last.boot):
            kept = min(kept, held.kept, key=_longest_first)
        # A claim that is not this one was made before now, and the claimant has claimed since.
        kept_at, refused_at = (now, held.refused_at if held else -inf) if kept is claim else (now, now)
        self._conflicts[device] = conflict = NameConflict(
            device, kept, refused, held.since if held else now, kept_at, refused_at
        )
        if held is None:
            self.on_change(conflict, True, now)

    def _note(self, device: str, claim: NameClaim) -> None:
        starts = self._starts.setdefault(device, OrderedDict())
        self._starts.move_to_end(device)
        starts[claim.boot] = claim
        starts.move_to_end(claim.boot)
        if len(starts) > MOST_STARTS:
            starts.popitem(last=False)
        if len(self._starts) > MOST_NAMES:
            forgotten, _ = self._starts.popitem(last=False)
            self._conflicts.pop(forgotten, None)

    def _end_old(self, device: str, now: float) -> None:
        conflict = self._conflicts.get(device)
        if conflict is not None and now - max(conflict.since, conflict.refused_at) > HOLD_S:
            self._end(conflict, now)

    def _end(self, conflict: NameConflict, now: float) -> None:
        del self._conflicts[conflict.device]
        self.on_change(conflict, False, now)

    def __repr__(self) -> str:
        return f"<NameClaims of {len(self._starts)} names, {len(self._conflicts)} conflicts>"


def _longest_first(claim: NameClaim) -> tuple[float, str]:
    return claim.started_at, claim.boot
