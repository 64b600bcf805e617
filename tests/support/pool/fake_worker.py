"""A worker process without a process: the same contract (`tests/contract/test_worker.py`), on any clock.

It computes what the tests' models do, told apart by their inputs, and loads whatever artefact exists; `double` and
`rounds` need no file:

    x           y = 2x                                      the model `double`
    rounds      at once when asked for none, else never     the model `rounds`
    turns       count = turns                               `tests.cloud_pool.workers_support.write_spin_model`
    ids, mask   their sum; an id above LAST_ID is an error  `tests.cloud_pool.workers_support.write_text_model`
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from tidegate import clock
from tidegate.outcome import InternalError
from tidegate.workers.process import PIPELINE, ComputeResult, EngineSpec, LoadResult, WorkerDied

LAST_ID: Final = 999
BAD_ID: Final = LAST_ID + 1
_FILELESS: Final = ("double", "rounds")

Arrays = Mapping[str, NDArray[Any]]


class FakeWorker:
    """Mutable: `kill` it, have its next calls fail, and see what it has `loaded` and `begun`.

    Args:
        service_s: seconds that a call takes, by its inputs; may be replaced at any time.
    """

    def __init__(self, name: str = "fake", *, service_s: Callable[[Arrays], float] = lambda _: 0.0) -> None:
        self.name = name
        self.collected_s = 0.0
        self.service_s = service_s
        self.loaded: dict[str, EngineSpec] = {}
        self.begun: list[Arrays] = []
        self.fails: deque[Exception] = deque()  # raised by the next calls instead of computing
        self.kept_from_running_s: Callable[[], float] = lambda: 0.0
        self.kept_from_sleeping_s: Callable[[], float] = clock.now
        self._computing = asyncio.Lock()
        self._places = asyncio.Semaphore(PIPELINE)
        self._reason: asyncio.Future[str] | None = None

    async def __aenter__(self) -> Self:
        self._reason = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill("exited with status 0")

    @property
    def alive(self) -> bool:
        return self._reason is not None and not self._reason.done()

    @property
    def pid(self) -> int | None:
        """It is no process."""
        return None

    @property
    def starved_s(self) -> float:
        """As a test says."""
        return self.kept_from_running_s()

    @property
    def awake_s(self) -> float:
        """As a test says."""
        return self.kept_from_sleeping_s()

    async def died(self) -> str:
        assert self._reason is not None
        return await asyncio.shield(self._reason)

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if self.alive:
            assert self._reason is not None
            self._reason.set_result(reason)

    async def load(self, spec: EngineSpec) -> LoadResult:
        self._check_alive()
        if spec.artefact.stem not in _FILELESS and not spec.artefact.exists():
            raise InternalError(f"{spec.artefact}: there is no such artefact")
        self.loaded[spec.key] = spec
        return LoadResult(0.0)

    async def infer(self, key: str, inputs: Arrays, *, budget_s: float | None = None) -> ComputeResult:
        self._check_alive()
        async with self._places, self._computing:
            self._check_alive()
            if key not in self.loaded:
                raise InternalError(f"no engine is loaded under {key!r}")
            self.begun.append(inputs)
            seconds = inf if "rounds" in inputs and int(inputs["rounds"][0]) > 0 else self.service_s(inputs)
            await self._work(seconds)
            if self.fails:
                raise self.fails.popleft()
            return ComputeResult(_computed(inputs), seconds)

    async def _work(self, seconds: float) -> None:
        assert self._reason is not None
        await asyncio.wait([self._reason], timeout=seconds if seconds < inf else None)
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.alive:
            reason = self._reason.result() if self._reason is not None else "was not started"
            raise WorkerDied(f"worker {self.name} {reason}")

    def __repr__(self) -> str:
        return f"<FakeWorker {self.name} {'alive' if self.alive else 'gone'} {len(self.begun)} calls>"


def _computed(inputs: Arrays) -> dict[str, NDArray[Any]]:
    if "turns" in inputs:
        return {"count": inputs["turns"].copy()}
    if "rounds" in inputs:
        return {"counted": np.zeros(1, dtype=np.int64)}
    if "ids" not in inputs:
        return {"y": 2 * _given(inputs, "x")}
    ids, mask = inputs["ids"], _given(inputs, "mask")
    if ids.max() > LAST_ID:
        raise InternalError("text: an id is out of the table")
    masked = ids * mask
    return {"sum": masked.sum(1, keepdims=True).astype(np.float32), "twice": 2 * masked}


def _given(inputs: Arrays, name: str) -> NDArray[Any]:
    if name not in inputs:
        raise InternalError(f"input {name} is missing")
    return inputs[name]
