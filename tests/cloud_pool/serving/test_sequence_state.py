"""A model that remembers, through a real pool and an unmodified client: a recurrent cell in ONNX."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc.aio as triton
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from tests.cloud_pool.workers_support import OPSET
from tidegate import clock
from tidegate.config import load
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Batching, Cost, Manifest, Stateful, TensorSpec, Variant
from tidegate.models.repository import Repository, save_manifest
from tidegate.types import Datatype

pytestmark = [pytest.mark.slow, pytest.mark.clients]

WIDTH = 4


def weights() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(5)
    w, u = random.normal(0.0, 0.5, (2, WIDTH, WIDTH)).astype(np.float32)
    return w, u


def write_cell(path: Path) -> Path:
    """next_h = tanh(x W + h U), and y = the sum of next_h; `seen` counts the steps."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    integers, floats = TensorProto.INT64, TensorProto.FLOAT
    w, u = weights()
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"]),
            helper.make_node("MatMul", ["h", "u"], ["hu"]),
            helper.make_node("Add", ["xw", "hu"], ["both"]),
            helper.make_node("Tanh", ["both"], ["next_h"]),
            helper.make_node("ReduceSum", ["next_h", "axis"], ["y"], keepdims=1),
            helper.make_node("Add", ["seen", "one"], ["next_seen"]),
        ],
        "cell",
        [
            helper.make_tensor_value_info("x", floats, ["batch", WIDTH]),
            helper.make_tensor_value_info("h", floats, ["batch", WIDTH]),
            helper.make_tensor_value_info("seen", integers, ["batch", 1]),
        ],
        [
            helper.make_tensor_value_info("y", floats, ["batch", 1]),
            helper.make_tensor_value_info("next_h", floats, ["batch", WIDTH]),
            helper.make_tensor_value_info("next_seen", integers, ["batch", 1]),
        ],
        [
            numpy_helper.from_array(w, "w"),
            numpy_helper.from_array(u, "u"),
            helper.make_tensor("axis", integers, [1], [1]),
            helper.make_tensor("one", integers, [1], [1]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return path


def manifest_of(path: Path, *, ttl_s: float = 60.0) -> Manifest:
    vector, counter = ("batch", WIDTH), ("batch", 1)
    return Manifest(
        name="cell",
        version="1",
        inputs=(
            TensorSpec("x", Datatype.FP32, vector),
            TensorSpec("h", Datatype.FP32, vector, optional=True),
            TensorSpec("seen", Datatype.INT64, counter, optional=True),
        ),
        outputs=(
            TensorSpec("y", Datatype.FP32, counter),
            TensorSpec("next_h", Datatype.FP32, vector),
            TensorSpec("next_seen", Datatype.INT64, counter),
        ),
        variants=(Variant("fp32", path.name, "onnx", "fp32", ("pool",), sha256_of(path), path.stat().st_size),),
        cost=Cost("items", "x"),
        axes={"batch": Axis(1, 64)},
        batching=Batching(max_batch_size=8),
        sequence=Stateful({"h": "next_h", "seen": "next_seen"}, ttl_s=ttl_s, max_sequences=3),
    )


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cell(tmp_path_factory.mktemp("cell") / "cell.onnx")


@pytest.fixture
async def app(artefact: Path, tmp_path: Path) -> AsyncIterator[PoolApp]:
    folder = tmp_path / "cell" / "1"
    folder.mkdir(parents=True)
    (folder / artefact.name).symlink_to(artefact)
    save_manifest(folder, manifest_of(artefact))
    config = load(PoolConfig, grpc_port=0, model_repository=tmp_path, warmup_budget_s=0.2, device="cpu")
    async with PoolApp(config, draw=lambda: 0.1) as running:
        yield running


@pytest.fixture
async def client(app: PoolApp) -> AsyncIterator[Any]:
    async with triton.InferenceServerClient(app.address) as running:
        yield running


async def step(client: Any, id: int | str, value: float, **flags: bool) -> tuple[float, list[str]]:
    x = np.full((1, WIDTH), value, np.float32)
    tensor = triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
    answer = await client.infer(
        "cell", [tensor], sequence_id=id, **{f"sequence_{name}": value for name, value in flags.items()}
    )
    return float(answer.as_numpy("y")[0, 0]), [output.name for output in answer.get_response().outputs]


async def seen(client: Any, id: int | str) -> int:
    """How many steps the sequence has had with this one."""
    x = np.zeros((1, WIDTH), np.float32)
    tensor = triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
    answer = await client.infer("cell", [tensor], sequence_id=id, outputs=[triton.InferRequestedOutput("next_seen")])
    return int(answer.as_numpy("next_seen")[0, 0])


def expected(values: list[float]) -> list[float]:
    """The same steps by numpy."""
    (w, u), h, found = weights(), np.zeros((1, WIDTH), np.float32), []
    for value in values:
        h = np.tanh(np.full((1, WIDTH), value, np.float32) @ w + h @ u)
        found.append(float(h.sum()))
    return found


async def test_each_sequence_remembers_its_own_steps(client: Any) -> None:
    values = {1: [0.5, -0.2, 0.9], "two": [0.1, 0.1, 0.1]}
    found: dict[int | str, list[float]] = {1: [], "two": []}
    for index in range(3):
        steps = [step(client, id, series[index], start=index == 0, end=index == 2) for id, series in values.items()]
        for id, (y, outputs) in zip(values, await asyncio.gather(*steps), strict=True):
            found[id].append(y)
            assert outputs == ["y"]  # what a sequence keeps stays here
    for id, series in values.items():
        assert found[id] == pytest.approx(expected(series), abs=1e-5)
    with pytest.raises(InferenceServerException, match="sequence 1 of 'cell' is not known here"):
        await step(client, 1, 0.0)


async def test_steps_that_come_at_once_are_taken_one_after_another(client: Any) -> None:
    await step(client, 5, 0.0, start=True)
    counted = await asyncio.gather(*[seen(client, 5) for _ in range(20)])
    assert sorted(counted) == list(range(2, 22))


async def test_a_worker_that_dies_takes_no_sequence_with_it(app: PoolApp, client: Any) -> None:
    first, _ = await step(client, 9, 0.3, start=True)
    (worker,) = [child for child in psutil.Process().children() if "tidegate.workers.child" in child.cmdline()]
    with capture_logs():
        worker.kill()
        async with asyncio.timeout(60.0):
            while app.host.ready():
                await clock.sleep(0.002)
            while not app.host.ready():
                await clock.sleep(0.01)
    second, _ = await step(client, 9, 0.6, end=True)
    assert [first, second] == pytest.approx(expected([0.3, 0.6]), abs=1e-5)


async def test_wrong_steps_are_refused_in_words(client: Any) -> None:
    await step(client, 1, 0.0, start=True)
    with pytest.raises(InferenceServerException, match="live already") as refused:
        await step(client, 1, 0.0, start=True)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    await step(client, 2, 0.0, start=True)
    await step(client, 3, 0.0, start=True)
    with pytest.raises(InferenceServerException, match="3 sequences of 'cell' are live") as refused:
        await step(client, 4, 0.0, start=True)
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    x = np.zeros((2, WIDTH), np.float32)
    wider = triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
    with pytest.raises(InferenceServerException, match="all steps of a sequence have the same rows"):
        await client.infer("cell", [wider], sequence_id=1)
    state = triton.InferInput("h", list(x[:1].shape), "FP32").set_data_from_numpy(x[:1])
    one = triton.InferInput("x", list(x[:1].shape), "FP32").set_data_from_numpy(x[:1])
    with pytest.raises(InferenceServerException, match="is the sequence's own state"):
        await client.infer("cell", [one, state], sequence_id=1)
    await step(client, 1, 0.0)  # and none of this has harmed it


async def test_without_a_sequence_it_is_one_step_from_zeros_or_from_what_the_caller_brings(
    client: Any,
) -> None:
    x = np.full((1, WIDTH), 0.4, np.float32)
    tensor = triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
    first = await client.infer("cell", [tensor])
    own = triton.InferInput("h", [1, WIDTH], "FP32").set_data_from_numpy(first.as_numpy("next_h"))
    second = await client.infer("cell", [tensor, own])
    found = [float(answer.as_numpy("y")[0, 0]) for answer in (first, second)]
    assert found == pytest.approx(expected([0.4, 0.4]), abs=1e-5)


async def test_callers_who_vanish_leave_nothing_behind(app: PoolApp) -> None:
    async with triton.InferenceServerClient(app.address) as leaving:
        tasks = [asyncio.create_task(step(leaving, id, 0.1, start=True)) for id in (1, 2, 3)]
        await clock.sleep(0)  # they are on their way
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # A start that was cancelled is forgotten at once; one that was computed all the same stays for its time.
    async with asyncio.timeout(30.0):
        while app.host.sequences.live("cell") and app.host.load_report().in_flight:
            await clock.sleep(0.002)
    assert app.host.sequences.live("cell") <= 3


def test_the_manifest_of_a_model_that_remembers_is_kept(artefact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cell" / "1"
    folder.mkdir(parents=True)
    save_manifest(folder, manifest_of(artefact))
    assert Repository(tmp_path).manifest("cell").sequence == Stateful(
        {"h": "next_h", "seen": "next_seen"}, max_sequences=3
    )
