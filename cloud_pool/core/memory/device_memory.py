"""Device memory accounts for what a device holds, and reserves memory for each batch before it runs.

    limit ≥ what the workers hold (runtime and weights) + what the running batches may take

* **At start** the sum is made before anything is loaded (`shortfall`): models that cannot fit are refused by name,
  with what is needed, what there is and the way out, instead of being killed by the kernel minutes later.
* **Before a batch** its predicted bytes (`footprint.py`) are reserved. The largest batch that fits into the whole room
  is its model's cap, which the batcher keeps like any other limit. A batch that fits the cap but not what other
  workers' batches leave just now waits for them. A request that does not fit into the whole room is refused.
* **When it fails all the same** that is a kind of failure of its own (`tidegate.outcome.OutOfMemory`): the cap becomes
  half of what failed, at once, and grows back by 1/STEPS of that with each batch that comes near it: halving is safe
  and quick, growing slowly costs little. Twice what had failed means that whatever was wrong has passed.

Invariants: reservations are given back exactly once, also when a worker dies; a cap is never below one unit; what
failed at so many units is not tried at so many before at least STEPS / 2 batches have passed.

It leaves to others: measuring (`tidegate/workers/memory_meter.py`), waiting, splitting and trying again
(`cloud_pool/scheduling/scheduler.py`). It can be wrong where other processes take what we count on; then the caps learn
it.

Source: additive increase, multiplicative decrease as in Chiu and Jain, "Analysis of the Increase and Decrease
Algorithms for Congestion Avoidance" (1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from cloud_pool.core.memory.footprint import Footprint

DEFAULT_SHARE: Final = 0.9  # of the memory there is, because the machine also runs other programs
RUNTIME_BYTES: Final = {"onnx": 80 << 20, "torch-export": 300 << 20, "paced": 40 << 20}  # resident once imported
_ANY_RUNTIME_BYTES: Final = 300 << 20
STEPS: Final = 32
_LEAST_UNITS: Final = 1.0


class WorkCap:
    """The most work of one batch of a model, as out-of-memory failures teach it. Infinite until the first."""

    def __init__(self) -> None:
        self.units = inf
        self._failed_at = inf

    def failed(self, units: float) -> None:
        """Record that a batch of this size had no memory."""
        self._failed_at = min(units, self.units)
        self.units = max(_LEAST_UNITS, self._failed_at / 2)

    def passed(self, units: float) -> None:
        """Record that a batch of this size succeeded; the cap grows only if the batch was near it."""
        if self.units == inf or units < self.units / 2:
            return
        self.units += self._failed_at / STEPS
        if self.units >= 2 * self._failed_at:
            self.units = self._failed_at = inf

    def __repr__(self) -> str:
        return "<WorkCap none>" if self.units == inf else f"<WorkCap {self.units:g} after {self._failed_at:g} failed>"


class DeviceMemory:
    """One device's memory: how much each worker holds, and how much it has reserved for a batch.

    Args:
        limit_bytes: what may be used; infinite where it is unknown.
    """

    def __init__(self, limit_bytes: float = inf) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[str, float] = {}  # by worker
        self._reserved: dict[str, dict[int, float]] = {}  # by worker and batch

    @property
    def held_bytes(self) -> float:
        return sum(self._held.values())

    @property
    def room_bytes(self) -> float:
        """Bytes for all batches together when none is running."""
        return max(0.0, self.limit_bytes - self.held_bytes)

    @property
    def used_ratio(self) -> float:
        """Held and reserved memory as a share of the limit."""
        return (self.held_bytes + self.reserved_bytes()) / self.limit_bytes

    def reserved_bytes(self, *, but: str | None = None) -> float:
        """Bytes reserved by all workers, or all but one: each runs one batch at a time, so its largest counts."""
        return sum(max(batches.values(), default=0.0) for worker, batches in self._reserved.items() if worker != but)

    def free_bytes(self, worker: str) -> float:
        """Bytes for the next batch of a worker, beside what the others have reserved."""
        return max(0.0, self.room_bytes - self.reserved_bytes(but=worker))

    def hold(self, worker: str, held_bytes: float) -> None:
        """Set how much a worker holds in all while it is idle."""
        self._held[worker] = held_bytes

    def leave(self, worker: str) -> None:
        """Remove a worker, with all that it held and had reserved."""
        self._held.pop(worker, None)
        self._reserved.pop(worker, None)

    def reserve(self, worker: str, batch: int, batch_bytes: float) -> bool:
        """Take room for a worker's batch of this number; False when there is not enough just now."""
        if batch_bytes > self.free_bytes(worker):
            return False
        self._reserved.setdefault(worker, {})[batch] = batch_bytes
        return True

    def release(self, worker: str, batch: int) -> None:
        """Give back the reservation of a worker's batch that has ended."""
        self._reserved.get(worker, {}).pop(batch, None)

    def __repr__(self) -> str:
        taken = f"{human_size(self.held_bytes)} held, {human_size(self.reserved_bytes())} reserved"
        return f"<DeviceMemory {taken} of {human_size(self.limit_bytes)}>"


class LaneMemory:
    """The memory that one model's batches take on a device, and how large they may be."""

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.cap = WorkCap()

    def most_units(self, device: DeviceMemory) -> float:
        """The largest batch that may ever be formed there."""
        return min(self.cap.units, self.footprint.most_units(device.room_bytes))

    def fitting_units(self, device: DeviceMemory, worker: str) -> float:
        """The largest batch that may be formed for a worker now."""
        return min(self.cap.units, self.footprint.most_units(device.free_bytes(worker)))

    def passed(self, units: float, peak_bytes: float | None) -> None:
        """Record that a batch succeeded, with its peak memory if that was measured."""
        self.cap.passed(units)
        if peak_bytes is not None:
            self.footprint.record(units, peak_bytes)

    def __repr__(self) -> str:
        return f"<LaneMemory {self.footprint!r} {self.cap!r}>"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that one model needs on a device, once for each worker."""

    model: str
    engine: str
    weights_bytes: float
    least_batch_bytes: float  # of a single row of the least length


def needed_bytes(needs: Sequence[MemoryNeed], workers: int) -> float:
    """Bytes that all workers hold, with the largest of the models' smallest batches in each at once."""
    return workers * (
        sum(need.weights_bytes for need in needs)
        + _runtimes_bytes(needs)
        + max((need.least_batch_bytes for need in needs), default=0.0)
    )


def shortfall(needs: Sequence[MemoryNeed], *, workers: int, limit_bytes: float, device: str) -> str | None:
    """Why these models cannot be served here, as a sum with their names; None when they can."""
    needed = needed_bytes(needs, workers)
    if needed <= limit_bytes:
        return None
    parts = [f"runtime {human_size(_runtimes_bytes(needs))}"]
    parts += [f"{need.model} {human_size(need.weights_bytes)}" for need in sorted(needs, key=_heaviest_first)]
    parts += [f"the smallest batch {human_size(max(need.least_batch_bytes for need in needs))}"]
    each = "" if workers == 1 else f", for each of {workers} workers"
    fewer = "" if workers == 1 else ", fewer workers (key 'workers')"
    way_out = f"serve fewer models (key 'models') or smaller variants (key 'precision'){fewer}"
    return (
        f"what is to be served needs {human_size(needed)} of memory on {device} ({' + '.join(parts)}{each}), "
        f"but {human_size(limit_bytes)} may be used: {way_out}, or allow more (key 'memory_limit_bytes')"
    )


def human_size(size_bytes: float) -> str:
    """A size as a person reads it."""
    if size_bytes == inf:
        return "unlimited"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.0f} bytes"


def _runtimes_bytes(needs: Sequence[MemoryNeed]) -> float:
    return sum(RUNTIME_BYTES.get(kind, _ANY_RUNTIME_BYTES) for kind in _runtimes({need.engine for need in needs}))


def _runtimes(engines: set[str]) -> set[str]:
    """Both torch engines share one runtime."""
    return {"torch-export" if engine == "torchscript" else engine for engine in engines}


def _heaviest_first(need: MemoryNeed) -> float:
    return -need.weights_bytes
