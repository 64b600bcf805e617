"""A `ModelHost` whose one model echoes its input, with everything about it that a test wants to steer or see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidegate import clock
from tidegate.models.manifest import Axis, Cost, Manifest, TensorSpec, Variant
from tidegate.oip.host import ModelStatistics
from tidegate.outcome import ModelNotFound
from tidegate.types import Accepted, Call, Datatype, InferRequest, InferResponse, Reply, Tensor

ECHO = Manifest(
    name="echo",
    version="3",
    inputs=(TensorSpec("x", Datatype.UINT8, ("n",)),),
    outputs=(TensorSpec("y", Datatype.UINT8, ("n",)),),
    variants=(Variant("fp32", "echo.onnx", "onnx", "fp32", where=("edge", "pool"), sha256="", size_bytes=1),),
    cost=Cost("bytes", "x"),
    axes={"n": Axis(0, 2**31 - 1)},
)


def echo_request(raw: bytes = b"abc", *, id: str = "", model: str = "echo") -> InferRequest:
    return InferRequest(model, (Tensor("x", Datatype.UINT8, (len(raw),), raw),), id=id)


class EchoHost:
    """Answers with what came. `error` is raised instead; `gate`, when set up, holds every answer until it opens."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[Call] = []
        self.cancelled = 0
        self.begun = asyncio.Semaphore(0)
        self.left = asyncio.Semaphore(0)
        self.budgets_s: list[float | None] = []
        self.answer_bytes: int | None = None
        self.answered_by = "echo"
        self.takes_s = 0.0  # before it answers; it says 7 ms in any case, and a gateway believes what passed

    @property
    def server_name(self) -> str:
        return "echo-host"

    def ready(self) -> bool:
        return True

    def manifests(self) -> Sequence[Manifest]:
        return (ECHO,)

    def manifest(self, name: str, version: str = "") -> Manifest:
        if name != ECHO.name or version not in ("", ECHO.version):
            raise ModelNotFound(f"no model {name}")
        return ECHO

    def model_ready(self, name: str, version: str = "") -> bool:
        return name == ECHO.name

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        return (ModelStatistics(ECHO.name, ECHO.version),)

    async def infer(self, call: Call) -> Reply:
        self.calls.append(call)
        self.budgets_s.append(call.budget_s(clock.now()))
        if call.on_accepted is not None:
            call.on_accepted(Accepted(queue_ahead=len(self.calls) - 1, finish_in_s=0.25))
        self.begun.release()
        try:
            await self.gate.wait()
            if self.takes_s:
                await clock.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.left.release()
        if self.error is not None:
            raise self.error
        return self._reply(call)

    def _reply(self, call: Call) -> Reply:
        raw = call.request.inputs[0].raw if self.answer_bytes is None else bytes(self.answer_bytes)
        output = Tensor("y", Datatype.UINT8, (len(raw),), raw)
        return Reply(
            InferResponse(self.answered_by, ECHO.version, (output,), id=call.request.id),
            stages={"queue": 0.002, "compute": 0.005},
            batch_size=4,
            variant="fp32",
        )
