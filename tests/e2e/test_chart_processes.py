"""What the chart renders starts real processes: a gateway finds its pool by the pool's Service, and answers from there.

The configuration and the environment are those of the pods. Changed is what a cluster gives: where the API server is,
which ports are free on this machine, where models are mounted.
"""

from __future__ import annotations

import asyncio
import copy
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.stack import eventually
from tests.e2e.test_small_installs import WARM_S, Part
from tests.support.chart.rendering import EXAMPLES, Rendered, has_helm, render
from tests.support.discovery.cluster_api import SERVICE, ClusterApi, endpoint, slice_of
from tidegate.testing.ports import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(not has_helm(), reason="`make checks` could not set up Helm's engine here"),
]
POD = "tide-pool-0"


def name_from_the_pod(example: Rendered, kind: str, part: str) -> str:
    """The variable by which a process is told its pod's name."""
    container = example.one(kind, part)["spec"]["template"]["spec"]["containers"][0]
    variable = container["env"][0]
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    return str(variable["name"])


def started(role: str, folder: Path, config: dict[str, Any]) -> Part:
    folder.mkdir()
    return Part(role, folder, config, without=())


async def test_a_rendered_gateway_answers_from_a_rendered_pool(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = yaml.safe_load(EXAMPLES["gpu-keda"].read_text())
    values["gateway"]["env"] = []
    values["pool"] |= {"device": "cpu", "config": {"warmup_budget_s": WARM_S}}
    rendered, _ = render({"tried": values})
    example = rendered["tried"]
    port = free_ports(7)
    pool = example.configuration("-pool") | {
        "host": "127.0.0.1", "grpc_port": port, "metrics_port": port + 1, "model_repository": str(digits)
    }  # fmt: skip
    monkeypatch.setenv(name_from_the_pod(example, "StatefulSet", "-pool"), POD)
    monkeypatch.setenv(name_from_the_pod(example, "Deployment", "-gateway"), "tide-gateway-6c9f-x2x4z")
    pool_part = started("pool", tmp_path / "pool", pool)
    try:
        service = example.one("Service", "-pool")["metadata"]["name"]
        async with ClusterApi(service=service) as api:
            gateway = copy.deepcopy(example.configuration("-gateway")) | {
                "host": "127.0.0.1", "http_port": port + 2, "grpc_port": port + 3, "metrics_port": port + 4,
                "admin_port": port + 5, "link_port": port + 6, "model_repository": str(digits),
            }  # fmt: skip
            gateway["discovery"][0] |= {"server": api.url, "namespace": "prod"}
            where = {"name": f"{service}-1", "namespace": "prod", "labels": {SERVICE: service}}
            await asyncio.to_thread(pool_part.wait_ready)
            gateway_part = started("gateway", tmp_path / "gateway", gateway)
            try:
                await asyncio.to_thread(gateway_part.wait_ready)
                base = f"http://127.0.0.1:{port + 2}"
                assert status_of(f"{base}/v2/health/ready") == 503, (
                    "no pod is there yet: the Service sends nothing here"
                )
                assert status_of(f"{base}/v2/health/live") == 200
                api.put(slice_of(f"{service}-1", port, endpoint(POD, "127.0.0.1"), metadata=where))
                await asyncio.to_thread(
                    eventually, lambda: status_of(f"{base}/v2/health/ready") == 200, 60, "the gateway found the pod"
                )
                answered, headers = await asyncio.to_thread(infer, base)
                assert answered["outputs"][0]["shape"] == [1, 10]
                assert headers["tidegate-served-by"] == f"pool/{POD}"
            finally:
                code = await asyncio.to_thread(gateway_part.stop)
            assert code == 0
    finally:
        code = await asyncio.to_thread(pool_part.stop)
    assert code == 0


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def infer(base: str) -> tuple[dict[str, Any], dict[str, str]]:
    image = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.5] * 64}
    request = urllib.request.Request(
        f"{base}/v2/models/digits/infer", json.dumps({"inputs": [image]}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer), {key.lower(): value for key, value in answer.headers.items()}
