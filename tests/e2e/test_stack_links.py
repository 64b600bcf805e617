"""A whole Tidegate behind simulated links, as the plugin's fixture gives it to anybody's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.e2e.stack import eventually
from tidegate.testing.stack import Stack, StackFailed

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def stack(tidegate_stack: Callable[..., Stack]) -> Stack:
    return tidegate_stack(links={"pool": "good_wifi", "edge-1": "good_wifi", "broker": "good_wifi"}, edges=1)


def test_requests_are_answered_through_the_links(stack: Stack) -> None:
    before = stack.links["edge-1"].state()["bytes"]["to"]["delivered"]
    status, headers = stack.infer(8)
    assert status == 200
    assert headers["tidegate-served-by"] == "edge/edge-1"

    def served_by() -> str:  # too large for an edge; the pool's link may just have been reset by another test
        return stack.infer(500)[1].get("tidegate-served-by", "nobody")

    eventually(lambda: served_by() == "pool/pool", 20, "the pool answers what an edge cannot take")
    assert stack.links["edge-1"].state()["bytes"]["to"]["delivered"] > before
    assert {"gateway", "pool", "edge-1", "link-pool"} <= set(stack.pids)


def test_work_goes_on_at_the_pool_while_the_edge_s_link_is_a_blackhole_and_comes_back_after_it(stack: Stack) -> None:
    def served_by() -> str:
        return stack.infer(8, budget_ms=3000.0)[1].get("tidegate-served-by", "nobody")

    eventually(lambda: served_by() == "edge/edge-1", 20, "the edge answers")
    stack.links["edge-1"].partition("blackhole")
    eventually(lambda: served_by() == "pool/pool", 20, "the pool answers instead")
    stack.links["edge-1"].heal()
    eventually(lambda: served_by() == "edge/edge-1", 30, "the edge answers again")
    log = stack.log()
    assert "partition" in log
    assert "heal" in log
    assert all(link.state()["violations"] == 0 for link in stack.links.values())


def test_a_stack_is_shared_by_tests_that_ask_for_the_same_and_its_links_are_mended(
    tidegate_stack: Callable[..., Stack], stack: Stack
) -> None:
    stack.links["pool"].toxic("slow", "to", delay_ms=5)
    stack.links["pool"].partition("reset")
    again = tidegate_stack(links={"pool": "good_wifi", "edge-1": "good_wifi", "broker": "good_wifi"}, edges=1)
    assert again is stack
    state = stack.links["pool"].state()
    assert (state["partition"], list(state["layers"])) == (None, ["base"])
    with pytest.raises(ValueError, match="pool: partition: key 'kind'"):
        stack.links["pool"].partition("flood")
    with contextlib.suppress(ValueError):
        stack.links["pool"].remove("nothing")


def test_a_scenario_that_does_not_exist_fails_the_start_in_words(tidegate_stack: Callable[..., Stack]) -> None:
    with pytest.raises(StackFailed, match="no link scenario 'lte_diving'"):
        tidegate_stack(links={"pool": "lte_diving"}, edges=0)
