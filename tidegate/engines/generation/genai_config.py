"""What a `genai_config.json` says of its model, and what it may not say.

onnxruntime-genai does what the file says, and the file may name libraries to load, other providers, and files anywhere.
So only the keys of a decoder for the processor are read; any other is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.engines.errors import EngineError

CONFIG: Final = "genai_config.json"
_MAX_BYTES: Final = 1 << 20
_CACHE_VALUE_BYTES: Final = 4  # on a processor, attention caches are fp32 whatever the weights are
_WAY_OUT: Final = "make it with `python -m onnxruntime_genai.models.builder -p int4 -e cpu`, or `tidegate model add`"


class GenaiSessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the builder writes; threads and the like are the engine's to say."""

    log_id: str = ""
    provider_options: tuple[dict[str, Any], ...] = ()


class GenaiDecoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one graph of the model."""

    filename: str
    head_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    num_attention_heads: int
    hidden_size: int
    session_options: GenaiSessionOptions = GenaiSessionOptions()
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    sliding_window: dict[str, Any] | None = None


class GenaiModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model's sizes and tokens."""

    type: str
    context_length: int
    vocab_size: int
    decoder: GenaiDecoder
    eos_token_id: int | tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


class GenaiConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    model: GenaiModel
    search: dict[str, Any] = {}  # each request says these

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        said = self.model.eos_token_id
        return (said,) if isinstance(said, int) else said

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values of one token."""
        decoder = self.model.decoder
        values = 2 * decoder.num_hidden_layers * decoder.num_key_value_heads * decoder.head_size
        return values * _CACHE_VALUE_BYTES


def read_genai_config(artefact: Path) -> GenaiConfig:
    """The configuration beside an ONNX file. Raises EngineError, naming the file, the key and the way out."""
    path = artefact.parent / CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        config = msgspec.json.decode(content, type=GenaiConfig)
    except OSError as error:
        raise EngineError(f"{path}: it cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path}: {error}; {_WAY_OUT}") from error
    if problem := _problem(config, artefact):
        raise EngineError(f"{path}: {problem}; {_WAY_OUT}")
    return config


def _problem(config: GenaiConfig, artefact: Path) -> str:
    model, decoder = config.model, config.model.decoder
    if decoder.filename != artefact.name:
        return f"key 'filename' is {decoder.filename!r}, and the artefact is {artefact.name}"
    if decoder.session_options.provider_options:
        return f"key 'provider_options' is {decoder.session_options.provider_options!r}, and must be empty"
    sizes = (
        model.context_length,
        model.vocab_size,
        decoder.head_size,
        decoder.num_hidden_layers,
        decoder.num_key_value_heads,
    )
    if min(sizes) < 1:
        return f"context, vocabulary, heads and layers must be above 0, not {sizes}"
    return ""
