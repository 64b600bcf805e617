"""A packed model is Hugging Face's BERT in one self-describing safetensors file, for the engine `torch-packed`.

Source: a folder with `config.json` and `model.safetensors`, and where sentence-transformers made it, what its pooling
and normalisation are (`1_Pooling/config.json`, `modules.json`). What the network here does not compute is refused by
name, so that no model is packed into one that answers differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import load_file, save

from tidegate.engines.encoder.bert import Activation, Architecture
from tidegate.engines.encoder.torch_packed import METADATA, PackedMetadata
from tidegate.models.array_files import UnsafeArrayFile, check_safetensors
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.build.errors import BuildError

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_UNUSED = ("position_ids", "pooler.")


def pack_bert(source: Path, target: Path, precision: Precision) -> Architecture:
    """Write `target` from the folder `source`. Raises BuildError."""
    architecture = read_architecture(source)
    weights = _weights(source / "model.safetensors")
    described = msgspec.json.encode(PackedMetadata("bert", architecture)).decode()
    # Not by `save_file`: what the disk refuses it is an error of its own, which says neither the file nor the reason.
    packed = {name: weight.to(_DTYPES[precision]).contiguous() for name, weight in weights.items()}
    write_atomically(target, save(packed, metadata={METADATA: described}), durable=False)
    return architecture


def read_architecture(source: Path) -> Architecture:
    """Raises BuildError: a file is missing, or names what the packed network does not compute."""
    config = _json(source / "config.json")
    for key, wanted in (("model_type", "bert"), ("position_embedding_type", "absolute"), ("is_decoder", False)):
        if config.get(key, wanted) != wanted:
            raise BuildError(f"{source / 'config.json'}: {key} is {config[key]!r}, but only {wanted!r} can be packed")
    activation = _ACTIVATIONS.get(config.get("hidden_act", "gelu"))
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise BuildError(f"{source / 'config.json'}: hidden_act is {config['hidden_act']!r}; known are {known}")
    return Architecture(
        heads=config["num_attention_heads"],
        layers=config["num_hidden_layers"],
        epsilon=config.get("layer_norm_eps", 1e-12),
        activation=activation,
        pooling=_pooling(source),
        normalize=_normalizes(source),
    )


def _pooling(source: Path) -> Literal["mean", "first"]:
    path = source / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    pooling = _json(path)
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    if modes == ["pooling_mode_mean_tokens"]:
        return "mean"
    if modes == ["pooling_mode_cls_token"]:
        return "first"
    raise BuildError(f"{path}: pools by {', '.join(modes) or 'nothing'}; known are the mean and the first token")


def _normalizes(source: Path) -> bool:
    path = source / "modules.json"
    return not path.is_file() or any(str(one.get("type", "")).endswith("Normalize") for one in _json(path))


def _weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        check_safetensors(path)
        weights = load_file(path)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from error
    except UnsafeArrayFile as error:
        raise BuildError(str(error)) from error
    except Exception as error:  # safetensors' own error is not a type that older versions export
        raise BuildError(f"{path}: is no safetensors file: {error}") from error
    named = {name.removeprefix("bert."): weight for name, weight in weights.items()}
    return {name: weight for name, weight in named.items() if not any(part in name for part in _UNUSED)}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BuildError(f"{path}: is not JSON: {error}") from error
