"""The parts that torch's engines share: the device, its precisions, and optional compilation."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch

from tidegate.engines.errors import EngineError

log = logging.getLogger(__name__)  # a worker's stderr; engines know nothing of the process's own logs


def device_of(name: str) -> torch.device:
    """The device that is called "cpu", "cuda", "cuda:1" or "auto" (CUDA where there is one). Raises EngineError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"{name!r} is not a device that torch knows") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"torch sees no CUDA device here, but {name!r} was asked for")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"torch sees {torch.cuda.device_count()} CUDA devices here, but {name!r} was asked for")
    return chosen


def say_if_emulated(what: str, dtype: torch.dtype, device: torch.device) -> None:
    """A line in the log where the device has no arithmetic of this type: emulated, it is slower than fp32.

    It is no error: answers are the same, and the cost is measured at warm-up and published in every offer.
    """
    if dtype is torch.bfloat16 and not has_bf16(device):
        log.warning("%s: this %s has no instructions for bf16 and emulates it; fp32 is faster here", what, device.type)
    if dtype is torch.float16 and device.type == "cpu":
        log.warning("%s: fp16 is for GPUs; on a CPU fp32 or bf16 is faster", what)


def has_bf16(device: torch.device) -> bool:
    """Whether it computes in bf16: AVX512_BF16 or AMX on a CPU, compute capability 8.0 on a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch.cpu's own questions, which older ones lack
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)


def compiled(what: str, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function` by torch.compile; as it is, with one line in the log, where that cannot be or fails at first use."""
    if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        log.warning("%s is not compiled: there is no C++ compiler here (c++, g++ or clang++)", what)
        return function
    return _Compiled(what, function)


class _Compiled:
    """A compiled function until it fails once, which falls back for good."""

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        self._what = what
        self._plain = function
        self._run: Callable[..., Any] = torch.compile(function, dynamic=True)
        self._proven = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._proven:
            return self._run(*args, **kwargs)
        try:
            answer = self._run(*args, **kwargs)
        except Exception as error:  # the compiler's own errors, and those of the tools that it calls
            first = str(error).partition("\n")[0]
            log.warning("%s is not compiled: %s: %s", self._what, type(error).__name__, first)
            self._run = self._plain
            answer = self._plain(*args, **kwargs)
        self._proven = True
        return answer

    def __repr__(self) -> str:
        return f"<_Compiled {self._what}{'' if self._run is not self._plain else ', fallen back'}>"
