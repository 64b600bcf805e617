"""Where TensorRT joins: serialized engines (.engine, .plan) are known by name and by suffix, and refused with a reason.

An engine file holds for one GPU type and one TensorRT version, so it is made where it is run. What is missing here is
the execution itself; `infer` of this class is its place. Until then the same ONNX file that an engine is made from runs
under `engine: onnx` with ONNX Runtime's CUDA provider, and the message says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from tidegate.engines.errors import EngineError

_INSTEAD = "serve the ONNX file that it was made from (engine: onnx), on a GPU with pip install onnxruntime-gpu"


class TensorRTEngine:
    """Raises EngineError: TensorRT is not installed, or this version of Tidegate does not run its engines."""

    def __init__(self, artefact: Path, *, device: str) -> None:
        if importlib.util.find_spec("tensorrt") is None:
            raise EngineError(
                f"{artefact}: TensorRT is not installed: pip install tensorrt (device {device!r}); or {_INSTEAD}"
            )
        raise EngineError(f"{artefact}: engine files of TensorRT are not run yet; {_INSTEAD}")

    def infer(self, inputs: Mapping[str, NDArray[Any]]) -> NoReturn:
        raise EngineError(f"engine files of TensorRT are not run yet; {_INSTEAD}")
