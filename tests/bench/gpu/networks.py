"""Encoders of two sizes with random weights, as files that the pool's engines load and as a module of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tests.bench.batching.texts import lengths
from tidegate.engines.encoder.torch_packed import IDS, LENGTHS, MASK
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Batching, Bounds, Cost, Manifest, Packed, Quality, TensorSpec, Variant
from tidegate.models.repository import save_manifest
from tidegate.tools.build.convert.export import export_program
from tidegate.tools.build.convert.pack import Precision, pack_bert
from tidegate.types import Datatype

OUTPUT: Final = "sentence_embedding"
MOST_TOKENS: Final = 256
MOST_ROWS: Final = 64
VOCABULARY: Final = 30_522
PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16")

Arrays = dict[str, NDArray[Any]]
Row = NDArray[np.int64]


@dataclass(frozen=True)
class Size:
    """The shape of an encoder. `layers` of width `hidden`, with feed-forward layers of width `inner`."""

    name: str
    layers: int
    hidden: int
    heads: int
    inner: int


MINILM: Final = Size("minilm", 6, 384, 12, 1536)
LARGE: Final = Size("bert-large", 24, 1024, 16, 4096)


class PlainEncoder(torch.nn.Module):
    """Ids and mask to unit vectors as anybody would write it: transformers' BERT, and the mean over real tokens."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """float32[batch, hidden] for int64[batch, sequence] twice."""
        keep = attention_mask.to(torch.float32)
        dtype = next(self.encoder.parameters()).dtype
        bias = ((1.0 - keep)[:, None, None, :] * torch.finfo(dtype).min).to(dtype)
        hidden = self.encoder(input_ids=input_ids, attention_mask=bias, token_type_ids=torch.zeros_like(input_ids))
        mean = (hidden.last_hidden_state.float() * keep[:, :, None]).sum(dim=1) / keep.sum(dim=1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=1)


@dataclass(frozen=True)
class Network:
    """One size: its module in fp32 on the CPU, and its files."""

    size: Size
    module: PlainEncoder
    folder: Path

    def packed(self, precision: str) -> Path:
        return self.folder / f"{precision}.safetensors"

    def exported(self, precision: str) -> Path:
        return self.folder / f"{precision}.pt2"


def write_network(size: Size, root: Path) -> Network:
    """A repository's version with packed weights, and exported programs beside them."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=size.inner, hidden_act="gelu",
        initializer_range=0.05, attn_implementation="sdpa",
    )  # fmt: skip
    encoder = BertModel(config, add_pooling_layer=False).eval()
    source = root / f"{size.name}-source"
    encoder.save_pretrained(source)
    (source / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Normalize"}]))
    folder = root / "models" / size.name / "1"
    folder.mkdir(parents=True)
    network = Network(size, PlainEncoder(encoder).eval().requires_grad_(False), folder)
    for precision in PRECISIONS:
        pack_bert(source, network.packed(precision), precision)
    _write_manifest(network)
    return network


def export_network(network: Network, precision: str, dtype: torch.dtype) -> Path:
    """The module as an exported program, traced on the CPU, in this precision."""
    example = {name: torch.ones(2, 16, dtype=torch.int64) for name in (IDS, MASK)}
    axes = {name: {0: "batch", 1: "sequence"} for name in example}
    module = deepcopy(network.module).to(dtype)
    export_program(module, example, axes, network.exported(precision), most={"sequence": MOST_TOKENS})
    return network.exported(precision)


def _write_manifest(network: Network) -> None:
    rows = ("batch", "sequence")
    manifest = Manifest(
        name=network.size.name,
        version="1",
        inputs=(
            TensorSpec(IDS, Datatype.INT64, rows, bounds=Bounds(0, VOCABULARY - 1)),
            TensorSpec(MASK, Datatype.INT64, rows, bounds=Bounds(0, 1)),
        ),
        outputs=(TensorSpec(OUTPUT, Datatype.FP32, ("batch", network.size.hidden)),),
        axes={"batch": Axis(1, MOST_ROWS), "sequence": Axis(1, MOST_TOKENS)},
        variants=tuple(
            Variant(
                name=precision,
                artefact=network.packed(precision).name,
                engine="torch-packed",
                precision=precision,
                where=("pool",),
                sha256=sha256_of(network.packed(precision)),
                size_bytes=network.packed(precision).stat().st_size,
                quality=Quality("cosine", 1.0, 1),
                packed=Packed("sequence", LENGTHS, MASK),
            )
            for precision in PRECISIONS
        ),
        cost=Cost("tokens", IDS),
        default_budget_s=2.0,
        max_batch_size=0,
        batching=Batching(max_batch_size=MOST_ROWS, max_work=MOST_ROWS * MOST_TOKENS, pad_axis="sequence"),
    )
    save_manifest(network.folder, manifest)


def draw_rows(count: int, seed: int = 5) -> list[Row]:
    """Ids of rows of log-normal lengths."""
    random = Random(seed)
    return [
        np.array([101, *(random.randrange(1000, VOCABULARY) for _ in range(length - 2)), 102], np.int64)
        for length in lengths("mixed")[:count]
    ]


def padded(rows: Sequence[Row]) -> Arrays:
    """One rectangle."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
    return {IDS: ids, MASK: mask}


def packed(rows: Sequence[Row]) -> Arrays:
    """One row behind the other."""
    ids = np.concatenate(rows)
    return {IDS: ids, MASK: np.ones_like(ids), LENGTHS: np.array([len(row) for row in rows], np.int64)}
