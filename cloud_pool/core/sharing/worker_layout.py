"""Places: where the pool's workers compute, and how the cores are divided among those that share a CPU.

One worker per accelerator, because a device's memory belongs to one process and models on one device compete for it
anyway. On a CPU several workers of few threads often serve more than one of many: a small model's kernels are too short
to be worth dividing, and what each call does alone (launching, copying) then runs side by side.

Invariants: every place has a name of its own; pinned places share no core while there are as many cores as places;
threads times places is no more than the cores, where threads were left to us, but that each has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker computes. `threads` 0 takes all cores; `cores` empty means all that this process may use."""

    name: str
    device: str = "auto"
    threads: int = 0
    cores: frozenset[int] = frozenset()


def worker_places(
    devices: Sequence[str], *, workers: int, threads: int, cores: Sequence[int], pinned: bool = False, standby: int = 0
) -> list[WorkerPlace]:
    """One place for each worker, those in reserve last.

    Args:
        devices: at least one; each gets `workers`.
        threads: of one computation; 0 divides the cores among the workers, or leaves them all to a single one.
        cores: that this process may use.
        pinned: each worker gets cores of its own.
        standby: workers in reserve, shared out among the devices; they use the threads of those that they stand for.
    """
    count = len(devices) * workers
    own = _divided(cores, count) if pinned else [frozenset[int]()] * count
    if threads == 0 and (count > 1 or pinned):
        threads = max(1, len(cores) // count)
    places = [WorkerPlace(str(n), devices[n // workers], threads, own[n]) for n in range(count)]
    reserve = [places[n * workers % count] for n in range(standby)]
    return places + [replace(place, name=str(count + n)) for n, place in enumerate(reserve)]


def _divided(cores: Sequence[int], count: int) -> list[frozenset[int]]:
    """Neighbouring cores stay together: they share caches. With too few, several share one."""
    if len(cores) < count:
        return [frozenset({cores[n % len(cores)]}) for n in range(count)]
    cuts = [round(n * len(cores) / count) for n in range(count + 1)]
    return [frozenset(cores[low:high]) for low, high in pairwise(cuts)]
