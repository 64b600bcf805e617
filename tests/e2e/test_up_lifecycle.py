"""How `tidegate up` begins and ends: nothing heavy before the ports are known to be free, nothing left afterwards."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import PORTS, Stack, eventually, running
from tests.e2e.test_stack_serving import LONG, SHORT, embed
from tidegate.models.repository import Repository
from tidegate.testing.ports import free_ports, is_free
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]


def run_up(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tidegate.cli", "up", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def nobody_is_left(stack: Stack, everyone: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(everyone, timeout=within_s)
    assert not alive, alive
    taken = [port for port in range(stack.ports_from, stack.ports_from + PORTS) if not is_free(port)]
    assert not taken


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_it_ends_within_five_seconds_and_leaves_no_process_and_no_port(
    digits: Path, tmp_path: Path, by: signal.Signals
) -> None:
    with running(tmp_path, "--models", str(digits), "--edges", "1") as stack:
        everyone = stack.everyone()
        assert len(everyone) >= 6  # up, broker, pool, edge, gateway, and workers
        began_at = time.perf_counter()
        assert stack.stop(by) == 0
        assert time.perf_counter() - began_at < 5
        nobody_is_left(stack, everyone, within_s=0.5)


def test_a_request_under_way_is_answered_before_anything_it_needs_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "mine"
    # Sixteen tokens take four seconds. A warm-up without time to spare measures the two least lengths and not these.
    monkeypatch.setenv("TIDEGATE_POOL_WARMUP_BUDGET_S", "0.01")
    costs = ((1, 10), (8, 10), (16, 4000), (1000, 4000))
    add_paced("encoder", PacedCosts(edge_ms=costs, pool_ms=costs), models)
    with running(tmp_path, "--models", str(models), "--edges", "0") as stack, ThreadPoolExecutor(1) as threads:
        everyone = stack.everyone()
        asked = threads.submit(infer_slowly, stack)
        eventually(lambda: sum(target["in_flight"] for target in stack.state()["targets"]) >= 1, 10, "it is under way")
        assert stack.stop() == 0
        assert asked.result() == 200
        nobody_is_left(stack, everyone, within_s=0.5)


def infer_slowly(stack: Stack) -> int:
    """The status of a request that may take its time."""
    row = {"datatype": "INT64", "shape": [1, 16], "data": [1] * 16}
    request = urllib.request.Request(
        f"{stack.http}/v2/models/encoder/infer",
        data=json.dumps({"inputs": [{"name": name, **row} for name in ("input_ids", "attention_mask")]}).encode(),
        headers={"tidegate-budget-ms": "20000"},
    )
    try:
        with urllib.request.urlopen(request, timeout=40) as response:
            return int(response.status)
    except urllib.error.HTTPError as refused:
        raise AssertionError(refused.read()) from refused


def test_a_healthy_run_is_quiet_from_its_start_to_its_end(models: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--models", str(models), "--edges", "1") as stack:
        assert embed(stack, SHORT)[0] == embed(stack, LONG)[0] == 200
        assert stack.stop() == 0
        loud = [line for line in stack.logs.splitlines() if re.search(r"warn|error|traceback|exception", line, re.I)]
        assert not loud


def test_a_repository_of_ones_own_is_served_without_building_the_demo(tmp_path: Path) -> None:
    models = tmp_path / "mine"
    add_paced("encoder", PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10), (1000, 40))), models)
    with running(tmp_path, "--models", str(models), "--edges", "2") as stack:
        assert {target["models"][0]["name"] for target in stack.state()["targets"]} == {"encoder"}
        assert all(target["models"][0]["paced"] for target in stack.state()["targets"])
        assert "building" not in stack.words


def test_edges_after_the_first_start_side_by_side_with_its_figures(tmp_path: Path) -> None:
    models = tmp_path / "mine"
    add_paced("encoder", PacedCosts(edge_ms=((1, 20), (100, 40)), pool_ms=((1, 10), (1000, 20))), models)
    with running(tmp_path, "--models", str(models), "--edges", "5") as stack:
        assert len(stack.ready_targets()) == 6
        assert "edge-2 to edge-5 warm up" in stack.words and "4 of 4" in stack.words
        assert "edge-2: " not in stack.words and "✓ edge-3" not in stack.words
        measured = {(tmp_path / f"edge-{number}" / "costs.json").read_bytes() for number in range(2, 6)}
        assert len(measured) == 1, "measured once, by the first"
        assert json.loads(measured.pop()) == json.loads((tmp_path / "edge-1" / "costs.json").read_bytes())


def test_one_of_many_edges_that_cannot_start_fails_the_start_with_its_reason(tmp_path: Path) -> None:
    models = tmp_path / "mine"
    add_paced("encoder", PacedCosts(edge_ms=((1, 20),), pool_ms=((1, 10),)), models)
    (tmp_path / "edge-4").write_text("a file where its folder for state should be")
    failed = run_up(
        "--models", str(models), "--edges", "5", "--data-dir", str(tmp_path), "--ports-from", str(free_ports(16))
    )
    assert failed.returncode == 1
    assert "edge-4 did not start" in failed.stderr and "Traceback" not in failed.stderr


def test_when_it_is_killed_itself_everyone_ends(light_digits: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--models", str(light_digits), "--edges", "1") as stack:
        everyone = stack.everyone()
        stack.stop(signal.SIGKILL)
        nobody_is_left(stack, everyone, within_s=6)


def test_interrupted_while_it_starts_it_leaves_nothing_either(digits: Path, tmp_path: Path) -> None:
    stack = Stack(tmp_path, "--models", str(digits), "--edges", "1")
    try:
        eventually(lambda: "pool" in stack.words, 60, "the pool is being started")
        everyone = stack.everyone()
        assert stack.stop(signal.SIGINT) == 0
        nobody_is_left(stack, everyone, within_s=0.5)
        assert stack.stdout == []
    finally:
        stack.close()


def test_interrupted_while_it_builds_its_first_model_it_leaves_no_half_of_one(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "--edges", "1")
    try:
        eventually(lambda: "minilm:" in stack.words, 120, "the first model is being built")
        everyone = stack.everyone()
        assert len(everyone) >= 2  # up and the build
        assert stack.stop(signal.SIGINT) == 0
        nobody_is_left(stack, everyone, within_s=0.5)
        assert Repository(tmp_path / "models").manifests() == ()
        assert stack.stdout == []
    finally:
        stack.close()


def test_a_taken_port_is_an_error_that_names_it_and_nothing_is_started(tmp_path: Path) -> None:
    first = free_ports(PORTS)
    with socket.create_server(("127.0.0.1", first + 5)):
        failed = run_up("--ports-from", str(first), "--data-dir", str(tmp_path), "--json")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert f"port {first + 5} on 127.0.0.1 (pool gRPC): already in use" in failed.stderr
    assert "--ports-from" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "models").exists()


def test_a_broker_that_does_not_answer_is_named(tmp_path: Path) -> None:
    port = free_ports(PORTS)
    failed = run_up(
        *("--ports-from", str(port), "--data-dir", str(tmp_path)), *("--broker", f"mqtt://127.0.0.1:{port + 15}")
    )
    assert failed.returncode == 1
    assert f"--broker mqtt://127.0.0.1:{port + 15}: nobody answers there" in failed.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:1883", "http://127.0.0.1:1883", "mqtt://host:port"])
def test_a_broker_url_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    failed = run_up("--ports-from", str(free_ports(PORTS)), "--data-dir", str(tmp_path), "--broker", url)
    assert failed.returncode == 1
    assert f"--broker {url}" in failed.stderr


def test_a_second_one_in_the_same_directory_is_refused(digits: Path, tmp_path: Path) -> None:
    first = Stack(tmp_path, "--models", str(digits), "--edges", "1")
    try:
        eventually((tmp_path / "run" / "lock").exists, 30, "the first one works in the directory")
        second = run_up("--ports-from", str(free_ports(PORTS)), "--data-dir", str(tmp_path))
        assert second.returncode == 1
        assert f"process {first.up.pid}" in second.stderr
    finally:
        first.stop()


def test_a_part_that_cannot_start_fails_the_start_with_its_reason(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_POOL_DEVICE", "abacus")
    first = free_ports(PORTS)
    failed = run_up(*("--ports-from", str(first), "--data-dir", str(tmp_path)), *("--models", str(digits), "--json"))
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "pool did not start" in failed.stderr
    assert "abacus" in failed.stderr
    assert all(is_free(port) for port in range(first, first + PORTS))


def test_the_ready_line_is_the_only_line_on_stdout_and_it_is_json(light_digits: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--models", str(light_digits), "--edges", "0") as stack:
        stack.stop()
        assert len(stack.stdout) == 1
        assert json.loads(stack.stdout[0])["event"] == "ready"
