"""What an engine is: arrays in, arrays out, in this process, blocking.

Engines know nothing of requests, queues or wires. They live in worker processes, where blocking is fine and a crash
is cheap. A missing runtime is an error that says what to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from tidegate.engines.errors import EngineError
from tidegate.models.manifest import EngineName

Arrays = Mapping[str, NDArray[Any]]


class Engine(Protocol):
    def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """All outputs by name, for inputs by name. Blocks. Raises EngineError."""
        ...


def load_engine(
    engine: EngineName, artefact: Path, *, outputs: tuple[str, ...], threads: int = 1, device: str = "cpu"
) -> Engine:
    """Load `artefact` with the runtime that `engine` names. `outputs` are the manifest's output names, in graph order.

    Raises:
        EngineError: the runtime is not installed, or the artefact does not load.
    """
    # Imported here: a pool need not have ONNX Runtime, nor an edge torch.
    if engine == "onnx":
        from tidegate.engines.onnx import OnnxEngine

        return OnnxEngine(artefact, threads=threads, device=device)
    from tidegate.engines.torch import TorchEngine

    return TorchEngine(engine, artefact, outputs=outputs, threads=threads, device=device)


__all__ = ["Arrays", "Engine", "EngineError", "load_engine"]
