"""Pools' and edges' metrics stand in the documentation."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud_pool.metrics import PoolMetrics
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import boot_configuration
from tests.cloud_pool.workers.test_health_controller import watched
from tests.support.loop import on_virtual_time
from tests.support.models.tiny_models import tiny_repository
from tests.support.observe.metric_tables import check, documented
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.types import Call, Datatype, InferRequest

TRITON = "Triton's names, at all three"
PROCESS = "The process itself, at all three"
NEVER_WITHOUT_A_BROKER = {"tidegate_edge_mqtt_connected", "tidegate_edge_epoch"}
NEVER_WITHOUT_TLS = {f"tidegate_certificate_not_{end}_timestamp_seconds" for end in ("before", "after")}


@on_virtual_time
async def test_every_metric_of_a_pool_stands_in_the_documentation() -> None:
    async with watched(places=1) as watch:
        await watch.looks(2)
        metrics = PoolMetrics(
            watch.pool.scheduler,
            watch.pool.supervisor,
            watch.steward,
            lambda: [lane.statistics for lane in watch.pool.supervisor.lanes.values()],
        )
        check(metrics.collect(), "Pool", TRITON)
        found = {one.name: one for family in metrics.collect() for one in family.samples}
        assert found["tidegate_pool_batch_close_total"].labels["reason"] == "idle"
        assert found["tidegate_pool_batch_rows_count"].value == 4
        assert found["tidegate_pool_worker_memory_bytes"].value > 0


@pytest.mark.slow
async def test_an_edge_says_on_a_port_of_its_own_what_it_serves(tmp_path: Path) -> None:
    models = tiny_repository(tmp_path / "models")
    keys = {"grpc_port": 0, "http_port": None, "metrics_port": 0, "model_repository": models, "models": ["double"]}
    (tmp_path / "device.yaml").touch()
    more = {"device_file": tmp_path / "device.yaml", "help": {}, "gateways": ["127.0.0.1:9"]}
    more["answer_neighbours"] = {"devices": ["*"]}
    config = load(EdgeConfig, name="kiosk-1", state_dir=tmp_path / "state", warmup_budget_s=0.5, **keys, **more)
    async with EdgeApp(config, boot=boot_configuration(config)) as app:
        tensor = array_to_tensor("x", np.ones((2, 2), dtype=np.float32), Datatype.FP32)
        await app.host.infer(Call(InferRequest("double", (tensor,)), "oip-http", clock.now()))
        app.host.drain()
        with pytest.raises(Exception, match="shutting down"):
            await app.host.infer(Call(InferRequest("double", (tensor,)), "oip-http", clock.now()))

        url = f"http://{app.addresses['metrics']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())

    families = list(text_string_to_metric_families(text))
    found = {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}
    assert found["tidegate_edge_requests_total", "double", "ok"] == 1
    assert found["tidegate_edge_requests_total", "double", "unreachable"] == 1
    assert found["tidegate_edge_stage_seconds_count", "compute", "double"] == 1
    assert found["nv_inference_request_failure", "1", "BACKEND", "double"] == 1
    assert found["nv_inference_pending_request_count", "1", "double"] == 0
    assert any(name[0] == "process_resident_memory_bytes" for name in found)
    told = set(documented("Edge", PROCESS, TRITON)) - NEVER_WITHOUT_A_BROKER - NEVER_WITHOUT_TLS
    seen = {one.name + ("_total" if one.type == "counter" else "") for one in families if "process_" not in one.name}
    assert seen == told
