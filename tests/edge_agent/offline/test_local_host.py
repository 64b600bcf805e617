"""A local caller's answer is judged by the version that computed it, whatever a rollout does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.core.help.help_choice import HelpLimits
from edge_agent.help.help_lines import HelpLines
from edge_agent.help.helping_host import HelpingHost
from edge_agent.offline.local_host import LocalHost, to_keep
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import EdgeLoadable, Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tests.support.loop import on_virtual_time
from tests.support.models.tiny_models import double_manifest
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.fleet.stored import Kind
from tidegate.link.frames import Greeting
from tidegate.models.manifest import Confidence, Manifest, Quality, Unsure
from tidegate.oip.request_constraints import ATTESTED, MIN_QUALITY_KEY, REQUIRE_KEY, VARIANT_KEY
from tidegate.outcome import ModelNotFound, NotSupported
from tidegate.runtime.backoff import Backoff
from tidegate.types import Call, Datatype, InferRequest

COMPUTE_S = 0.010
NOT_SURE = Call(
    InferRequest("double", (array_to_tensor("x", np.ones((1, 2), np.float32), Datatype.FP32),)), "test", 0.0
)


class NothingKept:
    """The policy of a device without a store."""

    store = None
    forwards = "none"

    def why_not(self) -> str:
        return "this device keeps nothing"

    def stored(self) -> None: ...

    def ttl_s(self, kind: Kind) -> float:
        return 0.0


def unsure_manifest(version: str = "1", unsure: Unsure = "accept") -> Manifest:
    """int8 is here and knows nothing apart; a better variant is in a pool."""
    (int8,) = double_manifest().variants
    int8 = replace(int8, quality=Quality("top1", 0.7, 1000))
    fp32 = replace(int8, name="fp32", precision="fp32", where=("pool",), quality=Quality("top1", 0.9, 1000))
    how = Confidence("y", "margin", 0.5, softmax=True, unsure=unsure)
    return replace(double_manifest(), version=version, variants=(int8, fp32), confidence=how)


def runner_of(manifest: Manifest) -> Runner:
    async def measure(*_: object) -> tuple[tuple[float, float], ...]:
        return ((1.0, COMPUTE_S),)

    async def warm(*_: object) -> None: ...

    return Runner(
        manifest,
        [EdgeLoadable(one, Path("double.onnx")) for one in manifest.variants_for("edge")],
        start_worker=lambda name: FakeWorker(name, service_s=lambda _: COMPUTE_S),
        measure=measure,
        warm=warm,
        backoff=Backoff(lambda: 0.5, base_s=1.0),
        on_change=lambda _: None,
    )


@asynccontextmanager
async def device(*manifests: Manifest, helps: bool = False) -> AsyncIterator[tuple[LocalHost, EdgeHost, list[Runner]]]:
    """Its local host, its own one, and a runner for each manifest, of which the first answers."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(EdgeScheduler(EdgeQueue(max_size=8)))
        runners = [await stack.enter_async_context(runner_of(manifest)) for manifest in manifests]
        own = EdgeHost("kiosk-1", runners[:1], scheduler, epoch=lambda: 1)
        helping = None
        if helps:
            lines = HelpLines(
                "edge/kiosk-1",
                lambda: Greeting("edge/kiosk-1", 1, "0"),
                gateways=dict,
                dialler_of=lambda *_: None,
                key="",
                draw=lambda: 0.5,
                max_message_bytes=1 << 20,
            )
            helping = HelpingHost(own, lines, HelpLimits(4, 1 << 20), may_use=lambda _: True, unsure=True)
        yield LocalHost(own, NothingKept(), helping=helping), own, runners


def now_called(**changes: Any) -> Call:
    return replace(NOT_SURE, arrived_at=clock.now(), **changes)


@pytest.mark.parametrize("helps", [False, True])
@on_virtual_time
async def test_an_answer_is_given_though_its_model_was_removed_while_it_was_computed(helps: bool) -> None:
    async with device(unsure_manifest(), helps=helps) as (host, own, _):
        asked = asyncio.create_task(host.infer(now_called()))
        await clock.sleep(COMPUTE_S / 2)
        own.unroute("double")
        reply = await asked
        assert reply.route is not None
        assert reply.route.provisional
        with pytest.raises(ModelNotFound):
            await host.infer(now_called())


@on_virtual_time
async def test_an_answer_is_judged_by_the_version_that_gave_it() -> None:
    always_sure = replace(double_manifest(), version="2")
    async with device(unsure_manifest(unsure="defer"), always_sure) as (host, own, runners):
        asked = asyncio.create_task(host.infer(now_called()))
        await clock.sleep(COMPUTE_S / 2)
        own.route(runners[1])
        with pytest.raises(NotSupported, match=r"sure by 0\.00, below 0\.5; it cannot be deferred"):
            await asked
        assert (await host.infer(now_called())).response.model_version == "2"


def test_all_that_was_demanded_is_kept_with_what_is_deferred() -> None:
    demanded = replace(NOT_SURE, variant="int8", min_quality=0.9, attested=True, pin="site", priority=2)
    kept = to_keep(demanded, "1").parameters
    assert (kept[VARIANT_KEY], kept[MIN_QUALITY_KEY], kept[REQUIRE_KEY]) == ("int8", 0.9, ATTESTED)
