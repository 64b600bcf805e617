"""Each process runs with only what its extra installs: the rest is made impossible to import, in its workers too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import yaml

from tests.e2e.stack import eventually
from tests.e2e.test_stack_serving import check_embedding, embed_at, tokens, triton_inputs
from tidegate.testing.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

BUILD_TOOLS = ("grpc_tools", "transformers", "sklearn", "onnx", "onnxscript")
NOT_FOR = {
    "edge": ("torch", "safetensors", "tokenizers", "amqtt", "prometheus_client", *BUILD_TOOLS),
    "gateway": ("torch", "safetensors", "onnxruntime", "amqtt", *BUILD_TOOLS),
    "pool": ("aiohttp", "paho", "amqtt", "onnxruntime", "tokenizers", "prometheus_client", *BUILD_TOOLS),
}
# Python imports `sitecustomize` at every start, so workers are covered as well. Modules are hidden from the finders and
# not refused by one of them: `importlib.util.find_spec` must answer None for them, as for what is not installed.
BLOCKER = """
import os, sys

BLOCKED = frozenset(os.environ["BLOCKED_MODULES"].split())

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
READY_WITHIN_S = 90.0
WARM_S: Final = 0.5  # a pool's warm-up, which else measures what larger sizes cost for ten seconds of a core


class Part:
    """One process of the system, alone."""

    def __init__(
        self, role: str, folder: Path, config: dict[str, Any], *, without: Sequence[str] | None = None
    ) -> None:
        """Args:
        without: packages that cannot be imported; None: all that the process's extra does not install.
        """
        module = {"edge": "edge_agent", "gateway": "gateway", "pool": "cloud_pool"}[role]
        (folder / "sitecustomize.py").write_text(BLOCKER)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self._log_path = folder / "log"
        environment = os.environ | {
            "PYTHONPATH": str(folder),
            "BLOCKED_MODULES": " ".join(NOT_FOR[role] if without is None else without),
        }
        self._log = open(self._log_path, "wb")  # noqa: SIM115  # open as long as the process writes there
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(folder / "config.yaml")],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_ready(self) -> None:
        eventually(lambda: self._told("ready") or self.process.poll() is not None, READY_WITHIN_S, "ready or ended")
        assert self._told("ready"), f"{self.events}\n{self._log_path.read_text()}"

    def _told(self, event: str) -> bool:
        return any(one["event"] == event for one in self.events)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join(5)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()


@contextlib.contextmanager
def alone(role: str, folder: Path, **config: Any) -> Iterator[Part]:
    folder.mkdir()
    part = Part(role, folder, config)
    try:
        part.wait_ready()
        yield part
    finally:
        code = part.stop()
    assert code == 0


def ask(address: str, length: int) -> None:
    with triton_grpc.InferenceServerClient(address) as client:
        check_embedding(client.infer("minilm", triton_inputs(triton_grpc, tokens(length))))
        image = triton_grpc.InferInput("image", [1, 1, 8, 8], "FP32")
        image.set_data_from_numpy(np.full((1, 1, 8, 8), 0.5, dtype=np.float32))
        assert client.infer("digits", [image]).as_numpy("probabilities").shape == (1, 10)


def test_what_is_blocked_looks_as_if_it_were_not_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    program = "import importlib.util, numpy; print(importlib.util.find_spec('torch')); import torch.nn"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "BLOCKED_MODULES": "torch"}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert said.stdout == "None\n"
    assert "ModuleNotFoundError: No module named 'torch'" in said.stderr


def test_an_edge_runs_without_torch_and_without_anything_that_builds(models: Path, tmp_path: Path) -> None:
    port = free_ports(2)
    with alone(
        "edge",
        tmp_path / "edge",
        name="edge-1",
        grpc_port=port,
        http_port=port + 1,
        model_repository=str(models),
        state_dir=str(tmp_path / "state"),
    ):
        ask(f"127.0.0.1:{port}", length=12)
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/v2/health/ready", timeout=30) as answer:
            assert answer.status == 200


def test_a_pool_runs_without_http_mqtt_and_onnx_runtime(models: Path, tmp_path: Path) -> None:
    port = free_ports(1)
    config = {"grpc_port": port, "model_repository": str(models), "warmup_budget_s": WARM_S}
    with alone("pool", tmp_path / "pool", name="pool", **config):
        ask(f"127.0.0.1:{port}", length=200)


def test_a_gateway_runs_without_torch_and_without_onnx_runtime(models: Path, tmp_path: Path) -> None:
    port = free_ports(5)
    config = {"grpc_port": port + 4, "model_repository": str(models), "warmup_budget_s": WARM_S}
    with (
        alone("pool", tmp_path / "pool", name="pool", **config),
        alone(
            "gateway",
            tmp_path / "gateway",
            http_port=port,
            grpc_port=port + 1,
            metrics_port=port + 2,
            admin_port=port + 3,
            model_repository=str(models),
            targets=[{"name": "pool", "tier": "pool", "address": f"127.0.0.1:{port + 4}"}],
        ),
    ):
        http = f"http://127.0.0.1:{port}"
        eventually(lambda: embed_at(http, "Time and tide")[0] == 200, 60, "the gateway answers from the pool")
        ask(f"127.0.0.1:{port + 1}", length=12)
