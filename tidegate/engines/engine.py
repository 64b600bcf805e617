"""`load_engine` loads an artefact with the engine that its manifest names.

A missing runtime is an error that says what to install. TensorRT engine files (.engine, .plan) are known by name and by
suffix and refused, with the way out: such a file fits one GPU type and one TensorRT version, and the ONNX file that it
was made from runs with ONNX Runtime's provider for TensorRT (`onnx_providers.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tidegate.engines.errors import EngineError
from tidegate.engines.generation.limits import NO_LIMITS, GenerationLimits
from tidegate.engines.protocol import Arrays, Engine
from tidegate.generate.engine import GenerativeEngine
from tidegate.models.manifest import EngineName
from tidegate.models.packing import Packing
from tidegate.models.trusted_digests import TrustedDigests

# torch.export.load imports the last one of its row at its first call, and that is as much again as torch itself.
_IMPORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "onnx": ("tidegate.engines.onnx",),
    "paced": ("tidegate.engines.paced",),
    "torch-packed": ("tidegate.engines.encoder.torch_packed",),
    "torchscript": ("tidegate.engines.torch",),
    "torch-export": ("tidegate.engines.torch", "torch.export.pt2_archive"),
}
_TENSORRT_WAY_OUT = (
    "serve the ONNX file that it was made from (engine: onnx) in a pool with onnx_device: tensorrt, with "
    "pip install onnxruntime-gpu"
)


# Of engines that generate: where each is, what it is called, what it needs, and the extra that brings that.
_GENERATIVE: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "onnxruntime-genai": ("onnx_genai", "OnnxGenerativeEngine", "onnxruntime-genai", "edge-llm"),
    "paced": ("paced_generation", "PacedGenerativeEngine", "", ""),
    "transformers": ("continuous_batching", "ContinuousBatchingEngine", "transformers and PyTorch", "cloud-llm"),
}
_GENERATION: Final = "tidegate.engines.generation"


def import_runtime(engine: str, *, generates: bool = False) -> None:
    """Import what `load_engine`, or `load_generative_engine`, will import for `engine`, when the caller chooses.

    A runtime that is not installed is no error here, but of the loading, which says what to install.
    """
    with suppress(ImportError):
        for name in _generative_module(engine) if generates else _IMPORTS.get(engine, ()):
            importlib.import_module(name)


def load_engine(
    engine: EngineName,
    artefact: Path,
    *,
    outputs: tuple[str, ...],
    threads: int = 1,
    device: str = "cpu",
    paced_slow: float = 1.0,
    packing: Packing | None = None,
    compile: bool = False,
    trusted: TrustedDigests | None = None,
) -> Engine:
    """Load `artefact` with the runtime that `engine` names.

    Args:
        outputs: the manifest's output names, in graph order.
        paced_slow: how many times slower than its artefact a paced engine is; other engines ignore it.
        packing: the inputs that the artefact takes packed (`packing_of`); the returned engine takes plain batches too.
        compile: whether torch's engines use torch.compile, if a compiler is installed.
        trusted: digests of programs that may be loaded; None: those of the repository that the artefact lies in.

    Raises:
        EngineError: the runtime is not installed, does not have the device, or the artefact does not load.
    """
    plain = _load(
        engine,
        artefact,
        outputs,
        threads=threads,
        device=device,
        paced_slow=paced_slow,
        compile=compile,
        trusted=trusted,
    )
    if packing is None:
        return plain
    from tidegate.engines.packed import PackingEngine

    return PackingEngine(plain, packing)


def load_generative_engine(
    engine: str,
    artefact: Path,
    *,
    limits: GenerationLimits = NO_LIMITS,
    threads: int = 1,
    device: str = "cpu",
    paced_slow: float = 1.0,
) -> GenerativeEngine:
    """Load `artefact`, a file or a folder, with the generating runtime that `engine` names.

    Args:
        limits: what it may take at a time, and which tokens end a text.
        paced_slow: how many times slower than its artefact a paced engine is; other engines ignore it.

    Raises:
        EngineError: the runtime is not installed, does not have the device, or the artefact does not load.
    """
    if engine == "paced":
        from tidegate.engines.generation.paced_generation import PacedGenerativeEngine

        return PacedGenerativeEngine(artefact, limits=limits, slow=paced_slow)
    if engine not in _GENERATIVE:
        raise EngineError(f"{artefact}: no engine that generates is called {engine!r}: {', '.join(_GENERATIVE)}")
    _, name, what, extra = _GENERATIVE[engine]
    with _runtime(what, extra):
        module = importlib.import_module(*_generative_module(engine))
    loaded: GenerativeEngine = getattr(module, name)(artefact, limits=limits, threads=threads, device=device)
    return loaded


def _generative_module(engine: str) -> tuple[str, ...]:
    return (f"{_GENERATION}.{_GENERATIVE[engine][0]}",) if engine in _GENERATIVE else ()


def _load(
    engine: EngineName,
    artefact: Path,
    outputs: tuple[str, ...],
    *,
    threads: int,
    device: str,
    paced_slow: float,
    compile: bool,
    trusted: TrustedDigests | None,
) -> Engine:
    # Imported here: a pool need not have ONNX Runtime installed, and an edge need not have torch.
    if engine == "onnx":
        with _runtime("ONNX Runtime", "edge"):
            from tidegate.engines.onnx import OnnxEngine

        return OnnxEngine(artefact, threads=threads, device=device)
    if engine == "paced":
        from tidegate.engines.paced import PacedEngine

        return PacedEngine(artefact, outputs=outputs, slow=paced_slow)
    if engine == "tensorrt":
        raise EngineError(f"{artefact}: engine files of TensorRT are not run: {_TENSORRT_WAY_OUT}")
    if engine == "torch-packed":
        with _runtime("PyTorch and safetensors", "cloud"):
            from tidegate.engines.encoder.torch_packed import TorchPackedEngine

        return TorchPackedEngine(artefact, outputs=outputs, threads=threads, device=device)
    if engine == "onnxruntime-genai" or engine == "transformers":
        raise EngineError(f"{artefact}: the engine {engine} generates token by token; it has no single answer")
    with _runtime("PyTorch", "cloud"):
        from tidegate.engines.torch import TorchEngine

    return TorchEngine(
        engine, artefact, outputs=outputs, threads=threads, device=device, compile=compile, trusted=trusted
    )


@contextmanager
def _runtime(what: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise EngineError(
            f"this engine needs {what}, but {error.name} is not installed: pip install 'tidegate[{extra}]'"
        ) from error


__all__ = ["Arrays", "Engine", "EngineError", "import_runtime", "load_engine", "load_generative_engine"]
