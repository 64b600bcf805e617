"""Packed rows on a GPU: answers are those of a processor, recorded or not, and memory is known and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.cuda import crowded
from tests.support.models.tiny_bert import HIDDEN, MOST_TOKENS, VOCABULARY, tiny_bert, tiny_weights
from tidegate.engines.encoder.bert import Architecture, PackedBert
from tidegate.engines.encoder.graph_replay import GraphReplay

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.cuda, pytest.mark.slow]

CLOSE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


def on_cuda(dtype: torch.dtype, **how: Any) -> PackedBert:
    weights = {name: weight.to("cuda", dtype) for name, weight in tiny_weights().items()}
    return PackedBert(Architecture(heads=3, layers=1), weights, **how)


def some_rows(seed: int, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, MOST_TOKENS, size=rows, endpoint=True)
    return random.integers(0, VOCABULARY, size=int(lengths.sum())), lengths


@pytest.mark.parametrize("dtype", CLOSE)
def test_rows_are_answered_as_on_a_processor_first_recorded_and_replayed(dtype: torch.dtype) -> None:
    there, here = on_cuda(dtype), tiny_bert()
    with torch.inference_mode():
        for seed in range(24):  # shapes come again, with other rows
            ids, lengths = some_rows(seed % 12 if seed % 2 else seed, 1 + seed % 5)
            told, true = there(ids, lengths, None), here(ids, lengths, None)
            assert told.dtype == np.float32 and told.shape == true.shape
            np.testing.assert_allclose(told, true, atol=CLOSE[dtype])
    recorded = there.graphs
    assert (recorded is None) == (dtype is torch.float32)
    assert recorded is None or recorded.recorded > 0


def test_a_row_does_not_depend_on_its_company() -> None:
    model = on_cuda(torch.bfloat16)
    ids, lengths = some_rows(1, 8)
    with torch.inference_mode():
        together = [model(ids, lengths, None) for _ in range(4)]
        ends = np.cumsum(lengths)
        alone = [model(ids[end - length : end], np.array([length]), None)[0]
                 for end, length in zip(ends, lengths, strict=True)]  # fmt: skip
    for one in together[1:]:
        np.testing.assert_array_equal(one, together[0])  # a graph has the kernels that it was recorded with
    np.testing.assert_allclose(np.stack(alone), together[0], atol=CLOSE[torch.bfloat16])


def test_an_answer_is_the_callers_own_and_not_the_next_ones() -> None:
    model = on_cuda(torch.bfloat16)
    with torch.inference_mode():
        for _ in range(3):
            first = model(np.array([1, 2, 3]), np.array([3]), None)
        kept = first.copy()
        model(np.array([7, 8, 9]), np.array([3]), None)
    np.testing.assert_array_equal(first, kept)


def test_masked_tokens_are_no_part_of_an_answer() -> None:
    mask = np.array([True, False, True, True, True, False, True])
    ids, lengths = np.arange(7), np.array([4, 3])
    with torch.inference_mode():
        told = on_cuda(torch.float16)(ids, lengths, mask)
        np.testing.assert_allclose(told, tiny_bert()(ids, lengths, mask), atol=CLOSE[torch.float16])


def test_graphs_are_bounded_and_their_memory_is_counted() -> None:
    model = on_cuda(torch.bfloat16, most_graphs=2)
    assert model.graphs is not None
    with torch.inference_mode():
        for rows in (1, 2, 4, 8, 16) * 3:
            lengths = np.full(rows, 8)
            model(np.ones(8 * rows, np.int64), lengths, None)
    assert model.graphs.recorded == 2
    assert model.graphs.held_bytes > 0


def test_where_recording_fails_calls_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    def asks_the_processor(_: str, flat: torch.Tensor) -> torch.Tensor:
        return flat[: int(flat[0].item())].float()  # which cannot be recorded

    replay = GraphReplay(asks_the_processor, torch.device("cuda"))
    for _ in range(4):
        answer = replay("one", np.array([2, 5, 7], np.int32))
        assert answer.tolist() == [2.0, 5.0]
    assert replay.recorded == 0
    assert caplog.text.count("CUDA graphs are not used any more") == 1
    later = on_cuda(torch.bfloat16)
    with torch.inference_mode():
        for _ in range(4):  # a recording that broke off must not break what comes after it
            assert later(np.ones(9, np.int64), np.array([9]), None).shape == (1, HIDDEN)
    assert later.graphs is not None and later.graphs.recorded == 1


def test_an_engine_that_finds_no_memory_says_so_and_computes_the_next_call(tmp_path: Path) -> None:
    from tests.support.models.packed_file import write_packed
    from tidegate.engines.encoder.torch_packed import TorchPackedEngine
    from tidegate.engines.errors import EngineOutOfMemory

    engine = TorchPackedEngine(write_packed(tmp_path / "bf16.safetensors"), outputs=("x",), device="cuda")
    rows = 200_000
    many = {"input_ids": np.ones(rows * 8, np.int64), "attention_mask": np.ones(rows * 8, np.int64),
            "lengths": np.full(rows, 8)}  # fmt: skip
    few = {name: array[:16] for name, array in many.items() if name != "lengths"} | {"lengths": np.array([8, 8])}
    with crowded(64 << 20):
        with pytest.raises(EngineOutOfMemory):
            engine.infer(many)
        assert engine.infer(few)["x"].shape == (2, HIDDEN)
    meter = engine.device_meter
    assert meter is not None and 0 < meter.held_bytes < meter.device_bytes
