"""Models that come and go on a whole device: real sockets, real workers, unmodified clients."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from tritonclient.utils import InferenceServerException

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tests.support.models.tiny_models import tiny_repository
from tidegate import clock
from tidegate.config import load
from tidegate.runtime.process import StartError

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tiny_repository(tmp_path / "models")


def edge(root: Path, **keys: Any) -> EdgeApp:
    where = {"grpc_port": 0, "http_port": 0, "model_repository": root, "state_dir": root.parent / "state"}
    control = {"model_control": "explicit", "operator_token_file": root.parent / "token", "warmup_budget_s": 0.5}
    return EdgeApp(load(EdgeConfig, name="kiosk-1", **(where | control | keys)), draw=lambda: 0.1)


def shown(root: Path) -> dict[str, str]:
    return {"authorization": f"Bearer {(root.parent / 'token').read_text().strip()}"}


def asked(triton: Any) -> list[Any]:
    return [triton.InferInput("x", (1, 4), "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))]


async def test_models_come_and_go_over_http_and_grpc(root: Path) -> None:
    async with edge(root, models=("rounds",)) as app:
        address = app.addresses["http"].removeprefix("http://")
        async with (
            triton_grpc.InferenceServerClient(app.addresses["grpc"]) as grpc,
            triton_http.InferenceServerClient(address) as http,
        ):
            with pytest.raises(InferenceServerException, match="needs the operator's token"):
                await http.load_model("double")
            await http.load_model("double", headers=shown(root))
            assert (await grpc.infer("double", asked(triton_grpc))).as_numpy("y").tolist() == [[2.0] * 4]
            index = {one["name"]: one["state"] for one in await http.get_model_repository_index()}
            assert (index["double"], index["rounds"]) == ("READY", "READY")
            await grpc.unload_model("double", headers=shown(root))
            with pytest.raises(InferenceServerException, match="unloaded from edge/kiosk-1"):
                await http.infer("double", asked(triton_http))
            assert [offer.name for offer in app.host.offers()] == ["rounds"]
            assert len(app.deployment.serving.runners) == 1


async def test_a_followed_folder_decides_what_a_device_serves(root: Path, tmp_path: Path) -> None:
    shutil.move(root / "double", tmp_path / "double")
    async with edge(root, model_control="poll", repository_poll_s=0.05) as app, asyncio.timeout(60.0):
        assert "double" not in [offer.name for offer in app.host.offers()]
        shutil.move(tmp_path / "double", root / "double")
        while "double" not in [offer.name for offer in app.host.offers()]:
            await clock.sleep(0.02)


async def test_a_device_with_rollouts_has_no_second_master(root: Path) -> None:
    with pytest.raises(StartError, match="does not go with 'rollout'"):
        async with edge(root, rollout={"keys": (root / "operator.pub",)}, mqtt="mqtt://127.0.0.1:1"):
            raise AssertionError("it started")
