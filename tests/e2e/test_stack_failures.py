"""Parts are killed while the system serves: what can be answered is answered, and what is mended is used again."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.e2e.conftest import MENDED_WITHIN_S
from tests.e2e.stack import Stack, eventually
from tests.e2e.test_stack_serving import LONG, SHORT, embed

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]


def is_answered_by(stack: Stack, text: str, by: str) -> bool:
    status, headers, _ = embed(stack, text)
    return status == 200 and headers["tidegate-served-by"].startswith(by)


def address(stack: Stack, name: str) -> str:
    return str(next(one["address"] for one in stack.ready["processes"] if one["name"] == name))


def test_without_the_pool_everything_that_an_edge_may_take_is_still_answered(stack: Stack) -> None:
    stack.kill("pool")
    for _ in range(5):
        assert is_answered_by(stack, SHORT, "edge/")


def test_without_edges_the_pool_answers(stack: Stack) -> None:
    stack.kill("edge-1")
    stack.kill("edge-2")
    for _ in range(3):
        assert is_answered_by(stack, SHORT, "pool/")


def test_with_nobody_left_the_answer_is_503_within_the_budget_and_says_why(stack: Stack) -> None:
    everybody = ("pool", "edge-1", "edge-2")

    def in_time() -> bool:
        """On a machine that stands still they may be started again before anybody is asked: they are killed anew."""
        nonlocal status, headers, body
        eventually(stack.whole, MENDED_WITHIN_S, "every target ready")
        for name in everybody:
            stack.kill(name)
        began_at = time.perf_counter()
        status, headers, body = embed(stack, SHORT, **{"tidegate-budget-ms": "1500"})
        return status == 503 and time.perf_counter() - began_at < 1.5

    status, headers, body = 0, {}, {}
    eventually(in_time, 120, "503 within the budget")
    assert headers["tidegate-refused"] == "nothing_alive"
    assert all(target in body["error"]["message"] for target in ("pool/pool", "edge/edge-1", "edge/edge-2"))


def test_a_killed_edge_gets_no_request_and_is_used_again_when_it_is_back(stack: Stack) -> None:
    stack.kill("edge-2")
    for _ in range(20):  # data-plane evidence: no request is lost on the way to noticing
        assert is_answered_by(stack, SHORT, "")
    assert address(stack, "edge-2") not in stack.ready_targets()
    eventually(lambda: address(stack, "edge-2") in stack.ready_targets(), MENDED_WITHIN_S, "edge-2 ready again")
    eventually(lambda: is_answered_by(stack, SHORT, "edge/edge-2"), 30, "edge-2 answers again")


def test_a_killed_child_is_started_again_after_two_seconds(stack: Stack) -> None:
    before = stack.process("edge-1").pid
    killed_at = time.perf_counter()
    stack.kill("edge-1")

    def is_back() -> bool:
        try:
            return stack.process("edge-1").pid != before
        except LookupError:
            return False

    eventually(is_back, 60, "edge-1 has a process again")
    assert time.perf_counter() - killed_at > 1.8
    assert "edge-1 was ended by SIGKILL; starting it again in 2 s" in stack.words


def test_the_workers_of_a_killed_process_die_with_it(stack: Stack) -> None:
    workers = stack.process("edge-1").children(recursive=True) + stack.process("pool").children(recursive=True)
    assert workers
    stack.kill("edge-1")
    stack.kill("pool")
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def test_the_gateway_comes_back_and_finds_everyone_again(stack: Stack) -> None:
    stack.kill("gateway")
    eventually(stack.whole, MENDED_WITHIN_S, "the gateway sees every target again")
    assert is_answered_by(stack, SHORT, "edge/")
    assert is_answered_by(stack, LONG, "pool/")


def test_the_broker_may_die_without_a_request_noticing(stack: Stack) -> None:
    stack.kill("broker")
    for _ in range(10):
        assert is_answered_by(stack, SHORT, "edge/")
