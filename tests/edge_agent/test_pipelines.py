"""A device that takes text: steps around a real ONNX model in its worker process, with modules in their sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tests.support.models.pipelines import expected_probabilities, wat_of_the_docs, weather_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.oip.check import check
from tidegate.outcome import InvalidRequest
from tidegate.runtime.process import StartError
from tidegate.types import Call, Datatype, InferRequest, Reply

pytestmark = pytest.mark.slow
wasmtime = pytest.importorskip("wasmtime")

# Ends after some digits, for ever where there are none: what a text makes of it is its caller's.
WAITS = """
(module
  (memory (export "memory") 4)
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (func (export "run") (param $at i32) (param $size i32) (result i64)
    (if (i32.eq (i32.load8_u offset=36 (local.get $at)) (i32.const 33)) (then (loop $go (br $go))))
    (if (i32.eq (i32.load8_u offset=36 (local.get $at)) (i32.const 63)) (then (unreachable)))
    (i64.or (i64.shl (i64.extend_i32_u (local.get $at)) (i64.const 32)) (i64.extend_i32_u (local.get $size)))))
"""


def modules(**other: str) -> dict[str, bytes]:
    return {name: bytes(wasmtime.wat2wasm(text)) for name, text in (wat_of_the_docs() | other).items()}


def config(folder: Path, **keys: Any) -> EdgeConfig:
    where = {"model_repository": folder / "models", "state_dir": folder / "state", "warmup_budget_s": 0.5}
    return load(EdgeConfig, name="kiosk-1", grpc_port=0, http_port=None, **(where | keys))


@asynccontextmanager
async def edge(folder: Path, **keys: Any) -> AsyncIterator[EdgeApp]:
    async with EdgeApp(config(folder, **({"steps": {"wasm": True}} | keys)), draw=lambda: 0.1) as app:
        yield app


async def asked(app: EdgeApp, *texts: str | bytes, budget_s: float = 30.0) -> Reply:
    """The answer to a request that was checked as servers check it."""
    array = np.empty(len(texts), object)
    array[:] = [text if isinstance(text, bytes) else text.encode() for text in texts]
    request = InferRequest("weather", (array_to_tensor("text", array, Datatype.BYTES),))
    check(request, app.host.manifest("weather"))
    return await app.host.infer(Call(request, "oip-grpc", clock.now(), clock.now() + budget_s))


def outputs(reply: Reply) -> dict[str, Any]:
    return {tensor.name: tensor_to_array(tensor) for tensor in reply.response.outputs}


async def test_a_device_answers_text_with_the_name_of_a_class(tmp_path: Path) -> None:
    weather_repository(tmp_path / "models", modules())
    async with edge(tmp_path) as app:
        reply = await asked(app, "calm tide", "the storm of 1953")
        found = outputs(reply)
        assert list(found) == ["label", "best", "probabilities"]
        assert found["label"].tolist() == [[b"smooth"], [b"rough"]]
        expected = expected_probabilities("calm tide", "the storm of 1953")
        np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)
        (offer,) = app.host.offers()
        units = [point for point, _ in offer.variants[0].cost]
        assert units[0] == 1.0 and len(units) >= 2  # measured at growing lengths of text


async def test_a_hostile_text_costs_its_caller_an_error_and_nobody_else_anything(tmp_path: Path) -> None:
    weather_repository(tmp_path / "models", modules(redact=WAITS))
    async with edge(tmp_path, steps={"wasm": True, "wasm_time_s": 0.1}) as app:
        for text, words in (
            ("! loops", "step wasm \\(redact.wasm\\): it (used up its fuel|took longer)"),
            ("? traps", "step wasm \\(redact.wasm\\): it trapped: unreachable"),
            (b"\xff\xff", "step tokenize \\(tokenizer.json\\): text 0 is not UTF-8"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await asked(app, text)
            assert outputs(await asked(app, "calm"))["label"].tolist() == [[b"smooth"]]
        (runner,) = app.deployment.serving.runners
        assert (runner.state, runner.exits, runner.lost_workers.count) == ("ready", 0, 0)


async def test_modules_run_only_where_the_operator_says_so(tmp_path: Path) -> None:
    weather_repository(tmp_path / "models", modules())
    with pytest.raises(StartError, match=r"step 'redact\.wasm' is a WebAssembly module, and key 'steps\.wasm' is"):
        async with EdgeApp(config(tmp_path), draw=lambda: 0.1):
            pass


async def test_a_module_that_asks_for_more_than_tensors_is_not_served(tmp_path: Path) -> None:
    asks = WAITS.replace("(memory", '(import "wasi_snapshot_preview1" "fd_write" (func)) (memory', 1)
    weather_repository(tmp_path / "models", modules(clip=asks))
    with pytest.raises(StartError, match=r"step wasm \(clip\.wasm\): .* imports wasi_snapshot_preview1\.fd_write"):
        async with edge(tmp_path):
            pass
