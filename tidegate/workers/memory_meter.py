"""What a call takes at its peak beyond what its process held before: measured where it is spent, in the worker.

On a CPU it is the process's resident memory, as Linux keeps it: the high-water mark is set back before a call and read
after it. Allocators keep some of what a call gave back, and the next call then seems to need less. So what an engine's
calls have left resident is counted to the next call that is larger than all before it: it had use for all of that. To
smaller ones it is not counted: how much of it they used is not known, and a call of five tokens would then seem to
need what the largest batch did. On a GPU the runtime's own allocator is asked (`DeviceMeter`), which knows exactly
(torch), or the device, which knows after calls that took more than any before (ONNX Runtime).

Reading costs some 60 µs, so only calls that can teach something are measured: a larger one than before, and every
EVERY-th.

What was left and is given back to the system between two measured calls is seen only by what the process holds: never
more than it holds beyond its least since the engines were loaded can have been left.

It can be wrong where several threads allocate at once; a worker computes one call at a time. Without Linux' /proc
nothing is known, and said to be.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from tidegate import clock
from tidegate.engines.engine import Arrays, Engine
from tidegate.generate.engine import GenerativeEngine

EVERY: Final = 64
_RESET_PEAK: Final = "5"  # proc_pid_clear_refs(5): sets VmHWM back to the current size
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class DeviceMeter(Protocol):
    """What an engine on a device with memory of its own has as `device_meter`."""

    @property
    def held_bytes(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    def begin(self) -> None:
        """Set the peak back to what is held now."""
        ...

    def peak_bytes(self) -> int | None:
        """The most that was held since `begin`, beyond the engine itself; None where that is not known."""
        ...


def device_meter_of(engine: Engine | GenerativeEngine) -> DeviceMeter | None:
    """The meter of an engine whose device has memory of its own."""
    meter: DeviceMeter | None = getattr(engine, "device_meter", None)
    return meter


class Meter:
    """Mutable: `run` a call under it. One for each process.

    Args:
        proc: this process's folder of Linux' /proc.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._largest: dict[str, int] = {}  # bytes of inputs, by engine
        self._calls: dict[str, int] = {}
        self._left: dict[str, int] = {}  # resident after calls of this engine, and not before them
        self._least_resident: int | None = None

    def resident_bytes(self) -> int | None:
        """What this process holds now."""
        try:
            return int((self._proc / "statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return None

    def loaded(self) -> None:
        """Another engine is there, and with it a new least that this process holds."""
        self._least_resident = None

    def run(self, key: str, engine: Engine, inputs: Arrays) -> tuple[dict[str, NDArray[Any]], float, int | None]:
        """The outputs, the seconds that they took, and the bytes at the peak, or None when they were not measured."""
        device = device_meter_of(engine)
        size_bytes = sum(array.nbytes for array in inputs.values())
        largest = size_bytes > self._largest.get(key, -1)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        measured = largest or calls % EVERY == 0
        before = self._begin(device) if measured else None
        began_at = clock.now()
        outputs = engine.infer(inputs)
        compute_s = clock.now() - began_at
        if not measured:
            return outputs, compute_s, None
        self._largest[key] = max(size_bytes, self._largest.get(key, 0))
        if device is not None:
            return outputs, compute_s, device.peak_bytes()
        return outputs, compute_s, self._end(key, before, largest=largest)

    def _begin(self, device: DeviceMeter | None) -> int | None:
        if device is not None:
            device.begin()
            return None
        try:
            (self._proc / "clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return None
        return self.resident_bytes()

    def _end(self, key: str, before: int | None, *, largest: bool) -> int | None:
        after, peak = self.resident_bytes(), self._peak_bytes()
        if before is None or after is None or peak is None:
            return None
        least = self._least_resident = min(before, self._least_resident or before)
        left = min(self._left.get(key, 0), before - least)
        self._left[key] = max(0, left + after - before)
        return (left if largest else 0) + max(0, peak - before)

    def _peak_bytes(self) -> int | None:
        try:
            status = (self._proc / "status").read_text()
            return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
        except (OSError, ValueError, IndexError):
            return None

    def __repr__(self) -> str:
        return f"<Meter of {len(self._calls)} engines>"
