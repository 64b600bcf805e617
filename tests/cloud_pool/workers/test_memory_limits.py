"""Memory for real: a pool that is refused before it loads, and a worker whose allocations fail while it serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from cloud_pool.workers.memory_limit import MemoryLimit, computes_on_cpu
from tests.cloud_pool.workers_support import leave_room, rows_of_ones, text_repository, write_hungry_program
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Batching, Cost, Manifest, TensorSpec, Variant
from tidegate.models.repository import Repository, save_manifest
from tidegate.runtime.process import StartError
from tidegate.types import Call, Datatype, InferRequest, Reply
from tidegate.workers.memory_meter import EVERY

MIB = 1 << 20
FLOATS_PER_ROW = 4 * MIB  # 16 MiB


def hungry_repository(root: Path) -> Path:
    folder = root / "hungry" / "1"
    folder.mkdir(parents=True)
    path = write_hungry_program(folder / "hungry.pt2", floats_per_row=FLOATS_PER_ROW)
    variant = Variant("fp32", path.name, "torch-export", "fp32", ("pool",), sha256_of(path), path.stat().st_size)
    tensors = [TensorSpec(name, Datatype.FP32, ("batch", 1)) for name in ("x", "y")]
    save_manifest(
        folder,
        Manifest(
            "hungry",
            "1",
            (tensors[0],),
            (tensors[1],),
            (variant,),
            Cost("items", "x"),
            axes={"batch": Axis(1, 64)},
            batching=Batching(max_batch_size=16, policy="eager"),
        ),
    )
    return root


def worker_pid() -> int:
    (worker,) = [child for child in psutil.Process().children() if "tidegate.workers.child" in child.cmdline()]
    return worker.pid


async def ask(app: PoolApp, rows: int = 1) -> Reply:
    tensor = array_to_tensor("x", rows_of_ones(rows)["x"], Datatype.FP32)
    now = clock.now()
    return await app.host.infer(Call(InferRequest("hungry", (tensor,)), "link", now, now + 60.0))


def pool(repository: Path, **keys: object) -> PoolApp:
    defaults = {"grpc_port": 0, "model_repository": repository, "warmup_budget_s": 0.5, "device": "cpu"}
    return PoolApp(load(PoolConfig, **(defaults | keys)), draw=lambda: 0.1)


@pytest.mark.slow
async def test_models_that_cannot_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    told: list[str] = []
    config = load(
        PoolConfig,
        grpc_port=0,
        model_repository=text_repository(tmp_path / "models"),
        device="cpu",
        workers=2,
        memory_limit_bytes=100 * MIB,
    )
    with pytest.raises(StartError, match=r"needs 160 MiB of memory on cpu \(runtime 80 MiB \+ text:1/fp32 .* 100 MiB"):
        async with PoolApp(config, on_progress=told.append):
            raise AssertionError("it started")
    assert told == []


@pytest.mark.slow
async def test_a_batch_that_finds_no_memory_is_halved_and_every_caller_is_answered(tmp_path: Path) -> None:
    async with pool(hungry_repository(tmp_path / "models")) as app:
        pid = worker_pid()
        assert await answers(app, 1) == [[FLOATS_PER_ROW]]
        leave_room(pid, 160 * MIB)  # sixteen rows are 256
        with capture_logs() as logs:
            # The first is alone, and sixteen have gathered by the time that it is done.
            found = await answers(app, 49)
        assert found == [[FLOATS_PER_ROW]] * 49
        short = [entry for entry in logs if entry["event"] == "out of memory"]
        assert short
        assert all(entry["lane"] == "hungry:1/fp32" and entry["cap"] < entry["units"] <= 16 for entry in short)
        assert worker_pid() == pid
        # Nothing failed: a cap that was learned is no error of anybody's.
        assert app.host.statistics("hungry")[0].fail.count == 0


@pytest.mark.slow
async def test_short_texts_by_the_hundred_leave_a_place_for_long_ones(demo_repository: Repository) -> None:
    """What a large batch left with the allocator was once counted to the short ones that came after it."""
    long = 256
    async with pool(
        demo_repository.root, models=["minilm"], warmup_budget_s=10.0, memory_limit_bytes=2048 * MIB
    ) as app:
        await embed(app, long)
        for short in range(2, 10):
            for _ in range(2 * EVERY):  # one at a time, each a batch of its own, and one of EVERY is measured
                await embed(app, short)
        await embed(app, long)


async def embed(app: PoolApp, tokens: int) -> Reply:
    ones = np.ones((1, tokens), np.int64)
    tensors = tuple(array_to_tensor(name, ones, Datatype.INT64) for name in ("input_ids", "attention_mask"))
    now = clock.now()
    return await app.host.infer(Call(InferRequest("minilm", tensors), "link", now, now + 60.0))


async def answers(app: PoolApp, callers: int) -> list[list[float]]:
    replies = await asyncio.gather(*[ask(app) for _ in range(callers)])
    return [tensor_to_array(reply.response.outputs[0])[0].tolist() for reply in replies]


def test_the_limit_is_a_share_of_what_there_is_or_what_was_said() -> None:
    assert MemoryLimit(None, 1000.0).of(None) == pytest.approx(900.0)
    assert MemoryLimit(None, 1000.0).of(10_000.0) == pytest.approx(9000.0)
    assert MemoryLimit(5000.0, 1000.0).of(10_000.0) == 5000.0


@pytest.mark.parametrize(
    ("device", "driver", "on_cpu"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda:1", True, False)],
)
def test_auto_is_the_cpu_only_where_no_driver_is(tmp_path: Path, device: str, driver: bool, on_cpu: bool) -> None:
    if driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").touch()
    assert computes_on_cpu(device, tmp_path) is on_cpu
