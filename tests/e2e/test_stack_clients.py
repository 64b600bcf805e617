"""Clients that live in an environment of their own: kserve's, and Triton's load generator."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

CLIENTS = Path(__file__).resolve().parents[2] / ".venv-clients"
PERF_ANALYZER = CLIENTS / "bin" / "perf_analyzer"
KSERVE_PROGRAM = Path(__file__).resolve().parents[1] / "support" / "clients" / "kserve_client.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.clients,
    pytest.mark.skipif(not CLIENTS.is_dir(), reason="`make clients` could not set up kserve and perf_analyzer here"),
]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=250, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_kserves_clients_over_http_and_grpc(stack: Stack) -> None:
    addresses = stack.http.removeprefix("http://"), stack.grpc
    told = json.loads(run(str(CLIENTS / "bin" / "python"), str(KSERVE_PROGRAM), *addresses).splitlines()[-1])
    for protocol, forms in (("rest", ("json", "binary")), ("grpc", ("raw", "typed"))):
        found = told[protocol]
        assert [found["live"], found["ready"], found["model_ready"]] == [True] * 3
        assert [(found[form]["id"], found[form]["shape"]) for form in forms] == [("q7", [1, 384])] * 2
    assert "missing input 'attention_mask'" in told["rest"]["error"]
    assert told["grpc"]["error"][0] == "INVALID_ARGUMENT"


@pytest.fixture(scope="module")
def cuda_runtime() -> str:
    """The folder of the library that perf_analyzer is linked against; it needs no GPU."""
    found = sorted(CLIENTS.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib"))
    if not PERF_ANALYZER.exists() or not found:
        pytest.skip("perf_analyzer is not installed here")
    needs = subprocess.run(["ldd", str(PERF_ANALYZER.resolve())], capture_output=True, text=True, check=False).stdout
    if re.search(r"libb64\S* => not found", needs):
        pytest.skip("perf_analyzer needs Debian's libb64-0d")
    return str(found[0])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("model", "shapes"), [("minilm", ("input_ids:1,24", "attention_mask:1,24")), ("digits", ("image:1,1,8,8",))]
)
def test_perf_analyzer_from_one_request_at_once_to_32(
    stack: Stack, cuda_runtime: str, protocol: str, model: str, shapes: tuple[str, ...]
) -> None:
    address = stack.http.removeprefix("http://") if protocol == "http" else stack.grpc
    # It ends at the first error, and of 32 at once one may take a busy machine more than the two seconds of a default.
    budget = {"http": ("-H", "tidegate-budget-ms:30000"), "grpc": ("--request-parameter", "timeout:30000000:int")}
    said = run(
        *(str(PERF_ANALYZER), "-m", model, "-u", address, "-i", protocol, "--input-data", "zero"),
        *(part for shape in shapes for part in ("--shape", shape)),
        *("--concurrency-range", "1:32:31", "--measurement-mode", "count_windows"),
        *budget[protocol],
        *("--measurement-request-count", "40", "--max-trials", "3", "--stability-percentage", "1000"),
        LD_LIBRARY_PATH=cuda_runtime,
    )
    throughputs = re.findall(r"^Concurrency: (\d+), throughput: ([\d.]+) infer/sec", said, re.MULTILINE)
    assert [int(concurrency) for concurrency, _ in throughputs] == [1, 32]
    assert all(float(throughput) > 0 for _, throughput in throughputs)
