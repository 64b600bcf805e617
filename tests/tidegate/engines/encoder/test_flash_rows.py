"""Packed batches in the few shapes of a GPU's graphs answer as they do elsewhere, and filling has no effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.tiny_bert import HEADS, HIDDEN, MOST_TOKENS, VOCABULARY, tiny_bert
from tidegate.engines.encoder.flash_rows import FlashRows, PackedShape, flash_attention

row_lengths = st.lists(st.integers(1, MOST_TOKENS), min_size=1, max_size=20)


def row_by_row(query: Any, key: Any, value: Any, bounds: Any, _: Any, longest: int, __: int) -> Any:
    """The contract of torch's kernel: what no row holds is left as it was, and may be anything."""
    attended = torch.full_like(query, torch.nan)
    for first, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        assert end - first <= longest
        own = [part[first:end].transpose(0, 1)[None] for part in (query, key, value)]
        attended[first:end] = fn.scaled_dot_product_attention(*own)[0].transpose(0, 1)
    return attended


@given(row_lengths)
def test_a_shape_holds_the_batch_and_is_one_of_few(lengths: list[int]) -> None:
    tokens = sum(lengths)
    shape = PackedShape.of(tokens, len(lengths), max(lengths), MOST_TOKENS)
    assert tokens <= shape.tokens <= max(64, tokens * 1.13 + 1, -(-tokens // 64) * 64)
    assert len(lengths) <= shape.rows < 2 * len(lengths)
    assert max(lengths) <= shape.longest <= MOST_TOKENS


def test_the_shapes_of_all_batches_of_a_model_are_few() -> None:
    shapes = {PackedShape.of(tokens, 1, 100, 256).tokens for tokens in range(1, 16_385)}
    assert len(shapes) <= 64


@given(row_lengths)
def test_what_is_laid_out_says_of_each_token_its_row_and_place(lengths: list[int]) -> None:
    ids = np.arange(sum(lengths)) + 7
    shape = PackedShape.of(len(ids), len(lengths), max(lengths), MOST_TOKENS)
    rows = shape.parts(torch.from_numpy(shape.laid_out(ids, np.array(lengths, np.int64))))
    assert rows.ids[: len(ids)].tolist() == ids.tolist()
    assert rows.positions[: len(ids)].tolist() == [place for length in lengths for place in range(length)]
    assert rows.rows[: len(ids)].tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
    assert set(rows.rows[len(ids) :].tolist()) <= {shape.rows}
    assert rows.bounds.diff().tolist() == lengths + [0] * (shape.rows - len(lengths))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_model_answers_the_same_whatever_fills_its_batch_up(pooling: Any) -> None:
    lengths = np.array([5, 1, MOST_TOKENS, 17, 2, 9], np.int64)
    ids = np.arange(int(lengths.sum())) % VOCABULARY
    with torch.inference_mode():
        expected = tiny_bert(pooling=pooling)(ids, lengths, None)
        told = tiny_bert(pooling=pooling, flash=row_by_row)(ids, lengths, None)
    assert told.shape == expected.shape == (6, HIDDEN)
    np.testing.assert_allclose(told, expected, atol=1e-5)


def test_masked_tokens_are_left_to_the_kernels_that_know_masks() -> None:
    lengths = np.array([6, 4], np.int64)
    mask = np.array([True, False, True, True, True, True, True, True, True, False])
    with torch.inference_mode():
        answers = [tiny_bert(flash=flash)(np.arange(10), lengths, mask) for flash in (None, row_by_row)]
    np.testing.assert_array_equal(*answers)


def test_the_kernel_gets_views_and_gives_one_row_a_token() -> None:
    bounds = torch.tensor([0, 3, 3], dtype=torch.int32)
    qkv = torch.randn(4, 3 * HIDDEN)
    attended = FlashRows(row_by_row, bounds, 4, HEADS)(qkv)
    assert attended.shape == (4, HIDDEN)
    assert attended[:3].isfinite().all() and attended[3].isnan().all()


def test_there_is_no_such_kernel_for_a_processor_or_in_fp32() -> None:
    assert flash_attention(torch.zeros(1, dtype=torch.bfloat16), 32) is None
    assert flash_attention(torch.zeros(1, device="meta"), 32) is None
