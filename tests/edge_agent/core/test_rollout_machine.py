"""The rollout machine ends every sequence of events in the old or the new generation, with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edge_agent.core.rollout_machine import (
    TRANSITIONS,
    WORK,
    Rollout,
    RolloutEvent,
    S,
    after_restart,
    apply_event,
    left_s,
    timeout_s,
)
from tests.tidegate.rollout.test_documents import plan
from tidegate.rollout.plan import Net, Soak, Warmup

ROLLOUT = Rollout("digits", plan(soak=Soak(10.0, max_exits=3)), "device/kiosk-1", 7, generation=5, previous=4)
LINE = [S.PLANNED, S.DOWNLOADING, S.VERIFIED, S.STAGED, S.LOADING, S.WARM, S.PROBED, S.ACTIVE, S.COMMITTED]
UNSETTLED = sorted(set(WORK) | {S.DEFERRED})


def at(state: S, **changes: object) -> Rollout:
    return replace(ROLLOUT, state=state, **changes)


def test_the_straight_line_is_walked_by_success_alone() -> None:
    rollout, walked = ROLLOUT, [ROLLOUT.state]
    while not rollout.state.is_settled:
        rollout = apply_event(rollout, RolloutEvent.DONE)
        walked.append(rollout.state)
    assert walked == LINE
    assert rollout.reason == ""


@pytest.mark.parametrize("state", UNSETTLED)
def test_a_failure_leads_back_to_where_nothing_was_touched_or_through_a_rollback(state: S) -> None:
    failed = apply_event(at(state), RolloutEvent.FAILED, "onnx: broken")
    expected = {S.ROLLING_BACK: S.ROLLED_BACK}.get(state)
    if expected is None:
        expected = S.FAILED if state in (*LINE[:4], S.DEFERRED) else S.ROLLING_BACK
    assert failed.state is expected
    assert failed.reason.endswith("onnx: broken")


@pytest.mark.parametrize(
    ("state", "event", "reason", "expected"),
    [
        (S.DEFERRED, RolloutEvent.TIMED_OUT, "", (S.FAILED, "timeout: deferred took longer than it may")),
        (
            S.DOWNLOADING,
            RolloutEvent.TIMED_OUT,
            "cut",
            (S.FAILED, "timeout: downloading took longer than it may, last: cut"),
        ),
        (S.DOWNLOADING, RolloutEvent.DEFERRED, "metered: paid", (S.DEFERRED, "metered: paid")),
        (S.DEFERRED, RolloutEvent.DEFERRED, "window: closed", (S.DEFERRED, "window: closed")),
        (S.DEFERRED, RolloutEvent.RESUMED, "", (S.PLANNED, "")),
        (S.WARM, RolloutEvent.WORKER_EXITED, "signal 9", (S.ROLLING_BACK, "worker_exited: signal 9")),
        (S.ACTIVE, RolloutEvent.WORKER_EXITED, "signal 9", (S.ACTIVE, "")),
        (
            S.ACTIVE,
            RolloutEvent.SUPERSEDED,
            "",
            (S.ROLLING_BACK, "superseded: another document asks for something else"),
        ),
        (S.LOADING, RolloutEvent.DEFERRED, "disk: I/O error", (S.DEFERRED, "disk: I/O error")),
        (S.PLANNED, RolloutEvent.SUPERSEDED, "", (S.FAILED, "superseded: another document asks for something else")),
        (S.ACTIVE, RolloutEvent.STOPPED, "", (S.STAGED, "")),
        (S.DOWNLOADING, RolloutEvent.REBOOTED, "", (S.DOWNLOADING, "")),
        (S.ACTIVE, RolloutEvent.DEFERRED, "late", (S.ACTIVE, "")),
        (S.COMMITTED, RolloutEvent.FAILED, "late", (S.COMMITTED, "")),
    ],
)
def test_what_may_happen_beside_the_line(state: S, event: RolloutEvent, reason: str, expected: tuple[S, str]) -> None:
    found = apply_event(at(state), event, reason)
    assert (found.state, found.reason) == expected


def test_a_rollback_says_why_it_began_and_how_it_failed() -> None:
    back = at(S.ROLLING_BACK, reason="soak_errors: 9 of 20")
    assert apply_event(back, RolloutEvent.DONE).reason == "soak_errors: 9 of 20"
    assert apply_event(back, RolloutEvent.FAILED, "no worker").reason == "soak_errors: 9 of 20; and then no worker"
    assert after_restart(back, committed=4) == back


@pytest.mark.parametrize("state", [S.LOADING, S.WARM, S.PROBED, S.ACTIVE])
def test_the_third_exit_of_worker_or_agent_is_a_crash_loop(state: S) -> None:
    once = after_restart(at(state), committed=4)
    assert (once.state, once.exits) == (S.STAGED, 1)
    thrice = after_restart(at(state, exits=2), committed=4)
    assert thrice.state is S.ROLLING_BACK
    assert thrice.reason.startswith("crash_loop: 3 exits")
    assert thrice.blocked
    assert apply_event(at(state), RolloutEvent.STOPPED).exits == 0


def test_a_cut_between_the_commit_and_the_journal_is_a_commit() -> None:
    assert after_restart(at(S.ACTIVE, exits=2), committed=5).state is S.COMMITTED
    assert after_restart(at(S.ACTIVE), committed=4).state is S.STAGED


def test_every_state_but_the_soak_and_the_settled_has_a_timeout() -> None:
    waiting = replace(ROLLOUT, plan=plan(net=Net(deadline_s=100.0), warmup=Warmup(3.0, 4.0)), spent_s=30.0)
    assert timeout_s(replace(waiting, state=S.DEFERRED)) == timeout_s(replace(waiting, state=S.DOWNLOADING)) == 70.0
    assert timeout_s(replace(waiting, state=S.LOADING)) == 7.0
    unbounded = [state for state in UNSETTLED if timeout_s(replace(waiting, state=state)) == float("inf")]
    assert unbounded == [S.ACTIVE]


def test_time_that_is_off_the_deadline_already_is_not_taken_off_it_again() -> None:
    waiting = replace(ROLLOUT, plan=plan(net=Net(deadline_s=100.0), warmup=Warmup(3.0, 4.0)), spent_s=60.0)
    for state in (S.PLANNED, S.DOWNLOADING, S.DEFERRED):
        assert left_s(replace(waiting, state=state), in_state_s=70.0, unspent_s=10.0) == 30.0
    assert left_s(replace(waiting, state=S.LOADING), in_state_s=6.0, unspent_s=1.0) == 1.0


def test_failures_of_its_own_spend_the_contents_name_and_others_wishes_do_not() -> None:
    assert apply_event(at(S.PLANNED), RolloutEvent.FAILED, "x").blocked
    assert apply_event(at(S.ACTIVE), RolloutEvent.WORKER_EXITED).blocked is False
    assert apply_event(at(S.ACTIVE), RolloutEvent.SUPERSEDED).blocked is False


HAPPENINGS = st.lists(st.tuples(st.sampled_from(RolloutEvent), st.booleans()), max_size=40)


@pytest.mark.slow
@given(state=st.sampled_from(UNSETTLED), exits=st.integers(0, 2), happenings=HAPPENINGS)
def test_any_events_and_power_cuts_end_in_the_old_or_the_new_generation_with_a_reason(
    state: S, exits: int, happenings: list[tuple[RolloutEvent, bool]]
) -> None:
    # given a rollout anywhere; the disk has committed the new generation only by the soak's own work
    rollout, committed = at(state, exits=exits, reason="first" if state is S.ROLLING_BACK else ""), 4
    for event, is_cut_before_the_journal in happenings:
        if event is RolloutEvent.DONE and rollout.state is S.ACTIVE:
            committed = 5
            if is_cut_before_the_journal:  # the power goes between the rename and the journal
                rollout = after_restart(rollout, committed)
                continue
        elif event is RolloutEvent.REBOOTED:
            rollout = after_restart(rollout, committed)
            continue
        rollout = apply_event(rollout, event, "why")
    # when its work is let run to the end, or time out
    for _ in range(len(LINE) + 2):
        if rollout.state.is_settled:
            break
        if rollout.state is S.DEFERRED:
            rollout = apply_event(rollout, RolloutEvent.TIMED_OUT)
            continue
        committed = 5 if rollout.state is S.ACTIVE else committed
        rollout = apply_event(rollout, RolloutEvent.DONE)
    # then it is over, and what the journal says is what the disk has
    assert rollout.state.is_settled
    assert (rollout.state is S.COMMITTED) == (committed == 5)
    assert (rollout.reason == "") == (rollout.state is S.COMMITTED)
    assert all(apply_event(rollout, event, "more") == rollout for event in RolloutEvent)


def test_every_transition_leads_from_a_state_with_work() -> None:
    assert {before for before, _ in TRANSITIONS} == set(WORK) | {S.DEFERRED}
