"""Flash attention over packed rows on a GPU, and the few shapes that packed batches are brought to there.

A kernel for rows of unequal lengths takes the packed queries, keys and values as they lie and the rows' bounds, so
nothing is copied into rectangles and nothing is padded. It is torch's own (`torch.nn.attention.varlen`), and needs fp16
or bf16 and a GPU of compute capability 8.0 or later; elsewhere there is none, and `attention.py` is used.

All that differs between two batches of one shape is one array of int32, which one copy brings to the device. Shapes are
few, so that `graph_replay.py` can record the network once for each: an eighth more tokens at most, and a power of two
of rows. What fills up belongs to no row: it is computed, seen by nobody, and in no mean.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST_TOKENS: Final = 64
_PARTS: Final = 8  # steps of token counts from one power of two to the next
_SHORT: Final = 128  # tokens: a block of the kernel; rows up to it need one

VarlenAttention = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PackedShape:
    """The shape that a packed batch is brought to.

    Args:
        tokens: at least those of the batch.
        rows: at least those of the batch; further ones have no token.
        longest: no row has more tokens; two values only, since what is too much here costs nearly nothing.
    """

    tokens: int
    rows: int
    longest: int

    @classmethod
    def of(cls, tokens: int, rows: int, longest: int, most: int) -> PackedShape:
        """The least for so many tokens in so many rows of at most `longest`; `most`: tokens that any row may have."""
        step = max(_LEAST_TOKENS, (1 << (tokens - 1).bit_length()) // (2 * _PARTS))
        short = min(_SHORT, most)
        return cls(-(-tokens // step) * step, 1 << (rows - 1).bit_length(), short if longest <= short else most)

    def laid_out(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32[3 · tokens + rows + 1]: ids, positions, the row of each token, and the rows' bounds."""
        real, given = len(ids), len(lengths)
        flat = np.zeros(3 * self.tokens + self.rows + 1, np.int32)
        ends = np.cumsum(lengths)
        flat[:real] = ids
        flat[self.tokens : self.tokens + real] = np.arange(real) - np.repeat(ends - lengths, lengths)
        rows = flat[2 * self.tokens : 3 * self.tokens]
        rows[:real] = np.repeat(np.arange(given), lengths)
        rows[real:] = self.rows  # of no row
        bounds = flat[3 * self.tokens :]
        bounds[1 : given + 1] = ends
        bounds[given + 1 :] = real
        return flat

    def parts(self, flat: torch.Tensor) -> PackedRows:
        """What `laid_out` made, on the device."""
        ids, positions, rows, bounds = torch.split(flat, [self.tokens, self.tokens, self.tokens, self.rows + 1])
        return PackedRows(ids, positions, rows, bounds)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Views of one int32 tensor on the device.

    Args:
        ids: [tokens].
        positions: [tokens], from each row's start.
        rows: [tokens], the row of each; the number of rows for one that fills up.
        bounds: [rows + 1], where each row starts, and the last one's end.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    bounds: torch.Tensor

    def pooled(self, x: torch.Tensor, *, first: bool) -> torch.Tensor:
        """float32[rows, hidden], the mean over each row's tokens, or its first, of [tokens, hidden].

        A product with ones and zeros: its sums are in one order always, which those of atomic additions are not.
        """
        if first:
            return x.index_select(0, self.bounds[:-1].clamp(max=len(x) - 1)).float()
        count = len(self.bounds) - 1
        # What fills up may be anything, infinite too, and zero times that is no zero.
        x = x.float().masked_fill((self.rows == count)[:, None], 0.0)
        belongs = torch.arange(count, device=x.device)[:, None] == self.rows
        lengths = self.bounds.diff().clamp(min=1)
        return (belongs.to(x.dtype) @ x) / lengths[:, None]


class FlashRows:
    """An `Attend` for rows with these bounds."""

    def __init__(self, attention: VarlenAttention, bounds: torch.Tensor, longest: int, heads: int) -> None:
        self._attention = attention
        self._bounds = bounds
        self._longest = longest
        self._heads = heads

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv.view(len(qkv), 3, self._heads, -1).unbind(1)
        bounds, longest = self._bounds, self._longest
        attended: torch.Tensor = self._attention(query, key, value, bounds, bounds, longest, longest)
        return attended.reshape(len(qkv), -1)

    def __repr__(self) -> str:
        return f"<FlashRows {len(self._bounds) - 1} rows of {self._longest} tokens at most>"


def flash_attention(like: torch.Tensor, width: int) -> VarlenAttention | None:
    """torch's kernel for weights like this and heads of this width; None where it has none for them."""
    if like.device.type != "cuda" or like.dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return None
    if torch.cuda.get_device_capability(like.device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn
