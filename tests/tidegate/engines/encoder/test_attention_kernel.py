"""The attention kernel computes attention row by row; without it torch does."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from numpy.typing import NDArray

from tests.support.models.tiny_bert import HEADS, tiny_bert
from tidegate.engines.encoder.attention import Rectangles
from tidegate.engines.encoder.attention_kernel import AttentionKernel, attention_kernel

pytestmark = pytest.mark.slow

# Each side of what the kernel counts in: 8 queries, 16 and 32 keys; short after long finds the long one's leavings.
LENGTHS = np.array([100, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 5], np.int64)
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # of bf16 8 bits are kept, the last one rounded


@pytest.fixture(scope="module")
def kernel() -> AttentionKernel:
    found = attention_kernel()
    if found is None:
        pytest.skip("no AVX-512 or no C compiler here")
    return found


def some_qkv(width: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(int(LENGTHS.sum()), 3 * HEADS * width, generator=generator) * spread).to(dtype)


def exact(qkv: torch.Tensor, mask: NDArray[np.bool_] | None = None) -> torch.Tensor:
    """Attention in float64, one row after another."""
    rows, start = [], 0
    for length in LENGTHS.tolist():
        own = qkv[start : start + length].double().view(length, 3, HEADS, -1).permute(1, 2, 0, 3)
        keep = None if mask is None else torch.from_numpy(mask[start : start + length])[None, None]
        query, key, value = own[:, None]
        rows.append(fn.scaled_dot_product_attention(query, key, value, attn_mask=keep)[0].transpose(0, 1).flatten(1))
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [16, 32, 48, 64])
def test_every_row_attends_to_itself_alone(kernel: AttentionKernel, width: int, dtype: torch.dtype) -> None:
    qkv = some_qkv(width, dtype)
    attended = kernel.over(LENGTHS, None, HEADS)(qkv)
    assert attended.dtype is dtype
    torch.testing.assert_close(attended.double(), exact(qkv), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_scores_far_beyond_what_a_float_can_exponentiate_are_no_matter(kernel: AttentionKernel) -> None:
    qkv = some_qkv(32, spread=10.0)
    torch.testing.assert_close(kernel.over(LENGTHS, None, HEADS)(qkv).double(), exact(qkv), rtol=1e-3, atol=1e-3)


def test_masked_tokens_get_no_attention(kernel: AttentionKernel) -> None:
    qkv = some_qkv(32)
    mask = np.arange(len(qkv)) % 3 != 1
    mask[np.cumsum(LENGTHS) - LENGTHS] = True
    torch.testing.assert_close(kernel.over(LENGTHS, mask, HEADS)(qkv).double(), exact(qkv, mask), rtol=2e-6, atol=2e-6)


def test_a_row_that_is_masked_altogether_attends_evenly(kernel: AttentionKernel) -> None:
    qkv = some_qkv(32)
    attended = kernel.over(LENGTHS, np.zeros(len(qkv), np.bool_), HEADS)(qkv)
    mean = qkv[:100, 2 * HEADS * 32 :].mean(dim=0)
    torch.testing.assert_close(attended[:100], mean.expand(100, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_nan_in_one_row_is_told_in_that_row_and_no_other(kernel: AttentionKernel, part: str) -> None:
    """Numbers that look right in place of NaN would be an answer."""
    qkv = some_qkv(32)
    at = ["query", "key", "value"].index(part)
    qkv[3].view(3, HEADS, 32)[at, 1, 4] = torch.nan
    attended = kernel.over(LENGTHS, None, HEADS)(qkv)
    assert attended[3].isnan().any()
    assert not attended[100:].isnan().any()


def test_tokens_that_fill_up_a_batch_are_zero(kernel: AttentionKernel) -> None:
    qkv = torch.cat([some_qkv(32), torch.full((5, 3 * HEADS * 32), torch.nan)])
    assert not kernel.over(LENGTHS, None, HEADS)(qkv)[-5:].any()


def test_it_leaves_to_torch_what_it_does_not_compute(kernel: AttentionKernel) -> None:
    assert kernel.takes(torch.zeros(1), 32)
    assert not kernel.takes(torch.zeros(1), 24)
    assert not kernel.takes(torch.zeros(1, dtype=torch.float16), 32)
    assert not kernel.takes(torch.zeros(1, device="meta"), 32)


@pytest.mark.parametrize("dtype", CLOSE)
def test_torchs_kernels_over_rectangles_answer_the_same(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    qkv = some_qkv(32, dtype)
    mask = np.arange(len(qkv)) % 3 != 1
    ours = kernel.over(LENGTHS, mask, HEADS)(qkv)
    theirs = Rectangles(LENGTHS, mask, len(qkv), HEADS, qkv)(qkv)
    torch.testing.assert_close(ours, theirs, rtol=8 * CLOSE[dtype], atol=8 * CLOSE[dtype])


def test_a_model_answers_the_same_with_and_without_it(kernel: AttentionKernel) -> None:
    ids = np.arange(int(LENGTHS.sum())) % 40
    mask = np.arange(len(ids)) % 5 != 2
    with torch.inference_mode():
        answers = [tiny_bert(one)(ids, LENGTHS, mask) for one in (kernel, None)]
    assert "attention by a kernel" in repr(tiny_bert(kernel)) and "attention by torch" in repr(tiny_bert())
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("none", "there is no C compiler 'none' here"), ("false", "false cannot compile ours: Command")],
)
def test_without_a_compiler_that_works_one_line_says_so_and_torch_does_it(
    kernel: AttentionKernel, compiler: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert attention_kernel() is None
        assert attention_kernel() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention runs on torch's own kernels, which are slower: ") and said in line


def test_a_compilers_first_complaint_is_in_the_line(
    kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("CC", "cc -include /nowhere.h")
    with caplog.at_level(logging.WARNING):
        assert attention_kernel() is None
    assert "/nowhere.h" in caplog.text
