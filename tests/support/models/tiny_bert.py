"""A packed BERT of one layer with chance weights, with heads of 16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch

from tidegate.engines.encoder.attention_kernel import AttentionKernel
from tidegate.engines.encoder.bert import Architecture, PackedBert

HEADS: Final = 3
HIDDEN: Final = HEADS * 16
INNER: Final = 64
VOCABULARY: Final = 40
MOST_TOKENS: Final = 128
_LAYER: Final = "encoder.layer.0"


def tiny_weights() -> Mapping[str, torch.Tensor]:
    """By their names in Hugging Face's BertModel, in fp32 on the CPU; the same each time."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.position_embeddings.weight": (MOST_TOKENS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    for name, rows, columns in (
        (f"{_LAYER}.attention.self.query", HIDDEN, HIDDEN),
        (f"{_LAYER}.attention.self.key", HIDDEN, HIDDEN),
        (f"{_LAYER}.attention.self.value", HIDDEN, HIDDEN),
        (f"{_LAYER}.attention.output.dense", HIDDEN, HIDDEN),
        (f"{_LAYER}.intermediate.dense", INNER, HIDDEN),
        (f"{_LAYER}.output.dense", HIDDEN, INNER),
    ):
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in ("embeddings.LayerNorm", f"{_LAYER}.attention.output.LayerNorm", f"{_LAYER}.output.LayerNorm"):
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def tiny_bert(
    kernel: AttentionKernel | None = None, *, pooling: Literal["mean", "first"] = "mean", **how: Any
) -> PackedBert:
    return PackedBert(Architecture(heads=HEADS, layers=1, pooling=pooling), tiny_weights(), kernel, **how)
