"""The worker of one device: a process that holds every model of the pool there, one batch at a time.

One process per device, because a device's memory belongs to one process and models on one device compete for it
anyway. This is a thin use of `WorkerProcess`: it adds what a device needs (where to load to, how many threads) and a
guard against a worker that neither answers nor dies, which a driver or a kernel can make of any process: after
`hang_timeout_s` in one call it is ended, and that is then a death like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cloud_pool.core.padding import Arrays
from tidegate.models.manifest import Manifest, Variant
from tidegate.workers.process import Computed, EngineSpec, WorkerDied


class Process(Protocol):
    """What is asked of `tidegate.workers.process.WorkerProcess`."""

    @property
    def alive(self) -> bool: ...
    async def load(self, spec: EngineSpec) -> float: ...
    async def infer(self, key: str, inputs: Arrays) -> Computed: ...
    async def died(self) -> str: ...


StartProcess = Callable[[str], AbstractAsyncContextManager[Process]]


@dataclass(frozen=True, slots=True)
class Loadable:
    """A variant that is to run here, with its verified artefact."""

    manifest: Manifest
    variant: Variant
    artefact: Path

    @property
    def key(self) -> str:
        """Names the lane and the engine."""
        return f"{self.manifest.name}:{self.manifest.version}/{self.variant.name}"


class DeviceWorker:
    """One process on one device, from its start to its end. The process is entered and left by its owner.

    Args:
        device: "cpu", "cuda", "cuda:1" or "auto".
        threads: of one computation on the CPU; 0 takes all cores.
        hang_timeout_s: after so long in one call the worker counts as hung.
    """

    def __init__(self, process: Process, *, device: str, threads: int, hang_timeout_s: float) -> None:
        self._process = process
        self._device = device
        self._threads = threads
        self._hang_timeout_s = hang_timeout_s
        self._hung = asyncio.Event()

    async def load(self, loadable: Loadable) -> None:
        """Load one engine. Raises InternalError or WorkerDied."""
        outputs = tuple(spec.name for spec in loadable.manifest.outputs)
        engine = loadable.variant.engine
        # ONNX Runtime takes no "auto": where it runs a pool's variant, that is on the CPU unless a device is named.
        device = "cpu" if engine == "onnx" and self._device == "auto" else self._device
        await self._process.load(EngineSpec(loadable.key, engine, loadable.artefact, outputs, self._threads, device))

    async def infer(self, key: str, inputs: Arrays) -> Computed:
        """Run one batch. Raises InternalError, or WorkerDied when the worker died or hung."""
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                return await self._process.infer(key, inputs)
        except TimeoutError as error:
            self._hung.set()
            raise WorkerDied(f"the worker hung for {self._hang_timeout_s:g} s in {key} and is ended") from error

    async def end(self) -> str:
        """Wait until the process has died or is given up as hung, and say which."""
        died = asyncio.create_task(self._process.died(), name="worker's end")
        hung = asyncio.create_task(self._hung.wait(), name="worker's hang")
        try:
            await asyncio.wait((died, hung), return_when=asyncio.FIRST_COMPLETED)
            return f"worker {died.result()}" if died.done() else f"worker hung for {self._hang_timeout_s:g} s"
        finally:
            for task in (died, hung):
                task.cancel()
            await asyncio.gather(died, hung, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<DeviceWorker on {self._device} {self._process!r}>"
