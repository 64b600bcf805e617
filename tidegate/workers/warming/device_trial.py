"""Trying out a device: a worker process of its own runs the same calls on the processor and on the device, in turn.

A provider may refuse to start, compile for minutes, hang, or take its process with it. So it is tried in a process that
serves nobody, is given so long, and is ended: what goes wrong costs its model a line in the log, and nothing else.
While a trial lasts, its process holds the model twice.

Source of the comparison: `device_choice.py`. It can be wrong where something else uses one of the two meanwhile, which
calls in turn make less likely, and for inputs that are unlike those of `tidegate/models/example.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final, Protocol

import structlog

from tidegate import clock
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Manifest, Variant
from tidegate.outcome import ServeError
from tidegate.workers.process import ComputeResult, EngineSpec, LoadResult
from tidegate.workers.warming.device_choice import (
    PROCESSOR,
    Arrays,
    DeviceChoice,
    DeviceTrial,
    agreement,
    choose_device,
)
from tidegate.workers.warmup import sizes

WITHIN_S: Final = 60.0  # of one device: TensorRT and OpenVINO compile a model when they load it
_REPEATS: Final = 5
_MOST_SIZES: Final = 3

log = structlog.get_logger(__name__)


class TrialWorker(Protocol):
    """The part of a `WorkerProcess` that is needed here."""

    async def load(self, spec: EngineSpec) -> LoadResult: ...
    async def infer(self, key: str, inputs: Arrays) -> ComputeResult: ...


StartTrial = Callable[[str], AbstractAsyncContextManager[TrialWorker]]


class DeviceTrials:
    """Which of some devices a variant computes on.

    Args:
        devices: beside the processor, such as `candidates` gives.
        start: makes a worker process of a name.
        within_s: of one device, from the start of its process on.
    """

    def __init__(self, devices: Sequence[str], start: StartTrial, *, within_s: float = WITHIN_S) -> None:
        self._devices = tuple(devices)
        self._start = start
        self._within_s = within_s

    async def choose(self, manifest: Manifest, variant: Variant, spec: EngineSpec) -> DeviceChoice:
        """Try all of them, one after another. Never raises for what a device does.

        Args:
            spec: of the variant on the processor, without the steps of a pipeline.
        """
        trials = [await self._tried(device, manifest, variant, spec) for device in self._devices]
        choice = choose_device(trials)
        for reason in choice.reasons:
            log.info("device tried", model=manifest.name, variant=variant.name, outcome=reason)
        return choice

    async def _tried(self, device: str, manifest: Manifest, variant: Variant, spec: EngineSpec) -> DeviceTrial:
        try:
            async with asyncio.timeout(self._within_s), self._start(f"{manifest.name} on {device}") as worker:
                return await _compared(worker, device, manifest, variant, spec)
        except TimeoutError:
            return DeviceTrial(device, f"it was not through after {self._within_s:g} s")
        except ServeError as error:
            return DeviceTrial(device, error.message)

    def __repr__(self) -> str:
        return f"<DeviceTrials of {', '.join(self._devices) or 'nothing'}>"


async def _compared(
    worker: TrialWorker, device: str, manifest: Manifest, variant: Variant, spec: EngineSpec
) -> DeviceTrial:
    keys = PROCESSOR, device
    for key in keys:
        await worker.load(replace(spec, key=key, device=key))
    took: dict[str, list[tuple[float, ...]]] = {key: [] for key in keys}
    least = 1.0
    for lengths in _spread(sizes(manifest, variant)):
        inputs = example_arrays(manifest, lengths)
        first = [(await worker.infer(key, inputs)).outputs for key in keys]  # which also warms them
        least = min(least, agreement(*first))
        times: dict[str, list[float]] = {key: [] for key in keys}
        for _ in range(_REPEATS):
            for key in keys:
                began_at = clock.now()
                await worker.infer(key, inputs)
                times[key].append(clock.now() - began_at)
        for key in keys:
            took[key].append(tuple(times[key]))
    return DeviceTrial(device, "", tuple(took[PROCESSOR]), tuple(took[device]), least)


def _spread(planned: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The first, the last, and what is between, as far as so many go."""
    if len(planned) <= _MOST_SIZES:
        return list(planned)
    return [planned[at * (len(planned) - 1) // (_MOST_SIZES - 1)] for at in range(_MOST_SIZES)]
