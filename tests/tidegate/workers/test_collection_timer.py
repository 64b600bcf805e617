"""What garbage collections take in a worker reaches its parent with the worker's answers."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.cloud_pool.workers_support import text, write_text_model
from tidegate.workers.collection_timer import CollectionTimer
from tidegate.workers.process import EngineSpec, WorkerProcess


def test_each_collection_is_told_once() -> None:
    subject = CollectionTimer()
    subject.start()
    try:
        gc.collect()
        assert subject.take_s() > 0.0
        assert subject.take_s() == 0.0
    finally:
        subject.close()
    gc.collect()
    assert subject.take_s() == 0.0


@pytest.mark.slow
async def test_a_worker_tells_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import gc\ngc.set_threshold(2)\n")  # a worker's calls leave little
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with WorkerProcess("one") as worker:
        await worker.load(EngineSpec("text", "onnx", write_text_model(tmp_path / "text.onnx"), ("sum", "twice")))
        for _ in range(20):
            await worker.infer("text", text(8))
        assert worker.collected_s > 0.0
