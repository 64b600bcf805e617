"""Found targets are what the sources of discovery say together: which targets there are, and from which source each is.

A source says its whole set each time, so that what it leaves out is gone. Four rules turn the sets into one fleet:

    a source that is away        what it last said holds; links decide which of its targets are dead
    one id from two sources      the first one that said it keeps it, and the other is refused by name until then
    a target that is left out    takes nothing new at once, and is dropped `LINGER_S` later, when nothing is under way
                                 there, or at the bound for draining whatever is under way
    a target reported as lost    is used for as long as its link works: a link outranks what others say of a process;
                                 then it is dropped, until its source says it without that

The time between leaving out and dropping is for hiccups: a target that comes back within it has lost nothing of what
was learned of it. An id outlives addresses: a target that moves keeps its id, and with it the same history.

Invariants: each id has one owner; `say` is the only way into the set, and `drop` the only way out of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.core.fleet.target import TargetSpec

LINGER_S: Final = 10.0  # a target that is left out for less than this comes back with all that was learned of it
STATIC: Final = "static"  # the source that is the configuration's own list
MOST_TARGETS: Final = 4096  # of one source


@dataclass(frozen=True, slots=True)
class Found:
    """A target that a source says is there."""

    spec: TargetSpec
    draining: bool = False  # it finishes what it has, and takes nothing new
    lost: bool = False  # the source has reasons to believe it dead: it stays for as long as its link works


@dataclass(frozen=True, slots=True)
class FoundTarget:
    """A target of the whole set, and the source that it is from. `leaving` is why it takes nothing new, or ""."""

    found: Found
    source: str
    leaving: str = ""
    left_at: float | None = None  # when its source left it out

    @property
    def spec(self) -> TargetSpec:
        return self.found.spec


@dataclass(slots=True)
class SourceState:
    """One source: what it said last and when, what ails it, and what of its targets is refused, by id."""

    name: str
    heard_at: float | None = None  # when it last said what there is
    away_since: float | None = None
    why: str = ""  # it is away
    warning: str = ""  # what of its last answer cannot be used
    warned_at: float = 0.0
    claims: dict[str, Found] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)  # reported as lost, and dropped: not to be opened again for that
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)  # the reason, and since when

    @property
    def answered(self) -> bool:
        """Whether it has said anything at all, were it that it cannot."""
        return self.heard_at is not None or self.away_since is not None

    def __repr__(self) -> str:
        state = f"away ({self.why})" if self.why else "heard" if self.heard_at is not None else "not heard yet"
        return f"<SourceState {self.name} {state}, {len(self.claims)} targets>"


class FoundTargets:
    """Mutable: `say` and `away` take in what sources report, `targets` is the set, `drop` takes out what is over.

    Args:
        static: the targets of the configuration, which never change.
        sources: the names of the other sources; where two say the same id at once, the earlier one keeps it.
        drain_s: so long a target that was left out may go on with what is under way there.
    """

    def __init__(
        self, static: Iterable[TargetSpec] = (), sources: Iterable[str] = (), *, drain_s: float = 30.0
    ) -> None:
        self.sources = {name: SourceState(name) for name in (STATIC, *sources)}
        self.targets: dict[str, FoundTarget] = {}
        self._drain_s = drain_s
        self.say(STATIC, [Found(spec) for spec in static], 0.0)

    @property
    def settled(self) -> bool:
        """Whether every source has been heard or found to be away."""
        return all(source.answered for source in self.sources.values())

    def say(self, source: str, found: Iterable[Found], now: float, *, warning: str = "") -> None:
        """Take in the whole set of one source, with what of its answer cannot be used."""
        state = self.sources[source]
        if warning and not state.warning:
            state.warned_at = now
        state.warning = warning
        state.heard_at, state.away_since, state.why = now, None, ""
        refused: dict[str, str] = {}
        state.claims = {}
        for one in found:
            known = state.claims.setdefault(one.spec.id, one)
            if known is not one and known.spec != one.spec:
                refused[one.spec.id] = (
                    f"{source} says it twice, at {known.spec.address} and at {one.spec.address}: the first is used"
                )
        state.given_up &= {one.spec.id for one in state.claims.values() if one.lost}
        for target_id in state.given_up:
            del state.claims[target_id]
        self._settle(now, {source: refused})

    def away(self, source: str, why: str, now: float) -> None:
        """The source cannot be asked, or says what nobody can read: what it last said holds."""
        state = self.sources[source]
        state.away_since = now if state.away_since is None else state.away_since
        state.why = why

    def drop(self, now: float, *, busy: Callable[[str], bool], up: Callable[[str], bool]) -> list[str]:
        """Take out and return the targets that are over.

        Args:
            busy: whether something is under way at the target.
            up: whether its link works.
        """
        over = [target_id for target_id, one in self.targets.items() if self._is_over(one, now, busy, up)]
        for target_id in over:
            owner = self.sources[self.targets.pop(target_id).source]
            if owner.claims.pop(target_id, None) is not None:  # it was reported lost
                owner.given_up.add(target_id)
        if over:
            self._settle(now, {})
        return over

    @property
    def may_drop(self) -> bool:
        """Whether a target may be over soon."""
        return any(one.left_at is not None or one.found.lost for one in self.targets.values())

    def refusals(self) -> Iterable[tuple[str, str, str, float]]:
        """(source, id, reason, since) of each target that is refused."""
        for source in self.sources.values():
            for target_id, (why, since) in source.refused.items():
                yield source.name, target_id, why, since

    def _is_over(self, one: FoundTarget, now: float, busy: Callable[[str], bool], up: Callable[[str], bool]) -> bool:
        if one.left_at is None:
            return one.found.lost and not up(one.spec.id)
        if now < one.left_at + min(LINGER_S, self._drain_s):
            return False
        return now >= one.left_at + self._drain_s or not busy(one.spec.id)

    def _settle(self, now: float, refused: Mapping[str, Mapping[str, str]]) -> None:
        """Give each id to one source: to the one that has it, else to the first that says it."""
        for state in self.sources.values():
            doubly = refused.get(state.name)
            kept = doubly if doubly is not None else _without_conflicts(state)
            reasons = dict(kept)
            for target_id, found in state.claims.items():
                held = self.targets.get(target_id)
                if held is None or held.source == state.name or target_id not in self.sources[held.source].claims:
                    self.targets[target_id] = FoundTarget(found, state.name, _leaving(found, state.name))
                else:
                    reasons[target_id] = f"{held.source} said it first, at {held.spec.address}: that one is used"
            state.refused = {one: (why, state.refused.get(one, ("", now))[1]) for one, why in reasons.items()}
        for target_id, one in self.targets.items():
            if one.left_at is None and target_id not in self.sources[one.source].claims:
                why = f"draining: {one.source} does not list it any more"
                self.targets[target_id] = FoundTarget(one.found, one.source, why, now)

    def __repr__(self) -> str:
        return f"<FoundTargets {len(self.targets)} of {len(self.sources)} sources>"


def _leaving(found: Found, source: str) -> str:
    return f"draining: {source} says that it ends" if found.draining else ""


def _without_conflicts(state: SourceState) -> dict[str, str]:
    """The refusals within the source itself; those against other sources are decided anew."""
    return {one: why for one, (why, _) in state.refused.items() if why.startswith(f"{state.name} says it twice")}
