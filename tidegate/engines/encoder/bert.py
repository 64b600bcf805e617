"""BERT over packed rows: every linear layer and normalisation sees real tokens only, one after another.

Rows meet in attention alone: that is a kernel of our own where a C compiler is at hand (`attention.c`), flash attention
on a GPU in fp16 and bf16 (`flash_rows.py`), and elsewhere torch's over rectangles of rows of like lengths
(`attention.py`). With flash attention the whole network is recorded once for each shape (`graph_replay.py`).

The linear layers run on oneDNN where it is there, with weights that were brought into its own layout at loading, and
with the activation or the residual in the same pass, so that they need no compiler; torch's usual fp32 path takes twice
the time on a CPU of AMD. oneDNN makes code for each number of tokens that it has not met (0.6 ms a layer's kind), and
keeps a thousand of them, so tokens are filled up to one of few numbers (`_filled`); the filling has no effect.

Positions count from each row's start. Masked tokens inside of a row get no attention and are in no mean; a row of
nothing else attends evenly and is answered with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import numpy as np
import torch
import torch.nn.functional as fn
from numpy.typing import NDArray

from tidegate.engines.encoder.attention import Attend, Rectangles
from tidegate.engines.encoder.attention_kernel import AttentionKernel
from tidegate.engines.encoder.flash_rows import FlashRows, PackedShape, VarlenAttention, flash_attention
from tidegate.engines.encoder.graph_replay import MOST_GRAPHS, GraphReplay

Activation = Literal["gelu", "gelu_tanh", "relu"]
_ROWS_HINT = 512  # tokens of a call, for which oneDNN picks the layout of its weights

_PLAIN: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": fn.gelu,
    "gelu_tanh": lambda x: fn.gelu(x, approximate="tanh"),
    "relu": fn.relu,
}
_FUSED: dict[Activation, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The architecture that the weights alone do not show, from the file's metadata."""

    heads: int
    layers: int
    epsilon: float = 1e-12
    activation: Activation = "gelu"
    pooling: Literal["mean", "first"] = "mean"
    normalize: bool = True


class Linear:
    """One linear layer, alone or with what follows it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._bias = bias
        self._fused = weight.device.type == "cpu" and _has_pointwise(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self._fused else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return _tensor(torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], ""))
        return fn.linear(x, self._weight, self._bias)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if self._fused:
            name, how = _FUSED[activation]
            return _tensor(torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, name, [], how))
        return _PLAIN[activation](self(x))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return _tensor(torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add"))
        return self(x).add_(residual)


class Norm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> None:
        self._weight, self._bias, self._epsilon = weight, bias, epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return fn.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)


def _filled(tokens: int) -> int:
    """The least of few numbers that holds them: 8, 16 … 128, 144 … 512, 544 … 1,024, 1,152 …; 2 % more in the mean."""
    step = next((step for step, most in ((8, 128), (16, 512), (32, 1024)) if tokens <= most), 128)
    return -(-tokens // step) * step


class Attention:
    def __init__(self, weights: _Weights, prefix: str) -> None:
        parts = [f"{prefix}.self.{name}" for name in ("query", "key", "value")]
        self._qkv = Linear(
            torch.cat([weights[f"{part}.weight"] for part in parts]),
            torch.cat([weights[f"{part}.bias"] for part in parts]),
        )
        self._out = weights.linear(f"{prefix}.output.dense")
        self._norm = weights.norm(f"{prefix}.output.LayerNorm")

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        return self._norm(self._out.added_to(x, attend(self._qkv(x))))


class EncoderLayer:
    def __init__(self, weights: _Weights, prefix: str, architecture: Architecture) -> None:
        self._attention = Attention(weights, f"{prefix}.attention")
        self._activation = architecture.activation
        self._up = weights.linear(f"{prefix}.intermediate.dense")
        self._down = weights.linear(f"{prefix}.output.dense")
        self._norm = weights.norm(f"{prefix}.output.LayerNorm")

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self._attention(x, attend)
        return self._norm(self._down.added_to(x, self._up.activated(x, self._activation)))


class PackedBert:
    """Token ids and row lengths to one vector a row, in the precision of the weights; on their device.

    Args:
        weights: by their names in Hugging Face's BertModel, on the device, all of one type.
        kernel: computes attention, if available; None leaves that to torch.
        flash: attention over rows of unequal lengths, for weights like these; None where torch has none.
        most_graphs: CUDA graphs, of the shapes that come again.

    Raises:
        KeyError: a weight is missing.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, torch.Tensor],
        kernel: AttentionKernel | None = None,
        *,
        flash: VarlenAttention | None = None,
        most_graphs: int = MOST_GRAPHS,
    ) -> None:
        by_name = _Weights(weights, architecture.epsilon)
        self._architecture = architecture
        self._words = by_name["embeddings.word_embeddings.weight"]
        # All tokens are of the first segment, so its vector is part of every position's.
        self._positions = (
            by_name["embeddings.position_embeddings.weight"] + by_name["embeddings.token_type_embeddings.weight"][0]
        )
        self._norm = by_name.norm("embeddings.LayerNorm")
        self._layers = [EncoderLayer(by_name, f"encoder.layer.{at}", architecture) for at in range(architecture.layers)]
        self.device = self._words.device
        width = self._words.shape[1] // architecture.heads
        takes = kernel is not None and kernel.takes(self._words, width)
        self._kernel = kernel if takes else None
        self._flash = flash or flash_attention(self._words, width)
        replays = self._flash is not None and self.device.type == "cuda"
        self.graphs = GraphReplay(self._by_flash, self.device, most=most_graphs) if replays else None

    @property
    def vocabulary(self) -> int:
        return len(self._words)

    @property
    def most_tokens(self) -> int:
        """Of one row."""
        return len(self._positions)

    def __call__(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None
    ) -> NDArray[np.float32]:
        """float32[rows, hidden] for int64[tokens], int64[rows] without zeros, bool[tokens] or None: all are real."""
        if self._flash is not None and mask is None:
            shape = PackedShape.of(len(ids), len(lengths), int(lengths.max()), self.most_tokens)
            flat = shape.laid_out(ids, lengths)
            found = self.graphs(shape, flat) if self.graphs else self._by_flash(shape, torch.from_numpy(flat)).numpy()
            return found[: len(lengths)]
        filled = _filled(len(ids)) if self.device.type == "cpu" else len(ids)
        attend = self._attending(lengths, mask, filled)
        starts = np.cumsum(lengths) - lengths
        positions = np.zeros(filled, np.int64)
        positions[: len(ids)] = np.arange(len(ids)) - np.repeat(starts, lengths)
        padded = self._on_device(np.pad(ids, (0, filled - len(ids))))
        x = self._encoded(padded, self._on_device(positions), attend)
        pooled = self._pooled(x[: len(ids)].float(), lengths, mask)
        return self._normalized(pooled).cpu().numpy()

    def _by_flash(self, shape: PackedShape, flat: torch.Tensor) -> torch.Tensor:
        """float32[rows, hidden] for what `PackedShape.laid_out` makes. By kernels alone, for a CUDA graph."""
        assert self._flash is not None
        rows = shape.parts(flat)
        attend = FlashRows(self._flash, rows.bounds, shape.longest, self._architecture.heads)
        x = self._encoded(rows.ids, rows.positions, attend)
        return self._normalized(rows.pooled(x, first=self._architecture.pooling == "first"))

    def _encoded(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[tokens, hidden] of the last layer."""
        x = self._norm(fn.embedding(ids, self._words) + fn.embedding(positions, self._positions))
        for layer in self._layers:
            x = layer(x, attend)
        return x

    def _normalized(self, pooled: torch.Tensor) -> torch.Tensor:
        return fn.normalize(pooled, dim=1) if self._architecture.normalize else pooled

    def _attending(self, lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None, filled: int) -> Attend:
        heads = self._architecture.heads
        if self._kernel is None:
            return Rectangles(lengths, mask, filled, heads, self._words)
        return self._kernel.over(lengths, mask, heads)

    def _pooled(self, x: torch.Tensor, lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None) -> torch.Tensor:
        if self._architecture.pooling == "first":
            return x.index_select(0, self._on_device(np.cumsum(lengths) - lengths))
        counts = self._on_device(lengths)
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), counts, output_size=len(x))
        if mask is not None:
            keep = self._on_device(mask.astype(np.float32))
            x = x * keep[:, None]
            counts = torch.zeros(len(lengths), device=self.device).index_add_(0, rows, keep)
        sums = torch.zeros(len(lengths), x.shape[1], device=self.device).index_add_(0, rows, x)
        return sums / counts.clamp(min=1)[:, None]

    def _on_device(self, array: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def __repr__(self) -> str:
        attention = "a kernel" if self._kernel else "flash attention" if self._flash else "torch"
        return (
            f"<PackedBert {len(self._layers)} layers, {self._words.dtype} on {self.device}, attention by {attention}>"
        )


class _Weights:
    """Weights by name, and the layers that are made of them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], epsilon: float) -> None:
        self._weights = weights
        self._epsilon = epsilon

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name]

    def linear(self, name: str) -> Linear:
        return Linear(self[f"{name}.weight"], self[f"{name}.bias"])

    def norm(self, name: str) -> Norm:
        return Norm(self[f"{name}.weight"], self[f"{name}.bias"], self._epsilon)


def _has_pointwise(dtype: torch.dtype) -> bool:
    """These operators are torch's own, made for its compiler; another version or another CPU may do without them."""
    if not torch._C._has_mkldnn or dtype is torch.float16:
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")):
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
