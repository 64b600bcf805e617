"""What a Hugging Face folder's `config.json` says of a model, as far as a server for it has to be told or checked.

Models that also see or hear have the text's part under `text_config`. What is not there, or no number, is not known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tidegate.outcome import InternalError

CONFIG: Final = "config.json"
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """0 and () are not known."""

    context: int = 0  # tokens of a prompt and its answer
    vocabulary_size: int = 0  # ids are below it
    stop_tokens: tuple[int, ...] = ()


def read_hugging_face_config(folder: Path) -> HuggingFaceConfig:
    """Raises InternalError, naming the file."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InternalError(f"{path}: is no model's configuration: it has over {_MAX_BYTES} bytes")
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InternalError(f"{path}: there is no such file, which vLLM needs beside the weights") from error
    except (OSError, ValueError) as error:
        raise InternalError(f"{path}: is no readable JSON: {error}") from error
    if not isinstance(said, dict):
        raise InternalError(f"{path}: is no JSON object")
    text = said.get("text_config")
    both = {**said, **text} if isinstance(text, dict) else said
    return HuggingFaceConfig(
        _count(both, "max_position_embeddings"), _count(both, "vocab_size"), _ids(both.get("eos_token_id"))
    )


def _count(said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _ids(said: object) -> tuple[int, ...]:
    ids = said if isinstance(said, list) else [said]
    return tuple(one for one in ids if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
