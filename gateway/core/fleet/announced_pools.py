"""Announced pools are the pools that say over MQTT that they are there, folded from messages in any order.

    state          the pool is there, at this address; a later one (epoch, sequence) of its process replaces it
    death, lost    the will of the newest session: the pool counts as lost, and is used for as long as its link works
    death, shutdown   the pool's own word: it is there no more
    silence        for `SILENT_S` of a session with the broker, though pools speak every `RESAY_S`: lost as well

While there is no broker nobody ages: silence then says nothing of a pool. A will counts for its own session only, so
that one which comes late does not end the session that followed.

A pool that starts again is another process (`boot`) with a greater epoch, and takes its own place, at whatever address.
Two live processes of one name take turns instead: a process that gave way and speaks again shows it. Then the earlier
one keeps the name, and the other is reported beside it, so that the fold of sources refuses it by name, until one of
the two has been silent for `SILENT_S`.

Invariants: the order of messages within a process does not change the outcome; at most `most` pools are known. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from gateway.core.fleet.found_targets import MOST_TARGETS
from tidegate.fleet.pool_messages import RESAY_S, PoolDeath, PoolState

SILENT_S: Final = 3.5 * RESAY_S  # three words in a row were lost
_NAMED: Final = 16  # pools without room that are named
_BOOTS: Final = 4  # former processes of a name that are remembered


class AnnouncedPool(NamedTuple):
    """A pool that is there, by its own word. `lost`: there are reasons to believe it dead."""

    state: PoolState
    lost: bool


@dataclass(slots=True)
class _Pool:
    state: PoolState
    heard_at: float
    death: PoolDeath | None = None
    cleared: bool = False  # an operator removed its retained state
    given_way: deque[str] = field(default_factory=lambda: deque(maxlen=_BOOTS))  # former processes
    rival: PoolState | None = None
    rival_at: float = -inf

    def is_rival(self, boot: str) -> bool:
        """Whether this process claims the name beside the one that has it."""
        return self.rival is not None and self.rival.boot == boot

    def contest(self, rival: PoolState, now: float) -> None:
        self.rival, self.rival_at = rival, now

    def settle(self) -> None:
        self.rival = None

    @property
    def dead(self) -> PoolDeath | None:
        """The death of the newest session, if it has ended."""
        death, state = self.death, self.state
        return death if death is not None and death.boot == state.boot and death.epoch >= state.epoch else None


class AnnouncedPools:
    """Mutable: `state`, `death`, `cleared` and `session` take in what the broker brings; `pools` is what is there.

    Args:
        most: pools that are known at once; one more takes the place of a lost one, or is refused.
    """

    def __init__(self, *, most: int = MOST_TARGETS) -> None:
        self.refused: dict[str, None] = {}  # pools for which there is no room
        self._most = most
        self._pools: dict[str, _Pool] = {}
        self._deaths: dict[str, PoolDeath] = {}  # of pools whose state has not come yet
        self._session_at: float | None = None

    def session(self, *, up: bool, now: float) -> None:
        """A session with the broker has begun, or ended."""
        self._session_at = now if up else None

    def state(self, state: PoolState, now: float) -> bool:
        """Take in a state; whether anything has changed by it."""
        known = self._pools.get(state.pool)
        if known is None:
            return self._enter(state, now)
        if state.boot == known.state.boot:
            return self._same_process(known, state, now)
        return self._other_process(known, state, now)

    def death(self, death: PoolDeath) -> bool:
        """Take in a death; whether anything has changed by it."""
        known = self._pools.get(death.pool)
        if known is None:
            self._keep(death)
            return False
        if death.reason == "shutdown" and known.is_rival(death.boot):
            known.settle()
            return True
        before = known.dead
        if before is not None and not _outranks(death, before):
            return False
        known.death = death
        if death.reason == "shutdown" and known.dead is not None and known.rival is not None:
            known.state, known.heard_at = known.rival, known.rival_at
            known.settle()
            return True
        return known.dead is not None

    def cleared(self, pool: str) -> bool:
        """The pool's retained state was removed: a live pool says it again, and any other counts as lost."""
        known = self._pools.get(pool)
        if known is None or known.cleared:
            return False
        known.cleared = True
        return True

    def pools(self, now: float) -> Iterator[AnnouncedPool]:
        """What is there now; of a name that two live processes claim, the one that keeps it comes first."""
        for one in self._pools.values():
            if one.dead is None or one.dead.reason == "lost":
                yield AnnouncedPool(one.state, self._is_lost(one, now))
                if one.rival is not None and now < one.rival_at + SILENT_S:
                    yield AnnouncedPool(one.rival, False)

    def next_wake(self, now: float) -> float:
        """When silence alone will change what is there; infinity where it will not."""
        if self._session_at is None:
            return inf
        silent = (self._silent_at(one) for one in self._pools.values() if not self._is_lost(one, now))
        rivals = (one.rival_at + SILENT_S for one in self._pools.values() if one.rival is not None)
        return min((at for at in (*silent, *rivals) if at > now), default=inf)

    def _keep(self, death: PoolDeath) -> None:
        before = self._deaths.get(death.pool)
        if before is None and len(self._deaths) >= self._most:
            return
        if before is None or before.epoch < death.epoch:
            self._deaths[death.pool] = death

    def _enter(self, state: PoolState, now: float) -> bool:
        if len(self._pools) >= self._most and not self._make_room(now):
            if len(self.refused) < _NAMED:
                self.refused[state.pool] = None
            return len(self.refused) == 1
        self.refused.pop(state.pool, None)
        self._pools[state.pool] = _Pool(state, now, self._deaths.pop(state.pool, None))
        return True

    def _make_room(self, now: float) -> bool:
        lost = min((one for one in self._pools.values() if self._is_lost(one, now)), key=_heard_at, default=None)
        if lost is not None:
            del self._pools[lost.state.pool]
        return lost is not None

    def _same_process(self, known: _Pool, state: PoolState, now: float) -> bool:
        if state.order < known.state.order:
            return False
        was_lost = self._is_lost(known, now)
        changed = _content(state) != _content(known.state) or was_lost
        known.state, known.heard_at, known.cleared = state, now, False
        return changed

    def _other_process(self, known: _Pool, state: PoolState, now: float) -> bool:
        gone = self._is_lost(known, now)
        if known.is_rival(state.boot) and not self._is_silent(known, now):
            known.contest(state, now)
            return True
        if state.epoch <= known.state.epoch and not gone:
            return False
        contested = state.boot in known.given_way
        if contested and not self._is_silent(known, now):
            known.contest(known.state, now)
            known.given_way.remove(state.boot)
        elif known.state.boot not in known.given_way:
            known.given_way.append(known.state.boot)
        if known.is_rival(state.boot):
            known.settle()
        known.state, known.heard_at, known.cleared = state, now, False
        return True

    def _is_lost(self, one: _Pool, now: float) -> bool:
        return one.dead is not None or one.cleared or self._is_silent(one, now)

    def _is_silent(self, one: _Pool, now: float) -> bool:
        return self._session_at is not None and now >= self._silent_at(one)

    def _silent_at(self, one: _Pool) -> float:
        assert self._session_at is not None
        return max(one.heard_at, self._session_at) + SILENT_S

    def __len__(self) -> int:
        return len(self._pools)

    def __repr__(self) -> str:
        return f"<AnnouncedPools {len(self._pools)} known, {len(self.refused)} without room>"


def _outranks(death: PoolDeath, before: PoolDeath) -> bool:
    """Of two deaths of a name the one that counts: the same process's, later, or its own word after a will."""
    if death.boot != before.boot:
        return False
    return (death.epoch, death.reason == "shutdown") > (before.epoch, before.reason == "shutdown")


def _heard_at(one: _Pool) -> float:
    return one.heard_at


def _content(state: PoolState) -> tuple[object, ...]:
    return state.address, state.zone, state.draining
