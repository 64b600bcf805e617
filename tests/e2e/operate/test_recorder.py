"""`top`, `explain` and `record` with a whole Tidegate behind emulated links: sick links, late requests, replay."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from gateway.commands.explain import explain
from gateway.commands.record import record
from gateway.commands.top import snapshots_of, top
from simulator.replay.replay import replay
from simulator.simulation import simulate
from tests.e2e.stack import eventually
from tidegate.testing.stack import MODEL, Stack

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]
_LINKS = {
    "pool": "good_wifi",
    "edge-1": "good_wifi",
    "broker": "good_wifi",
}  # as in test_stack_links: one stack for both


@pytest.fixture
def stack(tidegate_stack: Callable[..., Stack]) -> Stack:
    return tidegate_stack(links=_LINKS, edges=1)


@contextlib.contextmanager
def load(stack: Stack) -> Iterator[None]:
    """Callers who ask one after another: some for what an edge takes, one for what only the pool does."""
    over = threading.Event()

    def ask(units: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                stack.infer(units, budget_ms=3000.0)
            over.wait(0.02)

    callers = [threading.Thread(target=ask, args=(units,), daemon=True) for units in (8, 8, 600)]
    for caller in callers:
        caller.start()
    try:
        yield
    finally:
        over.set()
        for caller in callers:
            caller.join(30)


def ask(stack: Stack, *, budget_ms: float, **headers: str) -> tuple[int, dict[str, str], float]:
    """One request: the status, the answer's headers, and how long its caller waited."""
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [1, 8], "data": [1] * 8}
        for name in ("input_ids", "attention_mask")
    ]
    said = {"content-type": "application/json", "tidegate-budget-ms": f"{budget_ms:g}", **headers}
    url = f"{stack.http}/v2/models/{MODEL}/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), said)
    began_at = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            found, status = answer.headers, answer.status
    except urllib.error.HTTPError as error:
        with error:
            found, status = error.headers, error.code
    return status, {name.lower(): text for name, text in found.items()}, time.perf_counter() - began_at


def told(stack: Stack, request_id: str) -> dict[str, Any]:
    words = [request_id, "--json", "--admin", stack.admin]
    (one,) = json.loads(CliRunner().invoke(explain, words, catch_exceptions=False).stdout)["decisions"]
    found: dict[str, Any] = one
    return found


def sick(stack: Stack) -> list[str]:
    result = CliRunner().invoke(top, ["--json", "--admin", stack.admin], catch_exceptions=False)
    return [one["target"] for one in json.loads(result.stdout)["sick"]]


def seen_sick(stack: Stack) -> tuple[list[str], list[str], list[str]]:
    """Whom the console's snapshot, `top` and a scrape each name."""
    with urllib.request.urlopen(f"{stack.admin}/console/live", timeout=30) as lines:
        console = [row["id"] for row in next(snapshots_of(lines))["targets"] if row["health"] != "well"]
    named = sick(stack)
    with urllib.request.urlopen(f"{stack.metrics}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    (states,) = [family.samples for family in families if family.name == "tidegate_link_state"]
    return console, named, [one.labels["target"] for one in states if one.value != 0]


def assert_adds_up(one: dict[str, Any]) -> None:
    falls, elapsed_ms = one["waterfall"], one["elapsed_ms"]
    total_ms = sum(stage["took_ms"] for stage in falls["path"])
    assert abs(total_ms - elapsed_ms) <= 0.02 * elapsed_ms + 0.02, one
    assert abs(falls["unaccounted_ms"]) <= 0.02 * elapsed_ms + 0.02, one


@pytest.mark.parametrize("part", ["edge-1", "pool"])
def test_a_link_that_gets_sick_under_load_is_named_by_top_and_no_other(stack: Stack, part: str) -> None:
    name = {"edge-1": "edge/edge-1", "pool": "pool/pool"}[part]
    with load(stack):
        eventually(lambda: sick(stack) == [], 60, "every link is well")
        stack.links[part].toxic("slow", "to", delay_ms=150, jitter={"dist": "uniform", "ms": 100})
        took_s = eventually(lambda: sick(stack) == [name], 60, f"{name} is named, and nobody else")
        eventually(lambda: seen_sick(stack) == ([name], [name], [name]), 60, "page, terminal and scrape agree")
        picture = CliRunner(env={"COLUMNS": "80"}).invoke(top, ["--once", "--admin", stack.admin]).stdout
        stack.links[part].remove("slow")
    print(f"{name} was named after {took_s:.1f} s")
    assert f"SICK {name}" in picture


def test_one_late_request_is_picked_by_its_answers_id_and_explained_from_end_to_end(stack: Stack) -> None:
    eventually(lambda: ask(stack, budget_ms=5000.0, **{"tidegate-pin": "edge"})[0] == 200, 60, "the edge answers")
    stack.links["edge-1"].partition("blackhole")
    try:
        status, headers, waited_s = ask(stack, budget_ms=600.0, **{"tidegate-pin": "edge"})
    finally:
        stack.links["edge-1"].heal()
    assert status in (504, 503)
    one = told(stack, headers["tidegate-request-id"])
    assert_adds_up(one)
    assert one["outcome"] in ("deadline_exceeded", "nothing_alive") and one["elapsed_ms"] <= 1e3 * waited_s
    late = json.loads(CliRunner().invoke(explain, ["--late", "--json", "--admin", stack.admin]).stdout)["decisions"]
    assert one["answered_as"] in [found["answered_as"] for found in late]
    if one["waterfall"]["attempts"]:
        assert one["waterfall"]["attempts"][0]["target"] == "edge/edge-1"
        assert "unanswered" in [stage["stage"] for stage in one["waterfall"]["path"]]
    words = CliRunner(env={"COLUMNS": "100"}).invoke(explain, [one["answered_as"], "--admin", stack.admin]).stdout
    assert "in hindsight: " in words and "in all" in words


def test_fallbacks_hedges_and_plain_answers_add_up_to_what_was_measured(stack: Stack) -> None:
    def served_by() -> str:
        return ask(stack, budget_ms=5000.0)[1].get("tidegate-served-by", "")

    eventually(lambda: served_by() == "edge/edge-1", 60, "the edge answers")
    seen = [ask(stack, budget_ms=5000.0)]

    def somebody_stood_in() -> bool:
        """For the silent edge; on a machine that stands still the link may be known to be down before it is asked."""
        stack.links["edge-1"].partition("blackhole")
        try:
            seen.extend(ask(stack, budget_ms=3000.0) for _ in range(2))
        finally:
            stack.links["edge-1"].heal()
        ids = [headers["tidegate-request-id"] for _, headers, _ in seen]
        attempts = max(len(told(stack, request_id)["waterfall"]["attempts"]) for request_id in ids)
        eventually(lambda: served_by() == "edge/edge-1", 60, "the edge answers again")
        return attempts >= 2

    eventually(somebody_stood_in, 120, "a fallback or a hedge")
    stages: set[str] = set()
    for _, headers, waited_s in seen:
        one = told(stack, headers["tidegate-request-id"])
        assert_adds_up(one)
        assert one["elapsed_ms"] <= 1e3 * waited_s
        stages |= {stage["stage"] for stage in one["waterfall"]["path"]}
    assert {"admit", "classify", "place", "link out", "compute", "link back"} <= stages


def test_what_is_recorded_of_a_running_system_is_replayed(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "now.tgz"
    with load(stack):
        words = ["--for", "10m", "--most", "60", "-o", str(path), "--admin", stack.admin]
        result = CliRunner().invoke(record, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = replay(path)
    counted = simulate(found.loaded, found.policy, 1).tally
    assert counted.all.arrivals + counted.warmup.arrivals == len(found.loaded.scenario.arrivals.recorded) > 0
    assert set(counted.served_by) <= {"edge/edge-1-1", "pool/pool"}
