"""The arena meter knows what an engine holds on a device, and what a call took that made its arena grow."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.tiny_models import classifier
from tidegate.engines import onnx
from tidegate.engines.device_memory_meter import ArenaMeter, FreeMemory, arena_meter, cuda_memory
from tidegate.workers.memory_meter import Meter, device_meter_of

TOTAL = 1_000_000


class Device:
    """A device whose memory is taken and never given back, as an arena's is."""

    def __init__(self) -> None:
        self.used = 300

    def __call__(self) -> FreeMemory | None:
        return FreeMemory(TOTAL - self.used, TOTAL)


class ArenaEngine:
    """Takes as much of the device as its input is large."""

    def __init__(self, device: Device) -> None:
        self.device, self.arena = device, 0
        self.device_meter = ArenaMeter(device)
        device.used += 500
        self.device_meter.loaded()

    def infer(self, inputs: Any) -> dict[str, Any]:
        grows = max(0, inputs["x"].nbytes - self.arena)
        self.arena, self.device.used = self.arena + grows, self.device.used + grows
        return {"y": np.ones(1)}


def test_the_engine_holds_what_the_device_lost_while_it_was_made() -> None:
    engine = ArenaEngine(Device())
    assert (engine.device_meter.held_bytes, engine.device_meter.device_bytes) == (500, TOTAL)


def test_a_call_that_makes_the_arena_grow_took_all_of_it_and_of_another_nothing_is_known(tmp_path: Path) -> None:
    engine, meter = ArenaEngine(Device()), Meter(tmp_path)
    peaks = [meter.run("m", engine, {"x": np.zeros(size, np.uint8)})[2] for size in (100, 300, 200, 400)]  # type: ignore[arg-type]
    assert peaks == [100, 300, None, 400]


def test_a_call_that_fits_into_the_arena_teaches_nothing() -> None:
    engine = ArenaEngine(Device())
    engine.infer({"x": np.zeros(300, np.uint8)})
    engine.device_meter.begin()
    engine.infer({"x": np.zeros(200, np.uint8)})
    assert engine.device_meter.peak_bytes() is None


def test_where_nothing_tells_there_is_no_meter() -> None:
    assert arena_meter(0, lambda: None) is None


@pytest.mark.parametrize("library", ["libnothing-of-this-name.so", ctypes.util.find_library("c") or "libc.so.6"])
def test_a_library_that_is_absent_or_another_one_tells_nothing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert cuda_memory(0, [library]) is None


def test_onnx_on_cuda_has_a_meter_and_on_a_cpu_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artefact = classifier(tmp_path / "m.onnx", features=4)
    assert device_meter_of(onnx.OnnxEngine(artefact)) is None
    device = Device()
    monkeypatch.setattr(onnx, "arena_meter", lambda index: ArenaMeter(device) if index == 1 else None)
    monkeypatch.setattr(onnx, "providers_of", lambda *_: [("CPUExecutionProvider", {})])
    meter = device_meter_of(onnx.OnnxEngine(artefact, device="cuda:1"))
    assert meter is not None
    assert meter.device_bytes == TOTAL
