"""Reused buffers and prepared inputs, as far as a CPU can test them."""

from __future__ import annotations

import gc
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tidegate.engines.staging import LEAST_BYTES, BufferPool, Staged, bucket_bytes, filled
from tidegate.workers.array_transport import Handover
from tidegate.workers.channel import LoadEngine, RunEngine, pack
from tidegate.workers.child import ComputeServer
from tidegate.workers.inbox import CallFrames, CallInbox, Prepare


def pool(**how: int) -> BufferPool:
    return BufferPool(lambda size: torch.empty(size, dtype=torch.uint8), **how)


def test_buffers_are_of_size_classes() -> None:
    sizes = {1: LEAST_BYTES, LEAST_BYTES: LEAST_BYTES, LEAST_BYTES + 1: 2 * LEAST_BYTES, 100_000: 131_072}
    assert {size: bucket_bytes(size) for size in sizes} == sizes
    assert pool().take(100_000).numel() == 131_072


def test_a_buffer_is_used_again_for_any_size_of_its_class() -> None:
    subject = pool()
    first = subject.take(5000)
    subject.give(first)
    assert subject.take(8192).data_ptr() == first.data_ptr()
    assert subject.take(8192).data_ptr() != first.data_ptr()
    assert (subject.made, subject.kept_bytes) == (2, 0)


def test_what_is_kept_is_bounded() -> None:
    subject = pool(most_bytes=3 * LEAST_BYTES)
    for buffer in [subject.take(1) for _ in range(5)]:
        subject.give(buffer)
    assert repr(subject) == f"<BufferPool 5 made, {3 * LEAST_BYTES} bytes kept>"


@pytest.mark.parametrize("array", [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.array([[True], [False]]),
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    np.array(7, dtype=np.uint16),
])  # fmt: skip
def test_a_filled_buffer_has_the_arrays_type_shape_and_values(array: Any) -> None:
    buffer = torch.full((LEAST_BYTES,), 255, dtype=torch.uint8)
    tensor = filled(buffer, array)
    assert tensor.data_ptr() == buffer.data_ptr()
    assert tensor.shape == array.shape
    assert np.array_equal(tensor.numpy(), array)


def test_staged_arrays_still_look_like_arrays() -> None:
    arrays = {"x": np.ones(3)}
    staged = Staged(arrays, {}, None)
    assert dict(staged) == arrays
    assert isinstance(staged, dict)


class Preparing:
    """An engine on a device of its own, which takes inputs ahead of their turn."""

    prepares = True

    def prepare(self, inputs: Any) -> Any:
        return Staged(inputs, {}, None)


class Watched(CallInbox):
    """Takes all frames itself, and keeps by what they would have been prepared."""

    prepare: Prepare | None = None

    def read_ahead(self, prepare: Prepare) -> None:
        self.prepare = prepare


def load_engine(key: str) -> LoadEngine:
    return LoadEngine(4, key, "onnx", f"{key}.onnx", outputs=(), threads=0, device="cpu")


def test_a_worker_has_the_engine_prepare_a_call_that_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {Path("gpu.onnx"): Preparing(), Path("cpu.onnx"): object()}
    monkeypatch.setattr(gc, "callbacks", [])  # a worker times collections until its process ends, and this one goes on
    monkeypatch.setattr("tidegate.workers.child.load_engine", lambda _name, artefact, **_how: engines[artefact])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handover = Handover.nothing()
        worker = ComputeServer(theirs, handover, inbox := Watched(CallFrames(theirs, handover)))
        with ThreadPoolExecutor(1) as executor:
            serving = executor.submit(worker.serve)
            assert ours.recv(4096), "its greeting, before the answers"
            for frame in (pack(load_engine("cpu")), pack(load_engine("gpu"))):
                ours.sendall(frame)
                assert ours.recv(4096)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(EOFError):
                serving.result()
        assert inbox.prepare == worker.prepare, "frames are read ahead since there is an engine that prepares"
        arrays = {"x": np.ones(3)}
        assert isinstance(worker.prepare(RunEngine(1, "gpu"), arrays), Staged)
        assert worker.prepare(RunEngine(2, "cpu"), arrays) is arrays
        assert worker.prepare(RunEngine(3, "nobody"), arrays) is arrays
        assert worker.prepare(load_engine("gpu"), arrays) is arrays
