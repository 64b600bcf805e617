"""What an edge learns of a call's time: of calls that were handed over ahead, and beside those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.serving.edge_model import EdgeModel
from edge_agent.serving.scheduler import EdgeScheduler
from tests.support.loop import on_virtual_time, settle
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.estimate.service_time import ServiceTime
from tidegate.models.work import Work
from tidegate.outcome import InvalidRequest
from tidegate.serving.target_model import Computation, Computed
from tidegate.types import Call, InferRequest
from tidegate.workers.process import ComputeResult

MANIFEST = double_manifest()
PREDICTED_S = 0.001


class Costs(ServiceTime):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(((1.0, PREDICTED_S), (16.0, 16 * PREDICTED_S)))
        self.told_s: list[float] = []

    def record(self, units: float, observed_s: float) -> None:
        self.told_s.append(observed_s)
        super().record(units, observed_s)


class Runner:
    """One worker: its calls one after another, the answers of as many at once as `together` says."""

    def __init__(self, together: int = 1) -> None:
        self.name, self.manifest, self.generating, self.state = "double", MANIFEST, dict[str, Any](), "ready"
        self.costs = Costs()
        self._together = together
        self._computing = asyncio.Lock()
        self._computed: list[asyncio.Future[None]] = []

    def service_time(self, _variant: str) -> Costs:
        return self.costs

    async def infer(
        self, _variant: str, arrays: Mapping[str, Any], _patient_s: float, *, budget_s: float
    ) -> ComputeResult:
        answer = asyncio.get_running_loop().create_future()
        async with self._computing:
            takes_s = float(arrays.get("takes_s", PREDICTED_S))
            await clock.sleep(takes_s)
            if "takes_s" in arrays:
                raise InvalidRequest("a step refuses it")
            self._computed.append(answer)
            if len(self._computed) == self._together:
                for one in self._computed:
                    one.set_result(None)
                self._computed.clear()
        await answer
        return ComputeResult({}, PREDICTED_S / 2)


async def asked(model: EdgeModel, arrays: Mapping[str, Any]) -> Computed:
    now = clock.now()
    call = Call(InferRequest("double", ()), "link", now, now + 5.0)
    return await model.compute(Computation(call, dict(arrays), MANIFEST.variants[0], Work(1.0, 1, 1), now + 5.0, None))


@on_virtual_time
async def test_calls_that_are_answered_together_have_taken_an_equal_part_each() -> None:
    runner = Runner(together=4)
    async with EdgeScheduler(EdgeQueue(max_size=16, ahead_s=0.01)) as scheduler:
        model = EdgeModel("edge/x", runner, scheduler)  # type: ignore[arg-type]
        computed = await asyncio.gather(*[asked(model, {}) for _ in range(4)])
    assert runner.costs.told_s == pytest.approx([PREDICTED_S] * 4)
    assert [one.compute_s for one in computed] == pytest.approx([PREDICTED_S] * 4)


@on_virtual_time
async def test_what_a_refused_call_took_is_not_the_next_ones() -> None:
    runner = Runner()
    async with EdgeScheduler(EdgeQueue(max_size=16, ahead_s=0.01)) as scheduler:
        model = EdgeModel("edge/x", runner, scheduler)  # type: ignore[arg-type]
        refused = asyncio.create_task(asked(model, {"takes_s": 0.2}))
        await settle()
        good = await asked(model, {})
        with pytest.raises(InvalidRequest):
            await refused
    assert runner.costs.told_s == pytest.approx([PREDICTED_S])
    assert good.compute_s == pytest.approx(PREDICTED_S)
