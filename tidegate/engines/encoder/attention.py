"""Attention over packed rows by torch's kernels: rows of like lengths share one rectangle with a mask.

Lengths are rounded up to `_STEP`, so that one kernel computes all rows of a rectangle; what that pads is a few
positions of the cheapest part of the network. What was tried, in µs a token over six layers of MiniLM on one core,
where all linear layers take 92 (fp32) and 47 (bf16):

    rows of              16    64   256
    fp32, one kernel    5.1    10    32   taken for fp32, and for rows up to 16 in bf16, computed in fp32
    bf16, one kernel     10    14    35
    bf16, matmuls        10     8    22   taken for longer rows in bf16

A kernel for each row took 1.4 times as long as rectangles, one block-diagonal mask for each 128 tokens 2.2 times.
Where `attention_kernel.py` has a compiler at hand, its kernel takes a third to a half of this time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as fn
from numpy.typing import NDArray

_STEP = 16  # lengths are rounded up to it: 8 makes more kernels, 32 more padding


class Attend(Protocol):
    """Attention of one packed batch, made once and called in every layer."""

    def __call__(self, qkv: torch.Tensor, /) -> torch.Tensor:
        """[tokens, hidden] for queries, keys and values side by side: [tokens, 3 · hidden]."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows of like lengths in one padded block; `bias` is None if nothing is padded or masked."""

    rows: int
    length: int
    bias: torch.Tensor | None


class Rectangles:
    """Where each token of a packed batch is in its rectangle, and back.

    Args:
        mask: which tokens are real; None when all are.
        filled: how many tokens there are with those that fill up.
        like: a tensor of the type and on the device of what comes.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        mask: NDArray[np.bool_] | None,
        filled: int,
        heads: int,
        like: torch.Tensor,
    ) -> None:
        device = like.device
        starts = np.cumsum(lengths) - lengths
        # A GPU's time is in the number of kernels, so there all rows share one rectangle.
        wide = np.full_like(lengths, lengths.max()) if device.type != "cpu" else -(-lengths // _STEP) * _STEP
        scatter = np.zeros(filled, np.int64)
        gathers: list[NDArray[np.int64]] = []
        self._rectangles: list[Rectangle] = []
        at = 0
        for width in np.unique(wide):
            rows = np.flatnonzero(wide == width)
            inside = np.arange(width) < lengths[rows, None]
            # Filled with the row's own first token; any token would do, since the mask hides it.
            tokens = starts[rows, None] + np.where(inside, np.arange(width), 0)
            scatter[tokens[inside]] = at + np.flatnonzero(inside.ravel())
            attended = inside if mask is None else inside & mask[tokens]
            gathers.append(tokens.ravel())
            self._rectangles.append(Rectangle(len(rows), int(width), _bias(attended, like)))
            at += tokens.size
        self._heads = heads
        self._gather = torch.from_numpy(np.concatenate(gathers)).to(device)
        self._scatter = torch.from_numpy(scatter).to(device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        qkv = qkv.index_select(0, self._gather)
        attended = torch.empty(len(qkv), qkv.shape[1] // 3, dtype=qkv.dtype, device=qkv.device)
        at = 0
        for rectangle in self._rectangles:
            end = at + rectangle.rows * rectangle.length
            self._attend(qkv[at:end], rectangle, attended[at:end])
            at = end
        return attended.index_select(0, self._scatter)

    def _attend(self, qkv: torch.Tensor, rectangle: Rectangle, into: torch.Tensor) -> None:
        attend: Callable[..., torch.Tensor] = fn.scaled_dot_product_attention
        if qkv.device.type == "cpu" and qkv.dtype is torch.bfloat16:
            attend = _attend_by_matmuls if rectangle.length > _STEP else _attend_in_fp32
        shape = (rectangle.rows, rectangle.length, 3, self._heads, -1)
        query, key, value = qkv.view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        attended = attend(query, key, value, rectangle.bias).transpose(1, 2)
        into.view(attended.shape).copy_(attended)

    def __repr__(self) -> str:
        return f"<Rectangles {', '.join(f'{one.rows} x {one.length}' for one in self._rectangles)}>"


def _bias(attended: NDArray[np.bool_], like: torch.Tensor) -> torch.Tensor | None:
    """The least finite float and not minus infinity: a row that is masked altogether must not become NaN."""
    if attended.all():
        return None
    masked = torch.from_numpy(~attended[:, None, None, :]).to(like.device)
    bias = torch.zeros(masked.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(masked, torch.finfo(like.dtype).min)


def _attend_by_matmuls(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(2, 3))
    if bias is not None:
        scores += bias
    return torch.matmul(torch.softmax(scores, -1), value)


def _attend_in_fp32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    bias = None if bias is None else bias.float()
    return fn.scaled_dot_product_attention(query.float(), key.float(), value.float(), bias)
