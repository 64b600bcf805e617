"""Exported programs on a GPU: answers are a processor's, inputs are staged by another thread, memory is known."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda import crowded
from tests.support.models.trusted import trust_file
from tidegate.engines.engine import load_engine
from tidegate.engines.errors import EngineError, EngineOutOfMemory
from tidegate.engines.staging import Staged

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.cuda, pytest.mark.slow]

WIDTH = 256


@pytest.fixture(scope="module")
def artefacts(cuda: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """x → gelu(x · W) · V with a constant added, exported on the CPU in two precisions."""
    import torch

    torch.manual_seed(0)

    class Feed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.gelu(self.up(x))) + torch.arange(WIDTH, dtype=x.dtype)

    folder = tmp_path_factory.mktemp("artefacts") / "m" / "1"
    folder.mkdir(parents=True)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        module = Feed().to(dtype).eval()
        rows = torch.export.Dim("rows", min=1)
        program = torch.export.export(module, (torch.ones(2, WIDTH, dtype=dtype),), dynamic_shapes=({0: rows},))
        found[name] = folder / f"{name}.pt2"
        torch.export.save(program, found[name])
        trust_file(found[name])
    return found


def some(rows: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH), dtype=np.float32)


@pytest.mark.parametrize("compile", [False, True])
def test_a_program_answers_as_on_a_processor(artefacts: dict[str, Path], compile: bool) -> None:
    here = load_engine("torch-export", artefacts["fp32"], outputs=("y",))
    there = load_engine("torch-export", artefacts["fp32"], outputs=("y",), device="cuda", compile=compile)
    for rows in (1, 2, 7, 64):
        x = some(rows, rows)
        np.testing.assert_allclose(there.infer({"x": x})["y"], here.infer({"x": x})["y"], rtol=1e-4, atol=1e-3)


def test_bfloat16_travels_as_its_bits(artefacts: dict[str, Path]) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        engine = load_engine("torch-export", artefacts["bf16"], outputs=("y",), device=device)
        bits = (some(4).view("<u4") >> 16).astype("<u2")
        said = engine.infer({"x": bits})["y"]
        assert said.dtype == np.uint16
        answers.append((said.astype("<u4") << 16).view("<f4"))
    np.testing.assert_allclose(*answers, rtol=0.02, atol=0.05)


def test_inputs_that_another_thread_staged_are_those_that_are_computed(artefacts: dict[str, Path]) -> None:
    engine = load_engine("torch-export", artefacts["fp32"], outputs=("y",), device="cuda")
    here = load_engine("torch-export", artefacts["fp32"], outputs=("y",))
    given = [some(1 + seed % 50, seed) for seed in range(200)]
    staged: list[Staged] = []
    there = threading.Semaphore(0)

    def stage() -> None:
        for x in given:
            staged.append(engine.prepare({"x": x}))  # type: ignore[attr-defined]
            there.release()

    reader = threading.Thread(target=stage)
    reader.start()
    for number, x in enumerate(given):
        there.acquire()
        assert isinstance(staged[number], Staged)
        told = engine.infer(staged[number])["y"]
        np.testing.assert_allclose(told, here.infer({"x": x})["y"], rtol=1e-4, atol=1e-3)
    reader.join()


def test_a_call_without_memory_is_an_error_and_the_next_one_is_computed(artefacts: dict[str, Path]) -> None:
    engine = load_engine("torch-export", artefacts["fp32"], outputs=("y",), device="cuda")
    with crowded(64 << 20):
        with pytest.raises(EngineOutOfMemory):
            engine.infer({"x": np.zeros((400_000, WIDTH), np.float32)})
        assert engine.infer({"x": some(2)})["y"].shape == (2, WIDTH)


def test_the_meter_knows_what_is_held_and_what_a_call_takes(artefacts: dict[str, Path]) -> None:
    engine = load_engine("torch-export", artefacts["fp32"], outputs=("y",), device="cuda")
    meter = engine.device_meter
    assert meter is not None and meter.device_bytes > 1 << 30
    assert meter.held_bytes >= 4 * WIDTH * 4 * WIDTH
    meter.begin()
    engine.infer({"x": some(4096)})
    assert 4 * 4096 * WIDTH < meter.peak_bytes() < 1 << 30


def test_a_device_that_is_not_there_is_an_error_that_names_it(artefacts: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="cuda:97"):
        load_engine("torch-export", artefacts["fp32"], outputs=("y",), device="cuda:97")
