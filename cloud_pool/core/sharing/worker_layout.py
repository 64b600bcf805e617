"""The worker layout places the pool's workers on devices, and divides the cores among workers that share a CPU.

One worker per accelerator, because a device's memory belongs to one process and models on one device compete for it
anyway. On a CPU several workers of few threads often serve more than one of many: a small model's kernels are too short
to be worth dividing, and what each call does alone (launching, copying) then runs side by side.

Invariants: every place has a unique name; pinned places share no core while there are as many cores as places;
threads times places is no more than the cores, where threads are not configured, except that each has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of one worker. `threads` 0 takes all cores; empty `cores` means all that this process may use."""

    name: str
    device: str = "auto"
    threads: int = 0
    cores: frozenset[int] = frozenset()


def worker_places(
    devices: Sequence[str], *, workers: int, threads: int, cores: Sequence[int], pinned: bool = False, standby: int = 0
) -> list[WorkerPlace]:
    """One place for each worker, the reserve last.

    Args:
        devices: at least one; each gets `workers`.
        threads: threads of one computation; 0 divides the cores among the workers, or leaves them all to a single one.
        cores: the cores that this process may use.
        pinned: whether each worker gets cores of its own.
        standby: workers in reserve, spread over the devices; they use the threads of the workers that they replace.
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
