"""`python -m edge_agent` as its parent sees it: events, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
import yaml

from tests.support.models.tiny_models import tiny_repository

pytestmark = pytest.mark.slow

# Python imports `sitecustomize` at every start, so the workers are covered as well.
BLOCKER = """
import sys

class Blocked:
    names = {"torch", "transformers", "amqtt", "tokenizers", "grpc_tools", "sklearn", "onnx", "prometheus_client"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


class Agent:
    """A running agent process and what it says."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        where = {"name": "kiosk-1", "grpc_port": 0, "http_port": 0, "warmup_budget_s": 0.5}
        where |= {"model_repository": str(folder / "models"), "state_dir": str(folder / "state")}
        (folder / "edge.yaml").write_text(yaml.safe_dump(where | keys))
        (folder / "sitecustomize.py").write_text(BLOCKER)
        self._log_path = folder / "log"
        with open(self._log_path, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edge_agent", "--config", str(folder / "edge.yaml")],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(folder)},
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def event(self, name: str) -> dict[str, Any]:
        """The next event of that name; fails when the process ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        pytest.fail(f"ended with {self.process.wait()} before {name!r}:\n{self.log}", pytrace=False)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_repository(tmp_path / "models")
    return tmp_path


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    one = Agent(folder)
    yield one
    one.close()


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


def test_with_only_what_an_edge_installs_it_serves_without_a_word_in_its_log_and_ends_on_sigterm(agent: Agent) -> None:
    ready = agent.event("ready")
    workers = agent.workers()
    x = np.ones((1, 2), dtype=np.float32)

    with triton_http.InferenceServerClient(ready["addresses"]["http"].removeprefix("http://")) as client:
        answer = client.infer("double", [triton_http.InferInput("x", [1, 2], "FP32").set_data_from_numpy(x)])
    agent.process.send_signal(signal.SIGTERM)

    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * x)
    assert [model["name"] for model in ready["models"]] == ["double", "rounds"]
    assert len(workers) == 2
    assert agent.process.wait(30) == 0
    assert gone(workers)
    assert agent.log == ""


def test_a_killed_agent_takes_its_workers_with_it(agent: Agent) -> None:
    agent.event("ready")
    workers = agent.workers()

    agent.process.kill()

    assert workers
    assert gone(workers)


def test_a_signal_during_the_warm_up_ends_it_too(agent: Agent) -> None:
    assert agent.event("progress")["what"] == "warming up double:1 (1 of 2)"

    agent.process.send_signal(signal.SIGINT)

    assert agent.process.wait(30) == 0
    assert agent.log == ""


def test_a_start_that_fails_says_so_in_an_event_and_ends_with_status_1(folder: Path) -> None:
    first = Agent(folder)
    port = int(first.event("ready")["addresses"]["grpc"].rpartition(":")[2])
    second = Agent(folder, grpc_port=port)
    try:
        where = f"cannot listen on 127.0.0.1:{port} (key 'grpc_port')"
        reason = f"{where}: port {port} is taken; free it or set 'grpc_port' to another"
        assert second.event("failed")["reason"] == reason
        assert second.process.wait(30) == 1
        assert second.log == f"the edge cannot start: {reason}\n"
    finally:
        second.close()
        first.close()


def test_an_unknown_key_is_named_with_its_nearest_neighbour(folder: Path) -> None:
    agent = Agent(folder, max_queue=3)
    try:
        assert "unknown key 'max_queue'; did you mean 'max_queue_size'?" in agent.event("failed")["reason"]
        assert agent.process.wait(30) == 1
    finally:
        agent.close()
