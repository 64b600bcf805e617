"""The tiny BERT as a file for the engine `torch-packed`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from tests.support.models.tiny_bert import HEADS, tiny_weights
from tidegate.engines.encoder.bert import Architecture
from tidegate.engines.encoder.torch_packed import METADATA, PackedMetadata


def write_packed(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    described = PackedMetadata("bert", Architecture(heads=HEADS, layers=1))
    weights = {name: weight.to(dtype).contiguous() for name, weight in tiny_weights().items()}
    save_file(weights, path, metadata={METADATA: msgspec.json.encode(described).decode()})
    return path
