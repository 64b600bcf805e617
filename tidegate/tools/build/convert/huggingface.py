"""Takes over a generating model from a folder as Hugging Face's tools write it: what is data, and nothing else.

Weights come as safetensors, in one file. A configuration that names code of its own is refused, as that code is run by
nothing here and the model would not be the one that was meant.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from tidegate.models.array_files import UnsafeArrayFile, check_safetensors
from tidegate.tools.build.convert.gguf import CHAT_TEMPLATE, CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS
from tidegate.tools.build.errors import BuildError

_NEEDED: Final = (WEIGHTS, CONFIG, TOKENIZER)
_OPTIONAL: Final = (TOKENIZER_CONFIG, CHAT_TEMPLATE, "generation_config.json")
_ONE_FILE: Final = "save it as one file: model.save_pretrained(FOLDER, max_shard_size='1TB')"


def take_over_folder(source: Path, folder: Path) -> None:
    """Copy the model into `folder`. Raises BuildError, naming the file and the way out."""
    if (source / f"{WEIGHTS}.index.json").is_file():
        raise BuildError(f"{source}: its weights are in several files; {_ONE_FILE}")
    for name in _NEEDED:
        if not (source / name).is_file():
            raise BuildError(f"{source}: has no {name}; what is wanted are {', '.join(_NEEDED)}, or one .gguf file")
    if "auto_map" in read_json(source / CONFIG):
        raise BuildError(f"{source / CONFIG}: key 'auto_map' names code of the model's own, which is not run")
    try:
        check_safetensors(source / WEIGHTS)
    except UnsafeArrayFile as error:
        raise BuildError(str(error)) from error
    for name in (*_NEEDED, *_OPTIONAL):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    _write_template(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BuildError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BuildError(f"{path}: must be a JSON object")
    return content


def _write_template(folder: Path) -> None:
    """The chat template as a file of its own, where older tools have put it into the tokenizer's configuration."""
    path, config = folder / CHAT_TEMPLATE, folder / TOKENIZER_CONFIG
    if path.is_file() or not config.is_file():
        return
    template = read_json(config).get("chat_template")
    if isinstance(template, list):  # by names
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if isinstance(template, str):
        path.write_text(template, encoding="utf-8")
