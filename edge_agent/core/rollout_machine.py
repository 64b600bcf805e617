"""The rollout machine takes one model from a signed wish to the generation that answers, as a transition table.

    PLANNED → DOWNLOADING → VERIFIED → STAGED → LOADING → WARM → PROBED → ACTIVE → COMMITTED
       ⇅ DEFERRED (metered · window · ram · disk · thermal)      └──────┬──────┘
       └──────────────┬──────────────┘                              ROLLING_BACK → ROLLED_BACK (reason)
                FAILED (reason)

Each state has one piece of work (`RolloutWork`), a timeout, and rules for what may happen meanwhile. Up to STAGED
nothing that serves has been touched, so a problem there ends in FAILED. From LOADING on a second worker runs, or the
first one was stopped, and there is something to undo: ROLLING_BACK, whose work is to have the old generation answer
again. LOADING begins with reading the files: what the disk fails at there is deferred, with nothing left to undo.

A power cut is an event like others. The agent boots with what is *committed*, always; so a rollout that had a worker
begins it again from STAGED and has used up one of its `exits`. After `max_exits` of them, of the worker or the agent,
it is a crash loop and goes back for good. The commit itself is one rename on disk, and the journal follows it: a
rollout that wakes up as ACTIVE with its own generation committed was cut between the two, and is COMMITTED.

A lost link is no event: it neither commits nor rolls back. It only stops the clock of the soak (`soak.py`).

Invariants (`test_rollout_machine`): every sequence of events ends in COMMITTED, ROLLED_BACK or FAILED once its work is
allowed to end or time out; the new generation is committed if and only if the state is COMMITTED; without it there is
a reason.
`edge_agent/delivery/deployer.py` does the work, and `reconcile.py` decides which model is next.

Source: docs/design/edge-state.md, "Rollouts and crash loops"; RAUC (boot attempts), Greengrass (three exits), Mender
#97 (never retry by itself), #931 and mender-convert #46 (the network decides nothing).
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import Final

import msgspec
from msgspec.structs import replace

from tidegate.fleet.reported import RolloutState
from tidegate.rollout.plan import ModelPlan

S = RolloutState
MAX_REASON: Final = 300


class RolloutEvent(StrEnum):
    """The events of a rollout."""

    DONE = "done"  # the state's work succeeded
    FAILED = "failed"  # it cannot succeed, by the plan's or the content's fault
    TIMED_OUT = "timed_out"
    DEFERRED = "deferred"  # not now: a precondition on the device does not hold
    RESUMED = "resumed"  # the reason for the deferral has passed
    WORKER_EXITED = "worker_exited"  # of the new generation
    REBOOTED = "rebooted"  # the agent restarted without an orderly end
    STOPPED = "stopped"  # the agent ends in an orderly way
    SUPERSEDED = "superseded"  # another plan, or none, is wanted


class RolloutWork(StrEnum):
    """The work of the deployer while a rollout is in a state."""

    PLAN = "plan"  # policy and room: may it begin?
    FETCH = "fetch"  # every chunk of every artefact, then size, digest and content
    STAGE = "stage"  # a version's folder out of the store
    GATE = "gate"  # memory, heat and window; decides between hand-over and stop-start
    LOAD = "load"  # a worker of its own, loaded and measured
    PROBE = "probe"  # golden cases, side by side with the generation that runs
    ACTIVATE = "activate"  # requests go to the new generation
    SOAK = "soak"  # real requests; ends with the commit on disk
    ROLL_BACK = "roll_back"  # requests go to the old generation again, and the new worker ends


WORK: Final = {
    S.PLANNED: RolloutWork.PLAN, S.DOWNLOADING: RolloutWork.FETCH, S.VERIFIED: RolloutWork.STAGE, S.STAGED:
    RolloutWork.GATE, S.LOADING: RolloutWork.LOAD, S.WARM: RolloutWork.PROBE, S.PROBED: RolloutWork.ACTIVATE, S.ACTIVE:
    RolloutWork.SOAK, S.ROLLING_BACK: RolloutWork.ROLL_BACK,
}  # fmt: skip

_LINE: Final = (
    S.PLANNED, S.DOWNLOADING, S.VERIFIED, S.STAGED, S.LOADING, S.WARM, S.PROBED, S.ACTIVE, S.COMMITTED,
)  # fmt: skip
UNTOUCHED: Final = (S.PLANNED, S.DOWNLOADING, S.VERIFIED, S.STAGED, S.DEFERRED)
_TOUCHED: Final = (S.LOADING, S.WARM, S.PROBED, S.ACTIVE)
_ENDS: Final = (RolloutEvent.FAILED, RolloutEvent.TIMED_OUT, RolloutEvent.SUPERSEDED)

# (state, event) → state. A pair that is not here changes nothing: the event came too late.
TRANSITIONS: Final[dict[tuple[RolloutState, RolloutEvent], RolloutState]] = {
    **{(before, RolloutEvent.DONE): after for before, after in pairwise(_LINE)},
    **{(state, event): S.FAILED for state in UNTOUCHED for event in _ENDS},
    **{(state, event): S.ROLLING_BACK for state in _TOUCHED for event in _ENDS},
    **{(state, RolloutEvent.DEFERRED): S.DEFERRED for state in (*UNTOUCHED[:-1], S.LOADING)},
    **{(state, event): S.STAGED for state in _TOUCHED for event in (RolloutEvent.REBOOTED, RolloutEvent.STOPPED)},
    (S.DEFERRED, RolloutEvent.REBOOTED): S.PLANNED,
    (S.DEFERRED, RolloutEvent.RESUMED): S.PLANNED,
    (S.DEFERRED, RolloutEvent.DEFERRED): S.DEFERRED,  # for another reason now
    **{(state, RolloutEvent.WORKER_EXITED): S.ROLLING_BACK for state in _TOUCHED[:-1]},
    (S.ACTIVE, RolloutEvent.WORKER_EXITED): S.ACTIVE,
    # A rollback that fails leaves the model without a worker here; the rollout ends all the same, with that reason.
    **{
        (S.ROLLING_BACK, event): S.ROLLED_BACK
        for event in (RolloutEvent.DONE, RolloutEvent.FAILED, RolloutEvent.TIMED_OUT)
    },
}
# These wait for the network and the device, all of them together for as long as the plan's deadline says.
_WITHIN_DEADLINE: Final = frozenset({S.PLANNED, S.DOWNLOADING, S.DEFERRED})
# These events use up an exit; after `max_exits` exits the state is left for good.
_EXITS: Final = {(state, RolloutEvent.REBOOTED) for state in _TOUCHED} | {(S.ACTIVE, RolloutEvent.WORKER_EXITED)}
# After these events the content is not tried again by itself under this revision.
_OWN_FAULT: Final = (RolloutEvent.FAILED, RolloutEvent.TIMED_OUT, RolloutEvent.WORKER_EXITED, RolloutEvent.REBOOTED)


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model's rollout as the journal stores it.

    Args:
        scope, revision: the document that asks for it.
        generation: the number that it will have when it is committed; previous: the committed one before it.
        state, reason: its state, and why it left the normal sequence of states.
        exits: how often its worker or the agent exited since it was loaded first.
        spent_s: powered seconds since it was planned, for the deadline; fetched_bytes: for the byte budget.
        blocked: whether this content is not tried again under this revision.
    """

    model: str
    plan: ModelPlan
    scope: str
    revision: int
    generation: int
    previous: int
    urls: tuple[str, ...] = ()
    state: RolloutState = S.PLANNED
    reason: str = ""
    exits: int = 0
    spent_s: float = 0.0
    fetched_bytes: int = 0
    blocked: bool = False

    @property
    def content(self) -> str:
        return self.plan.content

    def __repr__(self) -> str:
        return f"<Rollout {self.model}:{self.plan.version} {self.state}{f' {self.reason!r}' if self.reason else ''}>"


def apply_event(rollout: Rollout, event: RolloutEvent, reason: str = "") -> Rollout:
    """The rollout after an event; the same object when the event changes nothing.

    Args:
        reason: why, for FAILED and DEFERRED; the last trouble, for TIMED_OUT; how, for WORKER_EXITED.
    """
    state = TRANSITIONS.get((rollout.state, event))
    if state is None:
        return rollout
    exits = rollout.exits + ((rollout.state, event) in _EXITS)
    words = _words(rollout, event, reason)
    if (rollout.state, event) in _EXITS and exits >= rollout.plan.soak.max_exits:
        state, words = S.ROLLING_BACK, f"crash_loop: {exits} exits of its worker or of the agent, last: {words}"
    if state is S.ROLLED_BACK:
        words = rollout.reason if event is RolloutEvent.DONE else f"{rollout.reason}; and then {words}"
    elif state not in (S.FAILED, S.ROLLING_BACK, S.DEFERRED):
        words = ""
    blocked = rollout.blocked or (state in (S.FAILED, S.ROLLING_BACK) and event in _OWN_FAULT)
    return replace(rollout, state=state, reason=words[:MAX_REASON], exits=exits, blocked=blocked)


def after_restart(rollout: Rollout, committed: int) -> Rollout:
    """The rollout at the agent's next start, where `committed` is the generation on disk."""
    if rollout.state.is_settled:
        return rollout
    if rollout.generation == committed:
        return replace(rollout, state=S.COMMITTED, reason="")
    return apply_event(rollout, RolloutEvent.REBOOTED)


def left_s(rollout: Rollout, *, in_state_s: float, unspent_s: float) -> float:
    """How much longer the rollout's state may last.

    Args:
        in_state_s: since its work began.
        unspent_s: the part of it that `spent_s` does not have yet. What it has is off the deadline already.
    """
    return timeout_s(rollout) - (unspent_s if rollout.state in _WITHIN_DEADLINE else in_state_s)


def timeout_s(rollout: Rollout) -> float:
    """How long the rollout's state may last: what is left of the deadline, or a time of its own from entering it."""
    plan = rollout.plan
    if rollout.state in _WITHIN_DEADLINE:
        return max(0.0, plan.net.deadline_s - rollout.spent_s)
    match rollout.state:
        case S.VERIFIED | S.STAGED | S.PROBED:
            return 120.0  # a folder of links, a look at the memory, a switch
        case S.LOADING:
            return plan.warmup.load_s + plan.warmup.warm_s
        case S.WARM:
            return plan.probe.timeout_s
        case S.ROLLING_BACK:
            return 300.0
    return inf  # ACTIVE: the soak has a clock of its own; settled rollouts wait for nothing


def _words(rollout: Rollout, event: RolloutEvent, reason: str) -> str:
    match event:
        case RolloutEvent.TIMED_OUT:
            last = f", last: {reason or rollout.reason}" if reason or rollout.reason else ""
            return f"timeout: {rollout.state} took longer than it may{last}"
        case RolloutEvent.SUPERSEDED:
            return "superseded: another document asks for something else"
        case RolloutEvent.WORKER_EXITED:
            return f"worker_exited: {reason or 'its worker ended'}"
        case RolloutEvent.REBOOTED:
            return f"the agent ended in {rollout.state}"
    return reason or str(event)
