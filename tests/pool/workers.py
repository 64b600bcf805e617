"""The text model of `models.py` as a real ONNX file and as a fake worker that computes the same without a process.

ids from 0 to LAST_ID are summed under the mask; larger ids are out of the model's table, so its engine raises.
The spin model runs a loop as often as its input says: a computation of any length.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from tests.pool.models import TEXT, manifest_of
from tidegate.models.digest import sha256_of
from tidegate.models.repository import save_manifest
from tidegate.outcome import InternalError
from tidegate.workers.process import PIPELINE, Computed, EngineSpec, WorkerDied

LAST_ID = 999
BAD_ID = LAST_ID + 1
OPSET = 17

Arrays = dict[str, NDArray[Any]]


def text(length: int, *, rows: int = 1, fill: int = 1) -> Arrays:
    return {"ids": np.full((rows, length), fill, np.int64), "mask": np.ones((rows, length), np.int64)}


def spin(turns: int) -> Arrays:
    return {"turns": np.array(turns, np.int64)}


def write_text_model(path: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    integers, floats = TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["values"]),
            helper.make_node("Mul", ["values", "mask"], ["masked"]),
            helper.make_node("Cast", ["masked"], ["numbers"], to=floats),
            helper.make_node("ReduceSum", ["numbers", "axis"], ["sum"], keepdims=1),
            helper.make_node("Add", ["masked", "masked"], ["twice"]),
        ],
        "text",
        [helper.make_tensor_value_info(name, integers, ["batch", "sequence"]) for name in ("ids", "mask")],
        [
            helper.make_tensor_value_info("sum", floats, ["batch", 1]),
            helper.make_tensor_value_info("twice", integers, ["batch", "sequence"]),
        ],
        [
            helper.make_tensor("table", integers, [LAST_ID + 1], list(range(LAST_ID + 1))),
            helper.make_tensor("axis", integers, [1], [1]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return path


def write_spin_model(path: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    integers, boolean = TensorProto.INT64, TensorProto.BOOL
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Add", ["count", "one"], ["counted"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", integers, []),
            helper.make_tensor_value_info("going", boolean, []),
            helper.make_tensor_value_info("count", integers, []),
        ],
        [helper.make_tensor_value_info("goes_on", boolean, []), helper.make_tensor_value_info("counted", integers, [])],
        [helper.make_tensor("one", integers, [], [1])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "zero"], ["count"], body=body)],
        "spin",
        [helper.make_tensor_value_info("turns", integers, [])],
        [helper.make_tensor_value_info("count", integers, [])],
        [helper.make_tensor("zero", integers, [], [0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return path


def text_repository(root: Path) -> Path:
    """A repository with the text model, for a pool that need not wait for torch."""
    folder = root / TEXT.name / TEXT.version
    folder.mkdir(parents=True)
    path = write_text_model(folder / TEXT.variants[0].artefact)
    variant = msgspec.structs.replace(TEXT.variants[0], sha256=sha256_of(path), size_bytes=path.stat().st_size)
    save_manifest(folder, manifest_of(variants=(variant,)))
    return root


class FakeProcess:
    """A WorkerProcess without a process; passes the same contract (tests/contract/test_worker.py).

    Args:
        service_s: seconds that a call takes, by its inputs.
    """

    def __init__(self, service_s: Callable[[Arrays], float] = lambda _: 0.0) -> None:
        self.loaded: dict[str, EngineSpec] = {}
        self.begun: list[Arrays] = []
        self.fails: deque[Exception] = deque()  # raised by the next calls instead of computing
        self._service_s = service_s
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

    async def died(self) -> str:
        assert self._reason is not None
        return await asyncio.shield(self._reason)

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if self.alive:
            assert self._reason is not None
            self._reason.set_result(reason)

    async def load(self, spec: EngineSpec) -> float:
        self._check_alive()
        if not spec.artefact.exists():
            raise InternalError(f"{spec.artefact}: there is no such artefact")
        self.loaded[spec.key] = spec
        return 0.0

    async def infer(self, key: str, inputs: Arrays) -> Computed:
        self._check_alive()
        async with self._places, self._computing:
            self._check_alive()
            if key not in self.loaded:
                raise InternalError(f"no engine is loaded under {key!r}")
            self.begun.append(inputs)
            seconds = self._service_s(inputs)
            await self._work(seconds)
            if self.fails:
                raise self.fails.popleft()
            return Computed(_compute(inputs), seconds)

    async def _work(self, seconds: float) -> None:
        assert self._reason is not None
        await asyncio.wait([self._reason], timeout=seconds)
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.alive:
            reason = self._reason.result() if self._reason is not None else "was not started"
            raise WorkerDied(f"worker fake {reason}")


def _compute(inputs: Arrays) -> Arrays:
    if "turns" in inputs:
        return {"count": inputs["turns"].copy()}
    ids, mask = inputs["ids"], inputs["mask"]
    if ids.max() > LAST_ID:
        raise InternalError("text: an id is out of the table")
    masked = ids * mask
    return {"sum": masked.sum(1, keepdims=True).astype(np.float32), "twice": 2 * masked}
