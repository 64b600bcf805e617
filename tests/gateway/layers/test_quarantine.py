"""A sender of poison is refused for a minute, with the reason; the log has one line, and all others are served."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from gateway.core.admission.quarantine import FOR_S, TIMES, Quarantine
from gateway.layers.quarantine import QuarantineListener, quarantine
from gateway.layers.stack import Service, stack
from tests.support.gateway.conductor import FP32, Scene, target
from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.outcome import Overloaded, Poisonous
from tidegate.types import Call, Datatype, InferRequest, Reply, Tensor


class Stage:
    """A conductor behind the layer, over a pool that fails on whatever holds the byte 0xFF."""

    def __init__(self) -> None:
        self.pool = target("pool_main")
        self.scene = Scene({"pool_main": (self.pool, FP32)})
        self.held = Quarantine()
        self.scene.dispatcher.listener = QuarantineListener(self.held, clock.now)
        self.serve: Service = stack(quarantine(self.held, clock.now), inner=self.scene.dispatcher.infer)

    async def ask(self, tenant: str, *, poison: bool = False, content: int = 0) -> Reply:
        ids = Tensor("input_ids", Datatype.INT64, (1, 4), bytes([255 if poison else content] * 32))
        self.pool.error = Poisonous("the engine raised") if poison else None
        now = clock.now()
        return await self.serve(Call(InferRequest("minilm", (ids,)), "oip-http", now, now + 1.0, tenant=tenant))

    async def poison(self, tenant: str, times: int) -> None:
        for _ in range(times):
            with pytest.raises(Poisonous):
                await self.ask(tenant, poison=True)
            await self.ask("bystander")


@on_virtual_time
async def test_after_the_third_poison_its_tenant_is_told_why_it_is_refused_and_until_when() -> None:
    stage = Stage()
    with capture_logs() as logs:
        await stage.poison("acme", 3)
        for _ in range(2):
            with pytest.raises(Overloaded, match=r"^quarantined: requests of tenant 'acme' .* let in again in 60 s"):
                await stage.ask("acme")
        await stage.ask("bystander")
    told = [one for one in logs if one["event"] == "quarantined"]
    assert [(one["tenant"], one["last_target"]) for one in told] == [("acme", "pool/main")]
    assert stage.held.refused == 2
    stage.scene.assert_at_rest()


@on_virtual_time
async def test_the_refusal_names_the_time_that_is_left_and_ends_with_it() -> None:
    stage = Stage()
    await stage.poison("acme", 3)
    await clock.sleep(FOR_S / 2)
    with pytest.raises(Overloaded) as refusal:
        await stage.ask("acme")
    assert refusal.value.retry_after_s == pytest.approx(FOR_S / 2, abs=0.1)
    await clock.sleep(FOR_S / 2)
    await stage.ask("acme")


@on_virtual_time
async def test_who_names_no_tenant_is_refused_only_for_what_was_the_poison() -> None:
    stage = Stage()
    await stage.poison("", 3)
    with pytest.raises(Overloaded, match="requests like this one"):
        await stage.ask("", poison=True)
    await stage.ask("", content=7)


@on_virtual_time
async def test_a_pool_that_fails_every_caller_gets_none_refused() -> None:
    stage = Stage()
    for _ in range(2 * TIMES):  # were it believed, twice as often as is enough
        with pytest.raises(Poisonous):
            await stage.ask("acme", poison=True)
    assert stage.held.left_s("acme", clock.now()) == 0.0
