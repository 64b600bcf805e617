"""A user's samples are run when a model is loaded, and what is wrong with one is said by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.cloud_pool.models import TEXT
from tests.support.pool.fake_worker import FakeWorker
from tidegate.models.validate import problems
from tidegate.outcome import InternalError
from tidegate.workers.process import EngineSpec
from tidegate.workers.warming.warmup_samples import run_samples

IDS = np.ones((1, 3), np.int64)


async def run(folder: Path, *names: str, optional: bool = False) -> list[tuple[int, ...]]:
    async with FakeWorker() as worker:
        await worker.load(EngineSpec("text", "onnx", Path(__file__), ()))
        await run_samples(worker, "text", replace(TEXT, warmup=names), folder, optional=optional)
        return [inputs["ids"].shape for inputs in worker.begun]


async def test_each_file_is_one_call(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=IDS, mask=IDS)
    np.savez(tmp_path / "b.npz", ids=np.ones((2, 7), np.int64), mask=np.ones((2, 7), np.int64))
    assert await run(tmp_path, "a.npz", "b.npz") == [(1, 3), (2, 7)]


async def test_a_wrong_sample_keeps_the_model_from_being_served(tmp_path: Path) -> None:
    np.savez(tmp_path / "lacks.npz", ids=IDS)
    np.savez(tmp_path / "more.npz", ids=IDS, mask=IDS, other=IDS)
    np.savez(tmp_path / "refused.npz", ids=1000 * IDS, mask=IDS)
    np.savez(tmp_path / "objects.npz", ids=np.array([{}]), mask=IDS)
    for name, words in (
        ("lacks.npz", "lacks the input 'mask'"),
        ("more.npz", "'other' is no input"),
        ("refused.npz", "out of the table"),
        ("objects.npz", "the samples for warm-up"),
        ("missing.npz", "No such file"),
    ):
        with pytest.raises(InternalError, match=words):
            await run(tmp_path, name)


async def test_a_device_runs_the_samples_that_are_there(tmp_path: Path) -> None:
    assert await run(tmp_path, "missing.npz", optional=True) == []


@pytest.mark.parametrize(("names", "words"), [
    (("../a.npz",), "must be a plain file name"),
    (("a.npy",), "must be an .npz file"),
    (("a.npz", "a.npz"), "twice"),
    (tuple(f"{n}.npz" for n in range(65)), "at most 64"),
])  # fmt: skip
def test_a_manifest_names_samples_that_can_be(names: tuple[str, ...], words: str) -> None:
    assert any(words in one for one in problems(replace(TEXT, warmup=names)))
