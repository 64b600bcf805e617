"""A device is tried in a process that serves nobody: what it does there costs a line in the log."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.loop import on_virtual_time
from tests.support.models.tiny_models import double_manifest, write_double
from tidegate import clock
from tidegate.outcome import InternalError
from tidegate.workers.process import ComputeResult, EngineSpec, LoadResult, WorkerDied, WorkerProcess
from tidegate.workers.warming.device_trial import DeviceTrials

MANIFEST = double_manifest()
VARIANT = MANIFEST.variants[0]
SPEC = EngineSpec(VARIANT.name, "onnx", Path("double.onnx"), ("y",))


class Device:
    """A worker whose devices take what they are said to take, on virtual time."""

    def __init__(self, took_s: dict[str, float], *, off: float = 0.0, load: BaseException | None = None) -> None:
        self._took_s, self._off, self._load = took_s, off, load
        self.ended = False
        self.calls: list[str] = []

    async def load(self, spec: EngineSpec) -> LoadResult:
        assert spec.key == spec.device
        if self._load is not None and spec.device != "cpu":
            raise self._load
        return LoadResult(0.1)

    async def infer(self, key: str, inputs: Any) -> ComputeResult:
        self.calls.append(key)
        await clock.sleep(self._took_s[key])
        return ComputeResult({"y": (2.0 if key == "cpu" else 2.0 - self._off) * inputs["x"]}, self._took_s[key])

    @asynccontextmanager
    async def start(self, name: str) -> AsyncIterator[Device]:
        try:
            yield self
        finally:
            self.ended = True


async def outcome(device: Device, **how: Any) -> tuple[str, str]:
    choice = await DeviceTrials(("cuda",), device.start, **how).choose(MANIFEST, VARIANT, SPEC)
    assert device.ended
    return choice.device, choice.reasons[0]


@on_virtual_time
async def test_one_that_is_right_and_faster_is_taken_after_calls_in_turn() -> None:
    device = Device({"cpu": 0.008, "cuda": 0.002})
    assert (await outcome(device))[0] == "cuda"
    assert device.calls[:6] == ["cpu", "cuda"] * 3
    assert device.calls.count("cpu") == device.calls.count("cuda")


@on_virtual_time
@pytest.mark.parametrize(
    ("device", "said"),
    [
        (Device({"cpu": 0.002, "cuda": 0.008}), "0.25 times as fast"),
        (Device({"cpu": 0.008, "cuda": 0.002}, off=3.0), "its answers are others"),
        (Device({"cpu": 0.008, "cuda": 1e9}), "it was not through after 60 s"),
        (Device({"cpu": 1.0, "cuda": 1.0}, load=InternalError("no driver")), "no driver"),
        (Device({"cpu": 1.0, "cuda": 1.0}, load=WorkerDied("was killed by SIGSEGV")), "was killed by SIGSEGV"),
    ],
)
async def test_whatever_else_it_does_the_processor_computes(device: Device, said: str) -> None:
    where, reason = await outcome(device)
    assert where == "cpu"
    assert said in reason


@on_virtual_time
async def test_a_caller_that_leaves_ends_the_trial() -> None:
    device = Device({"cpu": 0.01, "cuda": 1e9})
    asking = asyncio.create_task(outcome(device, within_s=1e12))
    await clock.sleep(5.0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert device.ended


@pytest.mark.slow
async def test_a_real_process_that_dies_or_lacks_the_device_costs_only_the_trial(tmp_path: Path) -> None:
    artefact = write_double(tmp_path / "double.onnx")
    spec = EngineSpec(VARIANT.name, "onnx", artefact, ("y",))
    doomed: list[int] = []

    @asynccontextmanager
    async def killed(name: str) -> AsyncIterator[WorkerProcess]:
        async with WorkerProcess(name) as worker:
            assert worker.pid is not None
            doomed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
            yield worker

    choice = await DeviceTrials(("cuda",), killed).choose(MANIFEST, VARIANT, spec)
    assert choice.device == "cpu" and "SIGKILL" in choice.reasons[0]
    choice = await DeviceTrials(("qnn",), WorkerProcess).choose(MANIFEST, VARIANT, spec)
    assert choice.device == "cpu" and "install onnxruntime-qnn" in choice.reasons[0]
    async with WorkerProcess("still here") as worker:
        await worker.load(spec)
        x = np.ones((1, 1), np.float32)
        assert (await worker.infer(spec.key, {"x": x})).outputs["y"][0, 0] == 2.0
