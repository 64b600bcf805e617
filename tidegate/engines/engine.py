"""Loading an engine by its name in the manifest. A missing runtime is an error that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.engines.errors import EngineError
from tidegate.engines.protocol import Arrays, Engine
from tidegate.models.manifest import EngineName
from tidegate.models.packing import Packing


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
) -> Engine:
    """Load `artefact` with the runtime that `engine` names.

    Args:
        outputs: the manifest's output names, in graph order.
        paced_slow: how many times slower than its artefact a paced engine is; the others are as slow as they are.
        packing: what the artefact takes packed (`packing_of`); the engine that is returned takes plain batches as well.
        compile: by torch.compile, for torch's engines, where there is a compiler.

    Raises:
        EngineError: the runtime is not installed, does not have the device, or the artefact does not load.
    """
    if packing is None:
        return _load(engine, artefact, outputs, threads, device, paced_slow, compile)
    from tidegate.engines.packed import PackingEngine

    return PackingEngine(_load(engine, artefact, outputs, threads, device, paced_slow, compile), packing)


def _load(
    engine: EngineName,
    artefact: Path,
    outputs: tuple[str, ...],
    threads: int,
    device: str,
    paced_slow: float,
    compile: bool,
) -> Engine:
    # Imported here: a pool need not have ONNX Runtime, nor an edge torch.
    if engine == "onnx":
        with _runtime("ONNX Runtime", "edge"):
            from tidegate.engines.onnx import OnnxEngine

        return OnnxEngine(artefact, threads=threads, device=device)
    if engine == "paced":
        from tidegate.engines.paced import PacedEngine

        return PacedEngine(artefact, outputs=outputs, slow=paced_slow)
    if engine == "tensorrt":
        from tidegate.engines.tensorrt import TensorRTEngine

        return TensorRTEngine(artefact, device=device)
    if engine == "torch-packed":
        with _runtime("PyTorch and safetensors", "cloud"):
            from tidegate.engines.torch_packed import TorchPackedEngine

        return TorchPackedEngine(artefact, outputs=outputs, threads=threads, device=device)
    with _runtime("PyTorch", "cloud"):
        from tidegate.engines.torch import TorchEngine

    return TorchEngine(engine, artefact, outputs=outputs, threads=threads, device=device, compile=compile)


@contextmanager
def _runtime(what: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise EngineError(
            f"this engine needs {what}, but {error.name} is not installed: pip install 'tidegate[{extra}]'"
        ) from error


__all__ = ["Arrays", "Engine", "EngineError", "load_engine"]
