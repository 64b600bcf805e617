"""A device worker is a process on a device that holds every model of the pool and computes one batch at a time.

`cloud_pool/core/sharing/worker_layout.py` decides how many there are, and where. This is a thin use of
`WorkerProcess`: it adds what a device needs (where to load to, how many threads) and a guard against a worker that
neither answers nor dies, which a driver or a kernel can make of any process: after what the caller thinks far too long
for one call (`cloud_pool/core/health/watchdog.py`), and `hang_timeout_s` at most, it is ended, and that is then a death
like any other. Where this process stood still as well (a frozen machine), the worker gets its time anew: it was hardly
given any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol

from cloud_pool.core.batching.padding import Arrays
from tidegate.engines.generation.limits import limits_of
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.packing import packing_of
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.token_sink import TokenSink
from tidegate.workers.call_watchdog import CallWatchdog
from tidegate.workers.generation.sequence_watchdog import SequenceWatchdog, SilentWorker
from tidegate.workers.generation.warmup import SequenceComputer
from tidegate.workers.process import ComputeResult, EngineSpec, LoadResult, WorkerDied


class EngineProcess(SequenceComputer, SilentWorker, Protocol):
    """The part of `tidegate.workers.process.WorkerProcess` that a device worker uses."""

    @property
    def alive(self) -> bool: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def starved_s(self) -> float: ...
    @property
    def collected_s(self) -> float: ...
    async def load(self, spec: EngineSpec) -> LoadResult: ...
    async def infer(self, key: str, inputs: Arrays, *, budget_s: float | None = None) -> ComputeResult: ...
    async def died(self) -> str: ...


StartProcess = Callable[
    [str, frozenset[int]], AbstractAsyncContextManager[EngineProcess]
]  # a name, and cores to run on


@dataclass(frozen=True, slots=True)
class PoolLoadable:
    """A variant that is to run here, with its verified artefact. `manifest` is as the artefact sees it."""

    manifest: Manifest
    variant: Variant
    artefact: Path
    public: Manifest | None = None  # as callers see it, where a pipeline is around the model
    reload: int = 0  # tells apart what is loaded of one version while it is there twice, before and after a change
    onnx_device: str = ""  # of ONNX Runtime's, elsewhere than its worker (`onnx_placement.py`)

    @property
    def key(self) -> str:
        """Names the lane and the engine."""
        again = f"@{self.reload}" if self.reload else ""
        return f"{self.manifest.name}:{self.manifest.version}/{self.variant.name}{again}"


class DeviceWorker:
    """One process on one device, from its start to its end. The process is entered and left by its owner.

    Args:
        device: "cpu", "cuda", "cuda:1" or "auto".
        threads: of one computation on the CPU; 0 takes all cores.
        hang_timeout_s: after so long in one call the worker counts as hung, whatever the caller thinks.
        paced_slow: how many times slower than their artefacts paced engines are here.
    """

    def __init__(
        self, process: EngineProcess, *, device: str, threads: int, hang_timeout_s: float, paced_slow: float = 1.0
    ) -> None:
        self._process = process
        self._device = device
        self._threads = threads
        self._paced_slow = paced_slow
        self._hang_timeout_s = hang_timeout_s
        self.loaded = LoadResult(0.0)  # the last report of what it holds
        self.generated = 0  # answers
        self._hung = asyncio.Event()
        self._hung_for_s = 0.0
        self._watchdog = SequenceWatchdog(
            process, limit_s=hang_timeout_s, excused_s=lambda: process.starved_s, on_hung=self._give_up
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive and not self._hung.is_set()

    @property
    def starved_s(self) -> float:
        """Seconds in which the process was ready to run and got no core."""
        return self._process.starved_s

    @property
    def collected_s(self) -> float:
        """Seconds that the process spent on garbage collections."""
        return self._process.collected_s

    @property
    def on_device(self) -> tuple[int, int] | None:
        """Bytes that it holds of its device's own memory, and that there are; None where that is the machine's."""
        held_bytes, device_bytes = self.loaded.held_bytes, self.loaded.device_bytes
        return None if held_bytes is None or device_bytes is None else (held_bytes, device_bytes)

    async def load(self, loadable: PoolLoadable, *, cache_bytes: int = 0) -> LoadResult:
        """Load one engine. Raises InternalError, OutOfMemory or WorkerDied.

        Args:
            cache_bytes: of one that generates, for its attention caches; 0: as it likes.
        """
        outputs = tuple(spec.name for spec in loadable.manifest.outputs)
        variant = loadable.variant
        engine = variant.engine
        # ONNX Runtime takes no "auto": where it runs a pool's variant, that is on the CPU unless a device is named.
        device = loadable.onnx_device or ("cpu" if engine == "onnx" and self._device == "auto" else self._device)
        if device in ("cuda", "tensorrt") and self._device.startswith("cuda:"):
            device = f"{device}:{self._device.partition(':')[2]}"  # of several workers each has its own GPU
        spec = EngineSpec(
            loadable.key,
            engine,
            loadable.artefact,
            outputs,
            self._threads,
            device,
            paced_slow=self._paced_slow,
            packing=packing_of(loadable.manifest, variant.packed),
            compile=variant.compile,
            generation=limits_of(loadable.manifest, variant, cache_bytes=cache_bytes),
            sha256=variant.sha256,
        )
        loaded = await self._process.load(spec)
        if loaded.device_bytes is not None or self.loaded.device_bytes is None:  # the device's own word, if it has one
            self.loaded = loaded
        return loaded

    @property
    def memory_of(self) -> str:
        """Whose memory it holds its models in: "cpu", or the device's own name."""
        if self.loaded.device_bytes is None:
            return "cpu"
        return "cuda:0" if self._device in ("auto", "cuda") else self._device

    async def load_steps(self, spec: EngineSpec) -> LoadResult:
        """Load one side of a pipeline's steps. Raises InternalError or WorkerDied."""
        return await self._process.load(spec)

    async def infer(
        self, key: str, inputs: Arrays, patience_s: float = inf, *, budget_s: float | None = None
    ) -> ComputeResult:
        """Run one batch, or steps within `budget_s`.

        Raises:
            InternalError: the engine raised. InvalidRequest: a step cannot do this request.
            WorkerDied: the worker died, or was silent for `patience_s`.
        """
        within_s = min(patience_s, self._hang_timeout_s)
        try:
            async with asyncio.timeout(None) as limit:
                patience = CallWatchdog(limit, within_s, lambda: self._process.starved_s)
                try:
                    return await self._process.infer(key, inputs, budget_s=budget_s)
                finally:
                    patience.end()
        except TimeoutError:
            pass
        self._give_up(within_s)
        raise WorkerDied(f"the worker hung for {within_s:.3g} s in {key} and is ended")

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float | None = None,
    ) -> Generated:
        """As `WorkerProcess.generate`. Raises Unreachable where the worker hung."""
        async with self._watchdog.watching():
            answer = await self._process.generate(
                key, request, sink, token_interval_s=token_interval_s, first_token_s=first_token_s
            )
        self.generated += 1
        return answer

    def _give_up(self, silent_s: float) -> None:
        self._hung_for_s = silent_s
        self._hung.set()

    async def end(self) -> str:
        """Wait until the process has died or is given up as hung, and say which."""
        died = asyncio.create_task(self._process.died(), name="worker's end")
        hung = asyncio.create_task(self._hung.wait(), name="worker's hang")
        try:
            await asyncio.wait((died, hung), return_when=asyncio.FIRST_COMPLETED)
            return f"worker {died.result()}" if died.done() else f"worker hung for {self._hung_for_s:.3g} s"
        finally:
            await cancel_and_wait(died, hung)

    def __repr__(self) -> str:
        return f"<DeviceWorker on {self._device} {self._process!r}>"
