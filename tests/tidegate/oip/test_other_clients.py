"""kserve's client and Triton's perf_analyzer, unmodified, from the environment that `make clients` sets up for them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.oip_servers import Servers

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".venv-clients"
PYTHON = CLIENTS / "bin" / "python"
PERF_ANALYZER = CLIENTS / "bin" / "perf_analyzer"

pytestmark = [pytest.mark.clients, pytest.mark.slow]


async def output_of(*command: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    try:
        told, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told.decode()
    return told.decode()


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make clients`")
async def test_kserve_over_rest_and_grpc(servers: Servers) -> None:
    script = ROOT / "tests" / "support" / "clients" / "kserve_client.py"
    told = json.loads((await output_of(str(PYTHON), str(script), servers.http, servers.grpc)).splitlines()[-1])
    answered = {"id": "q7", "model": "minilm", "first": 6.0, "shape": [1, 384], "served_by": "edge/attic"}
    for protocol, forms in (("rest", ("json", "binary")), ("grpc", ("raw", "typed"))):
        found: dict[str, Any] = told[protocol]
        assert [found["live"], found["ready"], found["model_ready"]] == [True] * 3
        assert [found[form] for form in forms] == [answered] * 2
    # Its REST client shows an error's text only under a Content-Type of exactly application/json.
    assert "missing input 'attention_mask'" in told["rest"]["error"]
    assert "404" in told["rest"]["unknown"]
    assert told["grpc"]["error"][0] == "INVALID_ARGUMENT"
    assert told["grpc"]["unknown"][0] == "NOT_FOUND"


@pytest.mark.skipif(not PERF_ANALYZER.exists(), reason="needs `make clients`")
@pytest.mark.parametrize("how", [
    ["-i", "http", "--concurrency-range", "1:32:31"],
    ["-i", "http", "--async", "--concurrency-range", "8"],
    ["-i", "grpc", "--concurrency-range", "1:32:31"],
    ["-i", "grpc", "--streaming", "--async", "--concurrency-range", "8"],
])  # fmt: skip
async def test_perf_analyzer(servers: Servers, how: list[str]) -> None:
    address = servers.http if "http" in how else servers.grpc
    libraries = sorted({str(path.parent) for path in CLIENTS.rglob("libcudart.so.12")})
    told = await output_of(
        str(PERF_ANALYZER),
        *("-m", "minilm", "-u", address, *how),
        *("--shape", "input_ids:1,24", "--shape", "attention_mask:1,24", "--input-data", "zero"),
        # Any spread counts as stable: what is asked here is whether it works, on a machine that may be busy.
        *("-s", "999", "--measurement-mode", "count_windows", "--measurement-request-count", "50"),
        LD_LIBRARY_PATH=":".join(libraries),
    )
    assert "throughput:" in told
    assert "error" not in told.lower()
    assert servers.refused == []
    assert len(servers.host.calls) >= 150
