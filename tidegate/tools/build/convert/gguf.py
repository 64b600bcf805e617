"""Converts a GGUF file into the files that transformers and converters read: weights, configuration, tokenizer.

Quantized weights are expanded to bf16; nothing comes back that the quantization has lost. The weights are written as
safetensors, which cannot hold code. transformers reads the format; it refuses to write a model that came from it, so
the weights are moved into a fresh one.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.progress import Progress

SUFFIX: Final = ".gguf"
WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
PACKAGES: Final = ("torch", "transformers", "gguf", "accelerate")


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write the model into `folder` as Hugging Face's tools do.

    Raises:
        BuildError: the file cannot be read, is of an architecture that transformers does not read, or a package is
            missing.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # both are read when libraries are imported
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise BuildError(f"reading {path.name} needs {error.name}: pip install 'tidegate[build]'") from error
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with _read_once():
            progress("reading the tokenizer", 0.0)
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **place)
            config = AutoConfig.from_pretrained(str(path.parent), **place)
            progress("expanding the weights to bf16", 0.5)
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                config=config,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                **place,
            )
    except Exception as error:  # of a file that is damaged, the readers raise whatever they stumble over
        raise BuildError(f"{path}: cannot be read as a GGUF model: {error}") from error
    progress("writing the weights", 0.95)
    config = model.config
    if hasattr(config, "quantization_config"):  # of the file, and no longer of the weights
        del config.quantization_config
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    fresh.load_state_dict(weights, assign=True)
    fresh.tie_weights()
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes for its owner only, and who serves it may be somebody else
    for name in (WEIGHTS, CONFIG, TOKENIZER):
        if not (folder / name).is_file():
            raise BuildError(f"{path}: gave no {name}; only models of one file of weights and a fast tokenizer do")


@contextmanager
def _read_once() -> Iterator[None]:
    """Within, transformers' tokenizer, configuration and weights share one reader and one table of names.

    Each would walk the file anew, which at a hundred thousand words of a vocabulary is some seconds; and the table of
    the names of all weights would be made for each module of the model, which is some seconds again.
    """
    gguf: Any = importlib.import_module("gguf")
    opened, named = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(opened), functools.cache(named)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = opened, named
