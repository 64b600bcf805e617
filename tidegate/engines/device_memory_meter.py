"""The arena meter measures what an engine takes of a CUDA device whose runtime keeps an arena and tells no sizes.

ONNX Runtime allocates from an arena of its own that grows and is never given back, and has no call that tells its
size. What the device has free does tell it (`cudaMemGetInfo`): before the session is made, after it, and after a call.

    held       what the device lost while the session was made: the runtime's context, the weights
    a peak     what it lost since then, and only after a call that made the arena grow, since it used all of it. A call
               that fits into the arena may have used any part of it, so its peak is unknown, and said to be

The reading is torch's where torch is loaded already, and else that of the CUDA runtime which ONNX Runtime itself has
loaded: importing torch for it would cost a worker 300 MB.

It can be wrong where other processes allocate on the device between two readings: their bytes are counted to the call,
and memory is then admitted for less than there is, never for more. Where neither is there nothing is known, and the
engine has no meter.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

_LIBRARIES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")


class FreeMemory(NamedTuple):
    """What a device has free, of all that it has."""

    free_bytes: int
    total_bytes: int


ReadMemory = Callable[[], FreeMemory | None]


class ArenaMeter:
    """Mutable: a `DeviceMeter` (`tidegate/workers/memory_meter.py`). Make it before the engine, `loaded` after it."""

    def __init__(self, read: ReadMemory) -> None:
        self._read = read
        self._at_start = self._free()
        self._idle = self._at_start  # free once the engine was loaded
        self._before = self._at_start

    def loaded(self) -> None:
        """The engine is there: what the device has lost is what it holds."""
        self._idle = self._before = self._free()

    @property
    def held_bytes(self) -> int:
        return max(0, self._at_start - self._idle)

    @property
    def device_bytes(self) -> int:
        found = self._read()
        return found.total_bytes if found is not None else 0

    def begin(self) -> None:
        self._before = self._free()

    def peak_bytes(self) -> int | None:
        """What the arena holds beyond the loaded engine, after a call that made it grow; None after another."""
        free = self._free()
        return max(0, self._idle - free) if free < self._before else None

    def _free(self) -> int:
        found = self._read()
        return found.free_bytes if found is not None else 0

    def __repr__(self) -> str:
        return f"<ArenaMeter {self.held_bytes / 1e6:.0f} MB held>"


def arena_meter(index: int, read: ReadMemory | None = None) -> ArenaMeter | None:
    """A meter of the CUDA device of this number; None where nothing tells what it has free."""
    read = read or (lambda: cuda_memory(index))
    return ArenaMeter(read) if read() is not None else None


def cuda_memory(index: int, libraries: Iterable[str] = _LIBRARIES) -> FreeMemory | None:
    """What a CUDA device has free, by torch if that is loaded, or by the CUDA runtime."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return FreeMemory(*map(int, torch.cuda.mem_get_info(index)))
    return next((found for name in libraries if (found := _by_runtime(name, index)) is not None), None)


def _by_runtime(library: str, index: int) -> FreeMemory | None:
    try:
        runtime = ctypes.CDLL(library)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        failed = runtime.cudaSetDevice(index) or runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    except (OSError, AttributeError):  # there is no such library, or it is another one
        return None
    return None if failed else FreeMemory(free.value, total.value)
