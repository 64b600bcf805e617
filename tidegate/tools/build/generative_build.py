"""A generating model is built in five steps: take over its weights, convert them for the edge, measure, describe, and
record golden answers (`evaluate/golden_record.py`).

    bf16   the weights as they are, or as a GGUF file's expand to: for the pool, by transformers
    int4   the same as ONNX with weights of four bits: for edges, by onnxruntime-genai

Packages, memory and disk are looked at before anything is computed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

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
from tidegate.tools.build.evaluate.golden_record import REFERENCE_ENGINE, recorded
from tidegate.tools.build.generating import generating_manifest, generating_variant, read_generative
from tidegate.tools.build.progress import Progress, part_of
from tidegate.tools.build.staging import check_vacant, model_lock, staged_version
from tidegate.workers.vitals import free_bytes

EdgePrecision = Literal["int4", "int8"]
GENAI_ENGINE: Final = "onnxruntime-genai"
EDGE_SLOTS: Final = 4
POOL_SLOTS: Final = 16
_LEFTOVERS: Final = ("generation_config.json", "special_tokens_map.json")
_POOL_PACKAGES: Final = ("torch", "transformers")
# The builder on weights of 269 MB: 1484 MB resident and 90 MB of disk for int4, 1700 MB and 271 MB for int8.
_BUILDER_BYTES: Final = 600_000_000
_MEMORY_RATIO: Final = 4
_DISK_RATIO: Final = {"int4": 0.5, "int8": 1.2}
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_PRECISIONS: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def add_generative(
    source: Path, root: Path, name: str, version: str, progress: Progress, *, where: Sequence[Where], force: bool
) -> Manifest:
    """Put the model into the repository at `root`.

    Raises:
        BuildError: it cannot be built, or the version exists and `force` is not set.
    """
    check_vacant(root, name, version, force=force)
    with model_lock(root, name):
        check_vacant(root, name, version, force=force)  # another may have added it meanwhile
        with staged_version(root, name, version) as folder:
            manifest = build_generative(source, folder, name, version, part_of(progress, 0.0, 0.7), where=where)
            manifest = asyncio.run(recorded(folder, manifest, part_of(progress, 0.7, 1.0)))
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
        variants.append(edge_variant(folder, generative, "int4", part_of(progress, 0.5, 0.85)))
    if "pool" in where:
        precision = _precision(folder)
        progress(f"measuring {precision}", 0.85)
        files = _there(folder, WEIGHTS, CONFIG, TOKENIZER_CONFIG)
        variants.append(_variant(precision, REFERENCE_ENGINE, ("pool",), folder, files, generative))
    else:
        (folder / WEIGHTS).unlink()
        (folder / CONFIG).unlink()
    used = {one.name for variant in variants for one in variant.files}
    for leftover in (*_LEFTOVERS, TOKENIZER_CONFIG):
        if leftover not in used:
            (folder / leftover).unlink(missing_ok=True)
    return generating_manifest(name, version, generative, tuple(reversed(variants)), summary=summary)


def edge_variant(folder: Path, generative: Generative, precision: EdgePrecision, progress: Progress) -> Variant:
    """Convert the weights in `folder` for edges, and measure what came of it.

    Raises:
        BuildError: a package, memory or disk is missing, or the builder or its runtime fails.
    """
    check_genai_packages(f"converting to {precision}")
    _check_room(folder, precision)
    progress(f"converting to {precision} ONNX", 0.0)
    convert_to_genai(folder, folder, precision=precision)
    # The runtime reads the tokenizer, and this beside it, where a text has to follow a schema.
    files = _there(folder, *GENAI_FILES, TOKENIZER_CONFIG)
    progress(f"measuring {precision}", 0.85)
    return _variant(precision, GENAI_ENGINE, ("edge",), folder, files, generative)


def check_genai_packages(what: str) -> None:
    """Raise BuildError for a package that the conversion lacks."""
    _check_there(GENAI_PACKAGES, what)


def _check_room(folder: Path, precision: EdgePrecision) -> None:
    """Raise BuildError where memory or disk would not do: the builder would be killed after a minute, or end oddly."""
    weights = (folder / WEIGHTS).stat().st_size
    wanted, free = int(_DISK_RATIO[precision] * weights), shutil.disk_usage(folder).free
    if free < wanted:
        raise BuildError(f"converting to {precision} writes {_mb(wanted)}, and {folder.parent} has {_mb(free)} free")
    wanted, memory = _BUILDER_BYTES + _MEMORY_RATIO * weights, free_bytes()
    if memory is not None and memory[0] < wanted:
        raise BuildError(
            f"converting weights of {_mb(weights)} to {precision} takes about {_mb(wanted)} of memory, and "
            f"{_mb(memory[0])} are free here: convert on a larger machine, and bring the repository's folder"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def _there(folder: Path, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if (folder / name).is_file())


def _check_packages(source: Path, where: Sequence[Where]) -> None:
    """Raise BuildError for what is missing, now and not after a minute."""
    if source.suffix == SUFFIX and not source.is_file():
        raise BuildError(f"{source}: there is no such file")
    if source.suffix != SUFFIX and not source.is_dir():
        raise BuildError(f"{source}: is neither a {SUFFIX} file nor a folder as Hugging Face's tools write it")
    wanted = dict.fromkeys((*_POOL_PACKAGES, *(gguf.PACKAGES if source.suffix == SUFFIX else ())))
    if "edge" in where:
        wanted |= dict.fromkeys(GENAI_PACKAGES)
    _check_there(wanted, f"building {source.name}")


def _check_there(packages: Iterable[str], what: str) -> None:
    missing = [one for one in packages if importlib.util.find_spec(one) is None]
    if missing:
        extras = "build,edge-llm" if "onnxruntime_genai" in missing else "build"
        raise BuildError(f"{what} needs {', '.join(missing)}: pip install 'tidegate[{extras}]'")


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
    return values * (4 if engine == GENAI_ENGINE else _BYTES.get(_dtype(folder), 4))


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
