"""Staging moves inputs to a GPU through reused pinned memory while the GPU computes something else.

A copy from ordinary memory makes the driver copy twice and both sides wait; from pinned memory the device fetches by
itself. Pinning costs more than the copy, so buffers are kept and used again (`BufferPool`). The worker's reader thread
prepares the next call (`prepare`) while the main thread computes the present one: its bytes go through a stream of
their own, and the stream that computes waits for them on the device, without either thread waiting.

A buffer is free again once the device has fetched it, which an event signals. Inputs that cannot be staged (no memory,
not numeric) are handed on unchanged, and copied when they are computed.

On a CPU nothing is staged: arrays lie in memory that was received for them, and engines read them in place.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_BYTES: Final = 4096
MOST_KEPT_BYTES: Final = 256 << 20  # of pinned memory, which the machine cannot use for anything else

log = logging.getLogger(__name__)  # a worker's stderr; engines know nothing of the process's own logs


class BufferPool:
    """Buffers by size class (powers of two), kept for the next time. Used by two threads.

    Args:
        allocate: makes a one-dimensional uint8 tensor of so many bytes.
        most_bytes: kept at most; what is over is left to the collector.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], *, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._allocate = allocate
        self._most_bytes = most_bytes
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self.kept_bytes = 0
        self.made = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer of at least so many bytes, with anything in it."""
        size_class = bucket_bytes(size_bytes)
        with self._lock:
            if free := self._free.get(size_class):
                self.kept_bytes -= size_class
                return free.pop()
            self.made += 1
        return self._allocate(size_class)

    def give(self, buffer: torch.Tensor) -> None:
        """It is not used any more."""
        size_bytes = buffer.numel()
        with self._lock:
            if self.kept_bytes + size_bytes <= self._most_bytes:
                self._free.setdefault(size_bytes, []).append(buffer)
                self.kept_bytes += size_bytes

    def __repr__(self) -> str:
        return f"<BufferPool {self.made} made, {self.kept_bytes} bytes kept>"


class Staged(dict[str, NDArray[Any]]):
    """A call's arrays, with those that are on the device already, and the event after which they are there."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], tensors: Mapping[str, torch.Tensor], there: Any) -> None:
        super().__init__(arrays)
        self.tensors = tensors
        self.there = there


class Staging:
    """One CUDA device's way in."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = BufferPool(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._fetched: deque[tuple[Any, torch.Tensor]] = deque()  # event and buffer, in order
        self._failed = False

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """The arrays, on their way to the device. Never raises, and never waits for the device."""
        if self._failed:
            return arrays
        try:
            return self._sent(arrays)
        except Exception as error:  # the driver's own, or no memory that can be pinned
            self._failed = True
            log.warning("inputs are not staged any more: %s: %s", type(error).__name__, error)
            return arrays

    def arrived(self, staged: Staged, name: str) -> torch.Tensor | None:
        """An input for the stream that computes, which waits for it; None if it was not staged."""
        tensor = staged.tensors.get(name)
        if tensor is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(staged.there)
            tensor.record_stream(current)
        return tensor

    def _sent(self, arrays: Mapping[str, NDArray[Any]]) -> Staged:
        self._reclaim()
        tensors, buffers = {}, []
        with torch.cuda.stream(self._stream):
            for name, array in arrays.items():
                if array.dtype.kind in "biuf" and array.nbytes:
                    buffer = self._pool.take(array.nbytes)
                    tensors[name] = filled(buffer, array).to(self._device, non_blocking=True)
                    buffers.append(buffer)
            there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(self._stream)
        self._fetched.extend((there, buffer) for buffer in buffers)
        return Staged(arrays, tensors, there)

    def _reclaim(self) -> None:
        while self._fetched and self._fetched[0][0].query():
            self._pool.give(self._fetched.popleft()[1])

    def __repr__(self) -> str:
        return f"<Staging to {self._device}, {len(self._fetched)} under way, {self._pool!r}>"


class CudaMeter:
    """What a CUDA device's allocator knows: a `DeviceMeter` (`tidegate/workers/memory_meter.py`).

    Args:
        beside: bytes that an engine holds and the allocator does not count as given out, such as those of CUDA graphs.
    """

    def __init__(self, device: torch.device, beside: Callable[[], int] | None = None) -> None:
        self._device = device
        self._beside = beside
        self._before = 0

    @property
    def held_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) + (self._beside() if self._beside else 0)

    @property
    def device_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = int(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        return max(0, int(torch.cuda.max_memory_allocated(self._device)) - self._before)


def bucket_bytes(size_bytes: int) -> int:
    """The size class that a buffer of so many bytes is of."""
    return max(LEAST_BYTES, 1 << max(0, size_bytes - 1).bit_length())


def filled(buffer: torch.Tensor, array: NDArray[Any]) -> torch.Tensor:
    """The array's values in a buffer's memory, as a tensor of its type and shape."""
    tensor = buffer[: array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
    np.copyto(tensor.numpy(), array)
    return tensor


def release_cached(device: torch.device) -> None:
    """After a failed allocation: give back what the allocator keeps in pieces that fit nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
