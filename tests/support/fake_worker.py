"""A worker process without a process: the same contract (`tests/contract/test_worker.py`), on any clock.

It knows two "artefacts" by file name: `double.onnx` answers y = 2x after `compute_s`, `rounds.onnx` answers at once
when it is asked for no rounds and never otherwise. Everything else does not load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tidegate import clock
from tidegate.outcome import InternalError
from tidegate.workers.process import Computed, EngineSpec, WorkerDied


class FakeWorker:
    def __init__(self, name: str = "fake", *, compute_s: float = 0.0) -> None:
        self.name = name
        self.compute_s = compute_s
        self.loaded: list[EngineSpec] = []
        self.calls = 0
        self._engines: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._end: asyncio.Future[str] | None = None

    async def __aenter__(self) -> Self:
        self._end = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill("exited with status 0")

    @property
    def alive(self) -> bool:
        return self._end is not None and not self._end.done()

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)

    async def died(self) -> str:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def load(self, spec: EngineSpec) -> float:
        self._check_alive()
        self.loaded.append(spec)
        if spec.artefact.stem not in ("double", "rounds"):
            raise InternalError(f"{spec.artefact}: there is no such artefact")
        self._engines[spec.key] = spec.artefact.stem
        return 0.0

    async def infer(self, key: str, inputs: Mapping[str, NDArray[Any]]) -> Computed:
        async with self._turn:
            self._check_alive()
            assert self._end is not None
            self.calls += 1
            work = asyncio.ensure_future(self._compute(key, inputs))
            try:
                await asyncio.wait((work, self._end), return_when=asyncio.FIRST_COMPLETED)
                self._check_alive()
                return work.result()
            finally:
                work.cancel()

    async def _compute(self, key: str, inputs: Mapping[str, NDArray[Any]]) -> Computed:
        engine = self._engines.get(key)
        if engine is None:
            raise InternalError(f"no engine is loaded under {key!r}")
        await clock.sleep(self.compute_s)
        if engine == "double":
            if "x" not in inputs:
                raise InternalError("input x is missing")
            return Computed({"y": 2 * inputs["x"]}, self.compute_s)
        if int(inputs["rounds"][0]) > 0:
            await asyncio.get_running_loop().create_future()
        return Computed({"counted": np.zeros(1, dtype=np.int64)}, self.compute_s)

    def _check_alive(self) -> None:
        if not self.alive:
            assert self._end is not None
            raise WorkerDied(f"worker {self.name} {self._end.result()}")

    def __repr__(self) -> str:
        return f"<FakeWorker {self.name} {'alive' if self.alive else 'gone'} {self.calls} calls>"
