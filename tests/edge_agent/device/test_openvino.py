"""A real agent on a real accelerator: OpenVINO on the processor, in an environment of its own (`make openvino`)."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import yaml

from tests.support.models.tiny_models import tiny_repository

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[3] / ".venv-openvino" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.is_file(), reason="no OpenVINO here: make openvino")
@pytest.mark.parametrize("device", ["auto", "openvino", "openvino:CPU"])
def test_it_is_tried_within_the_sandbox_and_the_model_answers(device: str, tmp_path: Path) -> None:
    tiny_repository(tmp_path / "models")
    keys = {"name": "kiosk-1", "grpc_port": 0, "http_port": 0, "device": device, "models": ["double"]}
    keys |= {"model_repository": str(tmp_path / "models"), "state_dir": str(tmp_path / "state")}
    (tmp_path / "edge.yaml").write_text(yaml.safe_dump(keys))
    words = [str(PYTHON), "-m", "edge_agent", "--config", str(tmp_path / "edge.yaml")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
        try:
            assert agent.stdout is not None
            events = (json.loads(line) for line in agent.stdout)
            ready: dict[str, Any] = next(one for one in events if one["event"] == "ready")
            _check(ready["addresses"]["http"], "openvino" if device == "auto" else device)
        finally:
            agent.terminate()
            assert agent.wait(20) == 0


def _check(address: str, name: str) -> None:
    with urllib.request.urlopen(f"{address}/v1/state", timeout=10) as answer:
        (worker,) = json.load(answer)["workers"]
    tried = worker["devices"]["int8"]["tried"]
    assert len(tried) == 1 and tried[0].startswith(f"{name}: ") and "times as fast as the processor" in tried[0]
    x = triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    with triton.InferenceServerClient(address.removeprefix("http://")) as client:
        assert client.infer("double", [x]).as_numpy("y")[0, 0] == 2.0


def test_a_device_that_this_runtime_lacks_is_a_reason_not_to_start(tmp_path: Path) -> None:

    tiny_repository(tmp_path / "models")
    keys = {"name": "kiosk-1", "grpc_port": 0, "http_port": 0, "device": "qnn", "state_dir": str(tmp_path / "state")}
    (tmp_path / "edge.yaml").write_text(yaml.safe_dump(keys | {"model_repository": str(tmp_path / "models")}))
    words = [sys.executable, "-m", "edge_agent", "--config", str(tmp_path / "edge.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "key 'device': this ONNX Runtime has no device 'qnn'" in done.stdout + done.stderr
    assert "install onnxruntime-qnn" in done.stdout + done.stderr
