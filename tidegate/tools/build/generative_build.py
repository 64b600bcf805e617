"""A generating model is built in four steps: take over its weights, convert them for the edge, measure, describe.

    bf16   the weights as they are, or as a GGUF file's expand to: for the pool, by transformers
    int4   the same as ONNX with weights of four bits: for edges, by onnxruntime-genai

Packages are looked for before anything is computed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tidegate.models.generative import Generative
from tidegate.models.manifest import EngineName, Manifest, Variant, Where
from tidegate.models.repository import save_manifest
from tidegate.tools.build.convert import gguf
from tidegate.tools.build.convert.genai import FILES as GENAI_FILES
from tidegate.tools.build.convert.genai import PACKAGES as GENAI_PACKAGES
from tidegate.tools.build.convert.genai import convert_to_genai
from tidegate.tools.build.convert.gguf import CONFIG, SUFFIX, TOKENIZER_CONFIG, WEIGHTS, convert_gguf
from tidegate.tools.build.convert.huggingface import read_json, take_over_folder
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.generation_cost import measure_generation
from tidegate.tools.build.generating import generating_manifest, generating_variant, read_generative
from tidegate.tools.build.progress import Progress, part_of
from tidegate.tools.build.staging import model_lock, staged_version

EDGE_SLOTS: Final = 4
POOL_SLOTS: Final = 16
_LEFTOVERS: Final = ("generation_config.json", "special_tokens_map.json")
_POOL_PACKAGES: Final = ("torch", "transformers")
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_PRECISIONS: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def add_generative(
    source: Path, root: Path, name: str, version: str, progress: Progress, *, where: Sequence[Where], force: bool
) -> Manifest:
    """Put the model into the repository at `root`.

    Raises:
        BuildError: it cannot be built, or the version exists and `force` is not set.
    """
    place = root / name / version
    if place.exists() and not force:
        raise BuildError(f"{place} exists; give another --version, or --force to replace it")
    with model_lock(root, name), staged_version(root, name, version) as folder:
        manifest = build_generative(source, folder, name, version, progress, where=where)
        save_manifest(folder, manifest)
    return manifest


def build_generative(
    source: Path,
    folder: Path,
    name: str,
    version: str,
    progress: Progress,
    *,
    where: Sequence[Where] = ("pool", "edge"),
    summary: str = "",
) -> Manifest:
    """Write the artefacts, the tokenizer and the chat template into `folder`, and return their manifest.

    Args:
        source: a GGUF file, or a folder as Hugging Face's tools write it.
        where: which variants are made.

    Raises:
        BuildError: a package is missing, or the source cannot be read, converted or run.
    """
    _check_packages(source, where)
    if source.suffix == SUFFIX:
        convert_gguf(source, folder, part_of(progress, 0.0, 0.5))
    else:
        take_over_folder(source, folder)
    generative = read_generative(folder)
    variants = []
    if "edge" in where:
        progress("converting to int4 ONNX", 0.5)
        convert_to_genai(folder, folder)
        # The runtime reads the tokenizer, and this beside it, where a text has to follow a schema.
        files = tuple(one for one in (*GENAI_FILES, TOKENIZER_CONFIG) if (folder / one).is_file())
        progress("measuring int4", 0.8)
        variants.append(_variant("int4", "onnxruntime-genai", ("edge",), folder, files, generative))
    if "pool" in where:
        precision = _precision(folder)
        progress(f"measuring {precision}", 0.85)
        variants.append(_variant(precision, "transformers", ("pool",), folder, (WEIGHTS, CONFIG), generative))
    else:
        (folder / WEIGHTS).unlink()
        (folder / CONFIG).unlink()
    used = {one.name for variant in variants for one in variant.files}
    for leftover in (*_LEFTOVERS, TOKENIZER_CONFIG):
        if leftover not in used:
            (folder / leftover).unlink(missing_ok=True)
    return generating_manifest(name, version, generative, tuple(reversed(variants)), summary=summary)


def _check_packages(source: Path, where: Sequence[Where]) -> None:
    """Raise BuildError for what is missing, now and not after a minute."""
    if source.suffix == SUFFIX and not source.is_file():
        raise BuildError(f"{source}: there is no such file")
    if source.suffix != SUFFIX and not source.is_dir():
        raise BuildError(f"{source}: is neither a {SUFFIX} file nor a folder as Hugging Face's tools write it")
    wanted = dict.fromkeys((*_POOL_PACKAGES, *(gguf.PACKAGES if source.suffix == SUFFIX else ())))
    if "edge" in where:
        wanted |= dict.fromkeys(GENAI_PACKAGES)
    missing = [one for one in wanted if importlib.util.find_spec(one) is None]
    if missing:
        extras = "build,edge-llm" if "onnxruntime_genai" in missing else "build"
        raise BuildError(f"building {source.name} needs {', '.join(missing)}: pip install 'tidegate[{extras}]'")


def _precision(folder: Path) -> str:
    return _PRECISIONS.get(_dtype(folder), "fp32")


def _dtype(folder: Path) -> str:
    config = read_json(folder / CONFIG)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _cache_bytes(folder: Path, engine: EngineName) -> int:
    """Of the keys and values of one token: in fp32 on an edge, in the weights' type in the pool."""
    config = read_json(folder / CONFIG)
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        values = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_dim
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BuildError(f"{folder / CONFIG}: does not say how large its attention cache is: {error!r}") from error
    return values * (4 if engine == "onnxruntime-genai" else _BYTES.get(_dtype(folder), 4))


def _variant(
    name: str, engine: EngineName, where: tuple[Where, ...], folder: Path, files: Sequence[str], generative: Generative
) -> Variant:
    from tidegate.engines.engine import load_generative_engine
    from tidegate.engines.errors import EngineError
    from tidegate.engines.generation.limits import GenerationLimits

    paths = [folder / one for one in files]
    limits = GenerationLimits(
        slots=EDGE_SLOTS if where == ("edge",) else POOL_SLOTS,
        context=generative.context,
        stop_tokens=generative.stop_tokens,
        vocabulary_size=generative.vocabulary_size,
    )
    try:
        running: Any = load_generative_engine(engine, paths[0], limits=limits)
        cost = measure_generation(running, generative, cache_bytes=_cache_bytes(folder, engine))
    except EngineError as error:
        raise BuildError(str(error)) from error
    return generating_variant(name, engine, name, where, paths, cost)
