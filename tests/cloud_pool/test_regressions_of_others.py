"""What has gone wrong in others' batchers, pools and routers in production, each as a test of ours.

`ELSEWHERE` says where those are that stand beside what they are about; the rest are here. Source:
docs/design/batching.md, "Scheduler invariants".
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from gateway.core.health.breaker import AttemptVerdict, Breaker, BreakerState, blame
from tests.cloud_pool.models import manifest_of
from tests.cloud_pool.workers_support import text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.lane_pool import pool, total
from tidegate import clock
from tidegate.models.manifest import Batching
from tidegate.outcome import DeadlineExceeded, InvalidRequest, Overloaded, Unreachable

ROOT = Path(__file__).parents[2]

# What went wrong, where, and the tests that show that it does not here.
ELSEWHERE = (
    ("the result of a cancelled future was set", "ray#41057",
     "tests/cloud_pool/scheduling/test_scheduler.py",
     "test_a_caller_who_leaves_during_its_batch_does_not_disturb_its_batch_mates"),
    ("a client cancelled while its batch waited", "ray#50046",
     "tests/cloud_pool/scheduling/test_scheduler.py",
     "test_a_caller_who_leaves_while_waiting_frees_its_place_and_is_never_computed"),
    ("an exception in the size or cost function", "ray#66140",
     "tests/cloud_pool/scheduling/test_scheduler_bad_requests.py",
     "test_a_defect_of_ours_fails_those_it_hits_and_not_the_queue"),
    ("an exception in the size or cost function", "ray#66140",
     "tests/cloud_pool/core/batching/test_batcher.py",
     "test_a_cost_function_that_fails_leaves_the_queue_as_it_was"),
    ("a wrong number of results", "BentoML, LitServe",
     "tests/cloud_pool/scheduling/test_scheduler_bad_requests.py",
     "test_a_wrong_number_of_results_answers_nobody_with_anothers"),
    ("a wrong number of results", "BentoML, LitServe",
     "tests/cloud_pool/core/batching/test_padding.py",
     "test_a_wrong_number_of_results_is_found_before_anyone_is_answered"),
    ("the window counted from the last batch", "ray#36510",
     "tests/cloud_pool/core/batching/test_closing_policies.py",
     "test_the_wait_counts_from_the_oldest_member_and_not_from_the_last_batch"),
    ("requests were counted and not items", "BentoML#3859",
     "tests/cloud_pool/core/batching/test_batcher.py",
     "test_the_rows_of_a_batch_are_counted_and_not_its_requests"),
    ("results went to other callers", "MLServer#1306",
     "tests/cloud_pool/scheduling/test_scheduler.py",
     "test_results_are_not_crossed_between_callers_of_unequal_length"),
    ("results went to other callers", "MLServer#1306",
     "tests/cloud_pool/core/batching/test_padding.py",
     "test_results_are_never_crossed_between_callers"),
    ("the expired were the most urgent", "llm-d-batch-gateway#296",
     "tests/cloud_pool/core/batching/test_batcher.py",
     "test_a_deadline_that_has_passed_is_late_and_not_most_urgent"),
    ("equal deadlines", "llm-d-router#1181",
     "tests/cloud_pool/core/batching/test_batcher.py",
     "test_equal_deadlines_are_first_come_first_served"),
    ("the expired waited for a free instance", "triton server#7512",
     "tests/cloud_pool/scheduling/test_scheduler.py",
     "test_what_runs_out_of_time_while_a_batch_runs_is_answered_by_a_timer_and_costs_nothing"),
    ("the expired waited for a free instance", "triton server#7512",
     "tests/cloud_pool/core/batching/test_queue_policy.py",
     "test_who_has_waited_too_long_is_taken_out_by_a_timer"),
    ("a timeout was ignored where the level had none", "triton core",
     "tests/cloud_pool/core/batching/test_queue_policy.py",
     "test_the_least_of_timeout_and_deadline_counts_of_those_that_are_set"),
    ("the delayed waited for ever", "triton core",
     "tests/cloud_pool/core/batching/test_queue_policy.py",
     "test_it_is_passed_for_a_bounded_time_only"),
    ("low levels starved", "triton core",
     "tests/cloud_pool/core/batching/test_queue_policy.py",
     "test_nobody_waits_for_ever_however_low_and_whoever_comes"),
    ("a cooldown was wrong after a restart", "litellm PR#34416", "tests/gateway/core/fleet/test_fleet.py",
     "test_a_new_process_starts_with_a_closed_breaker_and_a_new_connection_with_a_closed_path"),
    ("the window of latencies froze", "litellm lowest_latency.py", "tests/gateway/core/estimate/test_service_cost.py",
     "test_a_target_that_was_slow_once_is_believed_again_after_minutes_without_an_answer"),
    ("no sample, a division by zero", "litellm PR#39970", "tests/gateway/core/estimate/test_link_estimate.py",
     "test_without_round_trips_the_path_is_the_prior_with_room_above"),
    ("no sample, a division by zero", "litellm PR#39970",
     "tests/cloud_pool/core/batching/test_latency_model.py",
     "test_before_the_first_batch_it_is_the_table"),
    ("a stale endpoint looked idle", "GIE#1497", "tests/gateway/core/estimate/test_link_silence.py",
     "test_silence_is_weighed_against_the_paths_own_round_trips"),
    ("a stale endpoint looked idle", "GIE#1497", "tests/gateway/core/fleet/test_queue_estimate.py",
     "test_an_idle_report_does_not_hide_what_we_sent_ourselves"),
    ("retries multiplied the load of the saturated", "Fastllm-proxy#21", "tests/gateway/core/request/test_hedging.py",
     "test_second_attempts_stay_a_share_of_the_requests"),
    ("one dead backend blocked all", "production-stack#749", "tests/gateway/test_app.py",
     "test_a_killed_target_is_left_alone_at_once_and_used_again_when_it_is_back"),
    ("one dead backend blocked all", "production-stack#749",
     "tests/cloud_pool/scheduling/test_several_workers.py",
     "test_a_worker_that_dies_touches_only_its_own_batch_and_the_others_take_it_over"),
    ("who had recovered was not used again", "litellm#30192", "tests/gateway/core/health/test_breaker.py",
     "test_a_sign_of_life_ends_the_wait_and_two_close_it"),
)  # fmt: skip


@pytest.mark.parametrize(("where", "name"), [(where, name) for _, _, where, name in ELSEWHERE])
def test_the_list_names_tests_that_exist(where: str, name: str) -> None:
    tree = ast.parse((ROOT / where).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    assert name in {function.name for function in functions}


@on_virtual_time
async def test_who_came_while_a_batch_ran_has_used_up_its_window_when_that_ends() -> None:
    """Ray Serve's window began anew with each batch, so that everybody waited for it again (ray#36510)."""
    batching = Batching(policy="window", max_queue_delay_s=0.3, max_batch_size=8, pad_axis="sequence")
    async with pool(manifest_of(batching=batching)) as subject:
        first = subject.ask(text(90))
        await clock.sleep(0.31)
        second = subject.ask(text(10))
        answers = await asyncio.gather(first, second)
        assert answers[0].queue_s == pytest.approx(0.3)
        assert answers[1].queue_s == pytest.approx(1.3 - 0.31)


@on_virtual_time
async def test_a_batch_is_full_by_its_rows_however_few_requests_they_are() -> None:
    """BentoML counted requests (BentoML#3859)."""
    async with pool(manifest_of(batching=Batching(max_batch_size=8, pad_axis="sequence"))) as subject:
        first = subject.ask(text(10))
        await settle()
        others = [subject.ask(text(10, rows=4)) for _ in range(3)]
        answers = await asyncio.gather(first, *others)
        assert subject.batches == [1, 8, 4]
        assert [answer.outputs["sum"].shape[0] for answer in answers] == [1, 4, 4, 4]


@on_virtual_time
async def test_who_has_expired_while_its_batch_was_not_yet_formed_is_in_none() -> None:
    """The least time left was the most urgent, below zero too (llm-d-batch-gateway#296)."""
    async with pool() as subject:
        first = subject.ask(text(90))
        await settle()
        late, in_time = subject.ask(text(10), budget_s=0.9), subject.ask(text(10, fill=2), budget_s=5.0)
        with pytest.raises(DeadlineExceeded):
            await late
        assert total(await in_time) == 20.0
        await first
        assert subject.batches == [1, 1]


@on_virtual_time
async def test_requests_of_one_deadline_do_not_wait_behind_the_longest_of_them() -> None:
    """With equal deadlines for all, earliest deadline first is first come, first served (llm-d-router#1181)."""
    batching = Batching(max_batch_size=8, pad_axis="sequence")
    async with pool(manifest_of(batching=batching)) as subject:
        first = subject.ask(text(10))
        await settle()
        due_in_s = 8.0
        long = [subject.ask(text(400), budget_s=due_in_s) for _ in range(3)]
        short = [subject.ask(text(10), budget_s=due_in_s) for _ in range(4)]
        done = await asyncio.gather(first, *long, *short, return_exceptions=True)
        late = [one for one in done[1:4] if isinstance(one, BaseException)]
        assert not [one for one in done[4:] if isinstance(one, BaseException)]
        assert late  # in the order of their coming the short ones would be, behind 12 s of long ones


@on_virtual_time
async def test_a_pool_that_has_computed_nothing_knows_what_it_would_take() -> None:
    """An average over no samples was a division by zero (litellm PR#39970)."""
    async with pool() as subject:
        assert subject.scheduler.queue_delay_s(clock.now()) == 0.0
        assert subject.lane.batcher.drain_s() == 0.0


@pytest.mark.parametrize("error", [DeadlineExceeded("x"), InvalidRequest("x"), Overloaded("x")])
def test_neither_a_callers_mistakes_nor_its_impatience_open_a_breaker(
    error: DeadlineExceeded | InvalidRequest | Overloaded,
) -> None:
    """4xx did (sglang#25811), and so did callers' own timeouts (litellm PR#35104)."""
    breaker = Breaker(threshold=3)
    for number in range(100):
        breaker.record(blame(error).target, 1000.0 + number, 0.5)
    assert breaker.state is BreakerState.CLOSED


def test_the_only_target_is_given_a_pause_like_any_other_and_then_one_trial() -> None:
    """A group of one was never cooled down (litellm#40405)."""
    breaker = Breaker(threshold=3, base_s=1.0)
    for _ in range(3):
        breaker.record(AttemptVerdict.FAILURE, 1000.0, 0.5)
    assert not breaker.allows(1000.5)
    assert breaker.allows(1001.5)
    assert breaker.launched(1001.5)
    assert not breaker.allows(1001.5)
    assert blame(Unreachable("x")).path is AttemptVerdict.FAILURE
